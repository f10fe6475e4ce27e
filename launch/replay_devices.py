"""On what a ticket is computed again, and which difference then counts as none. Pure; must not import torch.

A kind of device is written as the swarm tells it: `cpu` or `cuda`, and `cuda-tf32` where fp32 products keep ten bits of
their factors (`swarm.stage.device.kind_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.base.choices import ROUNDING

#: Norms that differ by less, relatively, are the same on devices of one kind: another order of a sum makes so much.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
_TF32 = "-tf32"
_UNTOLD = "a kind that is not told"


@dataclass(frozen=True)
class StageDevice:
    """Where one stage is computed."""

    device: str
    kind: str


def places(recorded: Sequence[str | None], devices: Mapping[str, str], *, wanted: str | None) -> list[StageDevice]:
    """By stage: the kind of device that computed it in the swarm, if this machine has one, else the first of `devices`.

    Args:
        recorded: kinds, by stage; None where the record does not tell.
        devices: this machine's by type, the preferred one first: `{"cuda": "cuda:0", "cpu": "cpu"}`.
        wanted: the device that the operator chose for all stages.
    """

    def place(kind: str | None) -> StageDevice:
        type_ = (kind or "").removesuffix(_TF32)
        device = wanted or devices.get(type_) or next(iter(devices.values()))
        here = device.partition(":")[0]
        return StageDevice(device, kind if kind is not None and here == type_ else here)

    return [place(kind) for kind in recorded]


def tolerance_between(recorded: Sequence[str | None], here: Sequence[str], *, precision: str, compression: str) -> float:
    """The relative difference of norms that two kinds of devices make by themselves.

    Args:
        recorded, here: kinds, by stage.
        precision, compression: of the run.
    """
    tolerance = TOLERANCES[precision]
    different = {kind for pair in zip(recorded, here, strict=True) if pair[0] != pair[1] for kind in pair}
    if different:  # a number near the middle of two codes is coded as either, and so differs by the code's step at most
        tolerance = max(tolerance, ROUNDING[compression])
    if precision == "fp32" and any(kind is None or kind.endswith(_TF32) for kind in different):
        tolerance = max(tolerance, TOLERANCES["fp16"])  # whose numbers are as long
    return tolerance


def kinds_text(recorded: Sequence[str | None], here: Sequence[str]) -> str:
    """For people: what computed the stages, there and here."""
    if list(recorded) == list(here):
        return f"computed on {' and '.join(sorted(set(here)))} as there"
    stages: dict[tuple[str | None, str], list[int]] = {}
    for stage, pair in enumerate(zip(recorded, here, strict=True)):
        if pair[0] != pair[1]:
            stages.setdefault(pair, []).append(stage)
    return "; ".join(
        f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} on {own} here, on {other or _UNTOLD} there"
        for (other, own), numbers in stages.items()
    )
