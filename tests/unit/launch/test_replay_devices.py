"""A ticket is computed again on the kind of device that computed it, or with the tolerance that follows from two kinds."""

from __future__ import annotations

import pytest
import torch

from launch.replay_devices import TOLERANCES, StageDevice, kinds_text, places, tolerance_between
from swarm.stage.device import compute_as, kind_of

CPU_ONLY = {"cpu": "cpu"}
BOTH = {"cuda": "cuda:1", "cpu": "cpu"}


@pytest.mark.parametrize(
    ("recorded", "devices", "wanted", "found"),
    [
        (["cpu", "cpu"], BOTH, None, [StageDevice("cpu", "cpu")] * 2),
        (["cuda", "cpu"], BOTH, None, [StageDevice("cuda:1", "cuda"), StageDevice("cpu", "cpu")]),
        (["cuda-tf32", "cuda"], BOTH, None, [StageDevice("cuda:1", "cuda-tf32"), StageDevice("cuda:1", "cuda")]),
        (["cuda-tf32", "cpu"], CPU_ONLY, None, [StageDevice("cpu", "cpu")] * 2),
        (["mps", None], BOTH, None, [StageDevice("cuda:1", "cuda")] * 2),
        ([None], CPU_ONLY, None, [StageDevice("cpu", "cpu")]),
        (["cpu", "cuda-tf32"], BOTH, "cuda:0", [StageDevice("cuda:0", "cuda"), StageDevice("cuda:0", "cuda-tf32")]),
        (["cuda", "cpu"], BOTH, "cpu", [StageDevice("cpu", "cpu")] * 2),
    ],
)
def test_each_stage_is_computed_on_its_own_kind_if_it_is_here(
    recorded: list[str | None], devices: dict[str, str], wanted: str | None, found: list[StageDevice]
) -> None:
    assert places(recorded, devices, wanted=wanted) == found


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "8bit"])
def test_one_kind_is_held_to_its_precision_whatever_the_wire(precision: str, compression: str) -> None:
    for kind in ("cpu", "cuda", "cuda-tf32"):
        here = [kind, "cpu"]
        assert tolerance_between(here, here, precision=precision, compression=compression) == TOLERANCES[precision]


@pytest.mark.parametrize(
    ("recorded", "here", "precision", "compression", "tolerance"),
    [
        ("cpu", "cuda", "fp64", "none", 1e-9),
        ("cpu", "cuda", "fp64", "8bit", 6.4e-3),
        ("cpu", "cuda", "fp64", "bf16", 2e-3),
        ("cpu", "cuda", "fp32", "none", 1e-3),
        ("cpu", "cuda", "fp32", "8bit", 6.4e-3),
        ("cuda", "cpu", "fp32", "fp16", 1e-3),
        ("cuda-tf32", "cuda", "fp32", "none", 1e-2),
        ("cuda-tf32", "cpu", "bf16", "none", 3e-2),
        ("cuda-tf32", "cpu", "fp64", "none", 1e-9),
        (None, "cpu", "fp32", "none", 1e-2),
    ],
)
def test_between_kinds_the_wire_and_shortened_products_count(
    recorded: str | None, here: str, precision: str, compression: str, tolerance: float
) -> None:
    kinds = (["cpu", recorded], ["cpu", here])
    assert tolerance_between(*kinds, precision=precision, compression=compression) == tolerance


def test_people_are_told_what_computed() -> None:
    assert kinds_text(["cpu", "cuda"], ["cpu", "cuda"]) == "computed on cpu and cuda as there"
    text = "stages 0, 2 on cpu here, on cuda there; stage 3 on cpu here, on a kind that is not told there"
    assert kinds_text(["cuda", "cpu", "cuda", None], ["cpu"] * 4) == text


def test_a_process_tells_whether_its_products_are_shortened() -> None:
    assert (kind_of("cpu"), kind_of("cuda:3")) == ("cpu", "cuda")
    try:
        compute_as("cuda-tf32")
        assert kind_of("cuda:0") == "cuda-tf32"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        compute_as("cuda")
    assert kind_of("cuda:0") == "cuda"
