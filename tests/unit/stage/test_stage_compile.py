"""`torch.compile` changes how fast a stage computes, not what."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.lifecycle.commit_record import genesis_record
from swarm.stage.compute import StageCompute
from swarm.stage.module import Tensors
from swarm.stage.versions import Version, make_version


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Block(), Block()])

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        return list(self.layers)

    def example(self, num_samples: int, sequence_length: int) -> tuple[Tensors, Tensors | None]:
        return {"x": torch.zeros(num_samples, sequence_length, 8)}, None

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        x = inputs["x"]
        for layer in self.layers:
            x = layer(x)
        return {"x": x}


def compute_of(stage: type[torch.nn.Module], *, compile: bool) -> tuple[StageCompute, Version]:
    factory: Any = SimpleNamespace(num_stages=2, build=lambda number: stage())
    compute = StageCompute(factory, 0, precision="fp32", seed=0, compile=compile)
    record = genesis_record(RunConfig(num_stages=2), "0" * 64, ZERO_BALLOT, ((), ()))
    return compute, make_version(record, compute.layout, compute.initial_masters(), compute.dtype)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++) on a CPU")
def test_compiled_blocks_give_the_same_gradients_for_every_version() -> None:
    results = []
    for is_compiled in (False, True):
        compute, version = compute_of(Stage, compile=is_compiled)
        other = make_version(version.record, compute.layout, version.masters * 2, compute.dtype)
        x = torch.linspace(-1, 1, 48).view(2, 3, 8)
        gradients = []
        for used in (version, other, version):
            activation = compute.forward(used, Ticket(0, 0), {"x": x}, None, keep_graph=True)
            result = compute.backward(activation, {"x": torch.ones_like(x)})
            gradients += [result.inputs["x"], *(g for g in result.parameters if g is not None)]
        results.append(gradients)
    assert len(results[0]) == len(results[1]) == 15
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_module_that_names_no_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--compile: the model's stage modules do not say"):
        compute_of(Block, compile=True)
