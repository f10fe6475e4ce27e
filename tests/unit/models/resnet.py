"""A small ResNet with BatchNorm and its pictures, as a user would write them, cut into three stages between its blocks.

`model = "tests.unit.models.resnet:factory"`, `--data tests.unit.models.resnet:dataset`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.datasets import ArraySamples
from swarm.stage.module import Tensors

WIDTHS, CLASSES, SIZE = (4, 6, 8), 4, 8


class Block(nn.Module):
    """Two convolutions and the way past them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.past(x))


class ResNetStage(nn.Module):
    """One block; the first stage has the stem before it, the last one the classifier after it."""

    def __init__(self, stage: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage = stage
        layers: dict[str, nn.Module] = {}
        if stage == 0:
            layers["stem"] = nn.Sequential(
                nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()
            )
        layers[f"block{stage}"] = Block(WIDTHS[max(0, stage - 1)], WIDTHS[stage])
        self.layers = nn.ModuleDict(layers)
        self.is_last = stage == len(WIDTHS) - 1
        if self.is_last:
            self.head = nn.Linear(WIDTHS[-1], CLASSES, bias=False)
        generator = torch.Generator().manual_seed(seed * 100 + stage)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter[0].numel() ** -0.5)
        self.to(dtype)

    def largest_inputs(self, num_samples: int, sequence_length: int) -> dict[str, tuple[int, ...]]:
        """What a peer takes for `x`: the second dimension of a picture is no position in a sequence."""
        return {"x": (num_samples, max(3, *WIDTHS), SIZE, SIZE)}

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        x = inputs["x"].to(next(self.parameters()).dtype)
        for layer in self.layers.values():
            x = layer(x)
        if not self.is_last:
            return {"x": x}
        assert labels is not None
        target = labels["class"]
        loss_sum = F.cross_entropy(self.head(x.mean((2, 3))), target, reduction="sum", ignore_index=-100)
        return {"loss_sum": loss_sum, "tokens": (target != -100).sum()}


class ResNetFactory:
    def __init__(self, config: RunConfig) -> None:
        if config.num_stages != len(WIDTHS):
            raise ConfigError(f"num_stages: this model has {len(WIDTHS)}")
        self.num_stages = config.num_stages
        self._seed = config.seed
        self._dtype = torch.float64 if config.precision == "fp64" else torch.float32

    def build(self, stage: int) -> ResNetStage:
        return ResNetStage(stage, self._seed, self._dtype)

    def save_pretrained(self, state: Tensors, directory: str | os.PathLike[str]) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(directory) / "resnet.pt")


def factory(config: RunConfig) -> ResNetFactory:
    return ResNetFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    """320 noisy pictures of 4 patterns, some without a label; the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(7))
    patterns = generator.uniform(-1.0, 1.0, (CLASSES, 3, SIZE, SIZE))
    target = np.arange(320) % CLASSES
    x = 0.5 + 2.0 * (patterns[target] + generator.uniform(-1.0, 1.0, (320, 3, SIZE, SIZE)))
    target[generator.random(320) < 0.2] = -100
    return ArraySamples({"x": x.astype(np.float32)}, {"class": target.astype(np.int64)})
