"""Versions of a stage's parameters: one for each commit, as separate tensors, and the optimizer state of the newest.

Invariant: tensors of a version are never modified once it is in the store; a live autograd graph may hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swarm.base.ids import VersionId
from swarm.stage.layout import Layout
from swarm.stage.moments import OptimizerState
from swarm.wire.messages import CommitRecord


@dataclass(frozen=True)
class Version:
    """The parameters at `record.version_id`: flat masters, and the compute copy as leaf tensors by name.

    `buffers` are those that change, by name, in their own dtypes, or in that of the compute copy if that has fewer digits: what
    `module.to(dtype)` gives.
    """

    record: CommitRecord
    masters: torch.Tensor
    parameters: dict[str, torch.Tensor] = field(repr=False)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def version_id(self) -> VersionId:
        """The name of the version."""
        return self.record.version_id

    @property
    def num_commits(self) -> int:
        """Steps that were committed up to it."""
        return self.record.step + 1


def make_version(record: CommitRecord, layout: Layout, masters: torch.Tensor, dtype: torch.dtype) -> Version:
    """A version whose compute copy has `dtype`; it shares the masters' memory if they have that dtype already."""
    compute = masters if masters.dtype == dtype else masters.to(dtype)
    named = {name: view.detach().requires_grad_(True) for name, view in layout.trained.named(compute).items()}
    views = layout.named(masters) if layout.buffer_dtypes else {}
    narrow = {own: dtype if own.is_floating_point and dtype.itemsize < own.itemsize else own for own in layout.buffer_dtypes}
    return Version(record, masters, named, {name: views[name].to(narrow[own]) for name, own in layout.buffers.items()})


@dataclass(frozen=True)
class StageState:
    """All that a peer needs to go on from a version: snapshots and checkpoints hold it.

    `previous` is the version before, which the next step's tickets use with `delay_steps = 1`; None otherwise, and at
    the initial values.
    """

    version: Version
    optimizer: OptimizerState
    previous: Version | None = None


def state_bytes(state: StageState) -> int:
    """Bytes that a newcomer downloads."""
    masters = [state.version.masters] + ([state.previous.masters] if state.previous is not None else [])
    return sum(tensor.nbytes for tensor in masters) + state.optimizer.num_bytes


class VersionStore:
    """The newest `keep` versions, and the newest one's optimizer state."""

    def __init__(self, version: Version, optimizer: OptimizerState, *, keep: int) -> None:
        self._keep = keep
        self._versions = [version]
        self.optimizer = optimizer

    @property
    def newest(self) -> Version:
        """The newest version."""
        return self._versions[-1]

    def get(self, version_id: VersionId) -> Version | None:
        """The version of that name; None if it is not kept."""
        return next((v for v in reversed(self._versions) if v.version_id == version_id), None)

    def at(self, num_commits: int) -> Version | None:
        """The version after so many commits; None if it is not kept."""
        return next((v for v in self._versions if v.num_commits == num_commits), None)

    def add(self, version: Version, optimizer: OptimizerState) -> None:
        """The version after the newest; the oldest beyond `keep` is let go."""
        self._versions.append(version)
        self.optimizer = optimizer
        del self._versions[: -self._keep]

    def state(self) -> StageState:
        """References to the newest version and what belongs to it: copies nothing."""
        previous = self._versions[-2] if self._keep > 1 and len(self._versions) > 1 else None
        return StageState(self.newest, self.optimizer, previous)

    def replace(self, state: StageState) -> None:
        """Start again from a downloaded or restored state."""
        self._versions = [state.version] if state.previous is None else [state.previous, state.version]
        self.optimizer = state.optimizer
