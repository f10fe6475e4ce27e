"""A model whose stages occupy the compute thread for a set time, and data for it: a peer of any speed on any machine.

Everything but the time is real: parameters, gradients, averages and the optimizer. `model = "benchmarks.timed_stages:factory"`
with `model_options = {seconds = 0.3}`: of one micro-batch's forward (a third) and backward (two thirds). The environment
variable `SWARM_BENCHMARK_SLOWNESS` makes a process so many times slower than the others.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from swarm.base.config import RunConfig
from swarm.feed.datasets import ArraySamples
from swarm.stage.module import Tensors

WIDTH, CLASSES = 32, 4
SLOWNESS = "SWARM_BENCHMARK_SLOWNESS"


class _Occupy(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, None


class TimedStage(torch.nn.Module):
    """One Linear; the last stage classifies."""

    def __init__(self, stage: int, num_stages: int, seconds: float) -> None:
        super().__init__()
        self.is_last = stage == num_stages - 1
        self.seconds = seconds
        layer = torch.nn.Linear(WIDTH, CLASSES if self.is_last else WIDTH)
        generator = torch.Generator().manual_seed(stage)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        self.layers = torch.nn.ModuleDict({str(stage): layer})

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        (layer,) = self.layers.values()
        out = layer(inputs["x"])
        if not self.is_last:
            return {"x": _Occupy.apply(torch.tanh(out), self.seconds)}
        assert labels is not None
        loss_sum = F.cross_entropy(out, labels["y"], reduction="sum")
        return {"loss_sum": _Occupy.apply(loss_sum, self.seconds), "tokens": torch.tensor(len(labels["y"]))}


class TimedFactory:
    def __init__(self, config: RunConfig) -> None:
        self.num_stages = config.num_stages
        self._seconds = float(config.model_options["seconds"]) * float(os.environ.get(SLOWNESS, "1"))

    def build(self, stage: int) -> TimedStage:
        return TimedStage(stage, self.num_stages, self._seconds)


def factory(config: RunConfig) -> TimedFactory:
    return TimedFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    generator = np.random.Generator(np.random.PCG64(7))
    y = np.arange(512) % CLASSES
    x = generator.standard_normal((512, WIDTH)).astype(np.float32) + y[:, None]
    return ArraySamples({"x": x.astype(np.float32)}, {"y": y.astype(np.int64)})
