"""`launch_local` on a GPU trains as on a CPU: its graphs, streams and kernels change no loss."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from processes import environment, launcher

WITHIN_S = 120.0
SHAPE = ["--stages", 2, "--peers-per-stage", 1, "--steps", 6, "--precision", "fp64", "--compression", "none"]


def losses(directory: Path, device: str, *argv: object) -> tuple[list[float], str]:
    """Loss of each step, and what the stages logged."""
    metrics, state = directory / f"{device[:4]}.jsonl", directory / device[:4]
    where = ["--device", device, "--state-dir", state, "--metrics", metrics, "--log-level", "info"]
    command = launcher("local", *SHAPE, *where, *argv)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    logs = "".join(log.read_text() for log in (state / "logs").glob("stage-*.log"))
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()], logs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(
    "argv",
    [
        (), ("--delay-steps", 1), ("--frozen", "model.layers.0.*", "--compression", "bf16"),
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
