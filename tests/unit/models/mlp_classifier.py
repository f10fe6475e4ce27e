"""A custom model and its data, as a user would write them: an MLP classifier of `num_stages` layers, by dotted path.

`model = "tests.unit.models.mlp_classifier:factory"`, `--data tests.unit.models.mlp_classifier:dataset`.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from models.initial import normal
from swarm.base.config import RunConfig
from swarm.feed.datasets import ArraySamples
from swarm.stage.module import Tensors

FEATURES, HIDDEN, CLASSES = 16, 32, 4


class MlpStage(torch.nn.Module):
    """One Linear; GELU after it, or the loss at the last stage. Parameters are named `layers.<stage>.*`."""

    def __init__(self, stage: int, num_stages: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage = stage
        self.is_last = stage == num_stages - 1
        ends = (FEATURES if stage == 0 else HIDDEN, CLASSES if self.is_last else HIDDEN)
        self.layers = torch.nn.ModuleDict({str(stage): torch.nn.Linear(*ends, dtype=dtype)})
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                shape = tuple(parameter.shape)
                values = normal(seed, name, shape, 0.0, ends[0] ** -0.5, 0) if len(shape) > 1 else torch.zeros(shape)
                parameter.copy_(values)

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        layer = self.layers[str(self.stage)]
        out = layer(inputs["features"].to(layer.weight.dtype))
        if not self.is_last:
            return {"features": F.gelu(out)}
        assert labels is not None
        target = labels["class"]
        wide = out if out.dtype == torch.float64 else out.float()
        loss_sum = F.cross_entropy(wide, target, reduction="sum")
        return {"loss_sum": loss_sum, "tokens": torch.tensor(len(target), device=target.device)}


class MlpFactory:
    def __init__(self, config: RunConfig) -> None:
        self.num_stages = config.num_stages
        self._seed = config.seed
        self._dtype = torch.float64 if config.precision == "fp64" else torch.float32

    def build(self, stage: int) -> MlpStage:
        return MlpStage(stage, self.num_stages, self._seed, self._dtype)


def factory(config: RunConfig) -> MlpFactory:
    return MlpFactory(config)


def dataset(config: RunConfig) -> ArraySamples:
    """640 points around 4 centres; the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(7))
    centres = generator.uniform(-1.5, 1.5, (CLASSES, FEATURES))
    target = np.arange(640) % CLASSES
    features = (centres[target] + generator.uniform(-1.0, 1.0, (640, FEATURES))).astype(np.float32)
    return ArraySamples({"features": features}, {"class": target.astype(np.int64)})
