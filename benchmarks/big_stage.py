"""A model of one stage with many parameters and little to compute, for measurements of what state costs to move.

Compute is timed occupation of the compute thread (`FORWARD_S` and `BACKWARD_S` for a micro-batch), as a device would be
occupied while the CPU is free; parameters, gradients, averages and optimizer state are real.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from swarm.base.config import RunConfig
from swarm.feed.datasets import ArraySamples
from swarm.stage.module import Tensors

WIDTH = 8
FORWARD_S, BACKWARD_S = 0.1, 0.2


class _Occupied(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class BigStage(torch.nn.Module):
    """A regression with `num_elements` weights, of which a sample uses `WIDTH`."""

    def __init__(self, num_elements: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(num_elements, generator=generator) * 0.1)

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        assert labels is not None
        x = inputs["x"]
        product = _Occupied.apply(x @ self.weight[:WIDTH])
        loss_sum = (product - labels["y"]).square().sum()
        return {"loss_sum": loss_sum, "tokens": torch.tensor(len(x))}


class BigFactory:
    """`model_options.num_elements` weights in the run's only stage."""

    num_stages = 1

    def __init__(self, config: RunConfig) -> None:
        self._num_elements = int(config.model_options["num_elements"])
        self._seed = config.seed

    def build(self, stage: int) -> BigStage:
        return BigStage(self._num_elements, self._seed)


def factory(config: RunConfig) -> BigFactory:
    return BigFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    """Points on a plane; the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(7))
    x = generator.standard_normal((1024, WIDTH)).astype(np.float32)
    return ArraySamples({"x": x}, {"y": x.sum(axis=1)})
