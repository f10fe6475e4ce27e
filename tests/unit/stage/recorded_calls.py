"""What stands for CUDA's recording on a machine without a GPU: the same fixed places, computed again at each replay.

So a captured call whose places another micro-batch wrote to, or that was started with another version's parameters, gives
wrong gradients here as it does there. Kernels, streams and memory pools are for `test_stage_graphs.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import LARGEST, Accumulator
from swarm.stage.compute import StageCompute
from swarm.stage.device import Added, KnownNumbers, entry_of
from swarm.stage.devices import HostDevice
from swarm.stage.gpu import graphs
from swarm.stage.gpu.kernels import survey
from swarm.stage.module import Tensors
from swarm.stage.norms import norm_of


class RecordedCall:
    """As `graphs._CapturedCall`."""

    #: Backwards of all calls so far.
    num_backwards = 0
    #: What a call is said to take: more than its graph and its gradients do without.
    num_bytes = 2**22

    def __init__(self, stage: graphs.CapturedStage) -> None:
        self._stage = stage
        self.inputs = {name: t.requires_grad_(t.is_floating_point()) for name, t in graphs._blank(stage.inputs).items()}
        self.labels = graphs._blank(stage.labels)
        outputs = self._call()
        self.outputs = {name: t.detach() for name, t in outputs.items()}
        self.seeds = {name: torch.zeros_like(t) for name, t in outputs.items() if t.requires_grad}
        found = [g.clone() if g is not None else None for g in self._gradients(outputs)]
        self.input_gradients = dict(zip(self._leaves(), found, strict=False))
        self.gradients = found[len(self.input_gradients) :]
        self.forward = SimpleNamespace(replay=self._forward)
        self.backward = SimpleNamespace(replay=self._backward)

    def _call(self) -> Tensors:
        return self._stage.call(self._stage.parameters, self.inputs, self.labels or None)

    def _leaves(self) -> Tensors:
        return {name: t for name, t in self.inputs.items() if t.requires_grad}

    def _gradients(self, outputs: Tensors) -> list[torch.Tensor | None]:
        leaves = [*self._leaves().values(), *self._stage.parameters.values()]
        version_ids = [outputs[name] for name in self.seeds]
        return list(torch.autograd.grad(version_ids, leaves, list(self.seeds.values()), allow_unused=True))

    @torch.no_grad()
    def _forward(self) -> None:
        for name, t in self._call().items():
            self.outputs[name].copy_(t)

    def _backward(self) -> None:
        RecordedCall.num_backwards += 1
        places = [*self.input_gradients.values(), *self.gradients]
        found = self._gradients(self._call())
        with torch.no_grad():
            for place, g in zip(places, found, strict=True):
                if place is not None and g is not None:
                    place.copy_(g)


def add(
    self: HostDevice,
    accumulator: Accumulator,
    index: int,
    gradients: Sequence[torch.Tensor | None],
    *,
    loss_scale: float,
    entry: LedgerEntry | Tensors,
    with_norm: bool,
    borrowed: bool = False,
) -> Added:
    """As `CudaDevice.add`: the gradients may wait in their places until others go into the sum with them."""
    norm = norm_of(gradients) if with_norm else None
    if not isinstance(entry, LedgerEntry):
        entry = entry_of(int(entry["tokens"]), float(entry["loss_sum"].detach()))
    is_valid = survey(gradients, LARGEST, "cpu").is_valid
    numbers = KnownNumbers(entry, bool(is_valid))
    marked = accumulator.add_unseen(index, numbers, is_valid, gradients, loss_scale=loss_scale, borrowed=borrowed)
    return Added(marked=marked, numbers=numbers, norm=norm)


def install(patch: pytest.MonkeyPatch) -> None:
    """Every stage that has a budget computes by recorded calls from now on, and adds up as on a GPU."""
    made = StageCompute.__init__

    def make(self: StageCompute, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self._may_capture = self._budget is not None

    patch.setattr(StageCompute, "__init__", make)
    patch.setattr(HostDevice, "add", add)
    patch.setattr(graphs, "_PAY", float("inf"))
    patch.setattr(graphs, "_CapturedCall", RecordedCall)
    patch.setattr(torch.cuda, "Stream", type("Stream", (), {}))
    for name in ("synchronize", "empty_cache", "get_sync_debug_mode", "set_sync_debug_mode"):
        patch.setattr(torch.cuda, name, lambda *_: None)
