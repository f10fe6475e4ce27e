"""A model of one stage with many parameters and little to compute, for measurements of what state costs to move.

Compute is timed occupation of the compute thread, as a device would be occupied while the CPU is free; parameters,
gradients, averages and optimizer state are real. Options of the model: `num_elements`; `forward_s` and `backward_s` of a
micro-batch; `dense`, with which a sample uses every weight, so that no element of a gradient is zero.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from swarm.base.config import RunConfig
from swarm.feed.datasets import ArraySamples
from swarm.stage.module import Tensors

MODEL = "benchmarks.averages.big_stage:factory"
DATA = "benchmarks.averages.big_stage:dataset"
WIDTH = 8
FORWARD_S, BACKWARD_S = 0.1, 0.2


class _Occupied(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class BigStage(torch.nn.Module):
    """A regression with `num_elements` weights, of which a sample uses the first `WIDTH`, or `WIDTH` means over all."""

    def __init__(self, num_elements: int, seed: int, *, times: tuple[float, float], dense: bool) -> None:
        super().__init__()
        self._times = times
        self._dense = dense
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(num_elements, generator=generator) * 0.1)

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        assert labels is not None
        weight = self.weight.view(-1, WIDTH).mean(dim=0) if self._dense else self.weight[:WIDTH]
        product = _Occupied.apply(inputs["x"] @ weight, *self._times)
        loss_sum = (product - labels["y"]).square().sum()
        return {"loss_sum": loss_sum, "tokens": torch.tensor(len(product))}


class BigFactory:
    """The run's only stage."""

    num_stages = 1

    def __init__(self, config: RunConfig) -> None:
        options = config.model_options
        self._num_elements = int(options["num_elements"])
        self._times = float(options.get("forward_s", FORWARD_S)), float(options.get("backward_s", BACKWARD_S))
        self._dense = bool(options.get("dense", False))
        self._seed = config.seed

    def build(self, stage: int) -> BigStage:
        return BigStage(self._num_elements, self._seed, times=self._times, dense=self._dense)


def factory(config: RunConfig) -> BigFactory:
    return BigFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    """Points on a plane; the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(7))
    x = generator.standard_normal((1024, WIDTH)).astype(np.float32)
    return ArraySamples({"x": x}, {"y": x.sum(axis=1)})
