"""`launch_local` on a GPU trains as on a CPU: its graphs, streams and kernels change no loss. What it recorded is replayed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from launch.replay import main as replay_ticket
from swarm.testing.processes import environment, launcher

WITHIN_S = 120.0
SHAPE = ["--stages", 2, "--peers-per-stage", 1, "--steps", 6, "--precision", "fp64", "--compression", "none"]


def losses(directory: Path, device: str, *argv: object, **variables: str) -> tuple[list[float], str]:
    """Loss of each step, and what the stages logged."""
    metrics, state = directory / f"{device[:4]}.jsonl", directory / device[:4]
    where = ["--device", device, "--state-dir", state, "--metrics", metrics, "--log-level", "info"]
    command = launcher("local", *SHAPE, *where, *argv)
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    logs = "".join(log.read_text() for log in (state / "logs").glob("stage-*.log"))
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()], logs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--delay-steps", 1),
        ("--frozen", "model.layers.0.*", "--compression", "bf16"),
        # In order, since each micro-batch meets a copy that those before have moved.
        ("--mode", "local", "--inner-batch-size", 16, "--trainers", 1, "--in-flight", 1),
    ],
    ids=["synchronous", "delayed", "partly frozen", "local"],
)
def test_a_gpu_trains_as_a_cpu_does(argv: tuple[object, ...], tmp_path: Path) -> None:
    expected, _ = losses(tmp_path, "cpu", *argv)
    found, logs = losses(tmp_path, "cuda:0", *argv)
    assert found == pytest.approx(expected, rel=1e-8)
    assert logs.count("they are used") == 2, "one line from each stage: so small a model is all launches"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(
    ("device", "shortened", "kind", "other", "tolerances"),
    [
        ("cpu", "0", "cpu", "cuda:0", (1e-3, 6.4e-3)),
        ("cuda:0", "0", "cuda", "cpu", (1e-3, 6.4e-3)),
        ("cuda:0", "1", "cuda-tf32", "cpu", (1e-3, 1e-2)),
    ],
    ids=["cpu", "gpu", "gpu with TF32"],
)
def test_a_ticket_is_replayed_on_the_kind_of_device_that_computed_it_and_another_accuses_nobody(
    device: str,
    shortened: str,
    kind: str,
    other: str,
    tolerances: tuple[float, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses(tmp_path, device, "--precision", "fp32", "--compression", "8bit", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=shortened)
    argv = ["--checkpoints", str(tmp_path / device[:4]), "--step", "1", "--log-format", "json"]
    try:
        for where, tolerance in zip(([], ["--device", other]), tolerances, strict=True):
            code = replay_ticket([*argv, *where])
            *stages, verdict = map(json.loads, capsys.readouterr().out.splitlines())
            assert (code, verdict["tolerance"]) == (0, tolerance), (stages, verdict)
            assert [line["computed_on"] for line in stages] == [kind] * 2
            same = [line["computed_on_here"] == kind for line in stages]
            assert same == [not where] * 2, stages
    finally:
        torch.set_float32_matmul_precision("highest")
