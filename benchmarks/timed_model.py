"""A model that computes nothing and occupies its compute thread for a set time, so that a benchmark sees all but compute.

`model = "benchmarks.timed_model:factory"`, `--data benchmarks.timed_model:dataset`, from the repository's root. Options of the
model: `forward_s` and `backward_s` (lists with an entry for each stage), `width` (elements of a sample at every boundary),
`layers` that share a stage's time (default: 1), and `hang`, a file with the ids of processes whose next layer never ends.
A process of another speed has it in the environment variable `TIMED_MODEL_SPEED`: 0.5 takes twice the time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarm.base.config import RunConfig
from swarm.feed.datasets import ArraySamples
from swarm.stage.module import Tensors

MODEL = "benchmarks.timed_model:factory"
DATA = "benchmarks.timed_model:dataset"
SPEED_VARIABLE = "TIMED_MODEL_SPEED"
WIDTH = 4096


def _occupy(seconds: float, hang: Path | None) -> None:
    if hang is not None and hang.exists() and str(os.getpid()) in hang.read_text().split():
        seconds = 86400.0
    time.sleep(seconds)


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float, hang: Path | None) -> torch.Tensor:
        ctx.backward_s, ctx.hang = backward_s, hang
        _occupy(forward_s, hang)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        _occupy(ctx.backward_s, ctx.hang)
        return gradient, None, None, None


class TimedLayer(torch.nn.Module):
    def __init__(self, width: int, forward_s: float, backward_s: float, hang: Path | None) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.occupied = (forward_s, backward_s, hang)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Occupy.apply(x.to(self.scale.dtype) * self.scale, *self.occupied)


class TimedStage(torch.nn.Module):
    def __init__(
        self,
        stage: int,
        num_stages: int,
        width: int,
        forward_s: float,
        backward_s: float,
        *,
        num_layers: int = 1,
        hang: Path | None = None,
    ) -> None:
        super().__init__()
        self.is_last = stage == num_stages - 1
        times = forward_s / num_layers, backward_s / num_layers
        self.layers = torch.nn.ModuleDict({f"{stage}_{n}": TimedLayer(width, *times, hang) for n in range(num_layers)})

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        x = inputs["x"]
        for layer in self.layers.values():
            x = layer(x)
        if not self.is_last:
            return {"x": x}
        assert labels is not None
        return {"loss_sum": (x.mean(dim=1) - labels["y"]).square().sum(), "tokens": torch.tensor(len(x))}


class TimedFactory:
    def __init__(self, config: RunConfig) -> None:
        self.num_stages = config.num_stages
        options = self._options = config.model_options
        self._width = int(options.get("width", WIDTH))
        speed = float(os.environ.get(SPEED_VARIABLE, "1"))
        self._times = [(f / speed, b / speed) for f, b in zip(options["forward_s"], options["backward_s"], strict=True)]

    def build(self, stage: int) -> TimedStage:
        times, options = self._times[stage], self._options
        hang = Path(options["hang"]) if "hang" in options else None
        return TimedStage(stage, self.num_stages, self._width, *times, num_layers=options.get("layers", 1), hang=hang)


def factory(config: RunConfig) -> TimedFactory:
    return TimedFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    """64 samples of whole numbers, so that no gradient goes back to the trainer."""
    x = np.arange(64 * int(config.model_options.get("width", WIDTH)), dtype=np.int64).reshape(64, -1) % 3
    return ArraySamples({"x": x}, {"y": np.zeros(64, np.float32)})
