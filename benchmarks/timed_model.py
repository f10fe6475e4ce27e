"""A model that computes nothing and occupies its compute thread for a set time, so that a benchmark sees all but compute.

`model = "benchmarks.timed_model:factory"`, `--data benchmarks.timed_model:dataset`, from the repository's root. Options of the
model: `forward_s` and `backward_s` (lists with an entry for each stage) and `width` (elements of a sample at every boundary).
A process of another speed has it in the environment variable `TIMED_MODEL_SPEED`: 0.5 takes twice the time.
"""

from __future__ import annotations

import os
import time
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


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class TimedStage(torch.nn.Module):
    def __init__(self, stage: int, num_stages: int, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.is_last = stage == num_stages - 1
        self.times = (forward_s, backward_s)
        self.scales = torch.nn.ParameterDict({str(stage): torch.ones(width)})

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        scale = next(iter(self.scales.values()))
        x = _Occupy.apply(inputs["x"].to(scale.dtype) * scale, *self.times)
        if not self.is_last:
            return {"x": x}
        assert labels is not None
        return {"loss_sum": (x.mean(dim=1) - labels["y"]).square().sum(), "tokens": torch.tensor(len(x))}


class TimedFactory:
    def __init__(self, config: RunConfig) -> None:
        self.num_stages = config.num_stages
        options = config.model_options
        self._width = int(options.get("width", WIDTH))
        speed = float(os.environ.get(SPEED_VARIABLE, "1"))
        self._times = [(f / speed, b / speed) for f, b in zip(options["forward_s"], options["backward_s"], strict=True)]

    def build(self, stage: int) -> TimedStage:
        return TimedStage(stage, self.num_stages, self._width, *self._times[stage])


def factory(config: RunConfig) -> TimedFactory:
    return TimedFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    """64 samples of whole numbers, so that no gradient goes back to the trainer."""
    x = np.arange(64 * int(config.model_options.get("width", WIDTH)), dtype=np.int64).reshape(64, -1) % 3
    return ArraySamples({"x": x}, {"y": np.zeros(64, np.float32)})
