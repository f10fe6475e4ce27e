"""What a compressor of averages is. Owns the interface alone.

A compressor turns a member's contribution into vectors that the group sums, one after another, and the sums into the
average: a generator that yields each vector (`GroupVector`), is sent its `Sum`, and returns what came of it. So it need not know
how vectors travel, and the exchange need not know what is in them. What it keeps back (error feedback) is private to the
peer, is adopted when the attempt is committed, and is dropped with an attempt that is not.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swarm.averaging.butterfly import Sum
from swarm.averaging.reduction import GroupVector


@dataclass(frozen=True)
class Compressed:
    """The sum over the group as everyone has it, flat [N], and what this peer's compressor keeps if it is committed."""

    flat: torch.Tensor
    state: Any = None


Compression = Generator[GroupVector, Sum, Compressed]


@dataclass(frozen=True)
class Contribution:
    """What a member brings to an attempt.

    `flat` [N] is a sum over its tickets; None if its ledger is empty. `tokens` are those of each member, in their order,
    and `me` is this one's place.
    """

    flat: torch.Tensor | None
    tokens: tuple[int, ...]
    me: int
    step: int


class Compressor(Protocol):
    """Of one peer at one stage."""

    def compress(self, contribution: Contribution) -> Compression: ...

    def adopt(self, state: Any) -> None:
        """An attempt was committed; `state` is what its compression returned."""

    def forget(self) -> None:
        """Another lineage or another stage goes on: what was kept back belongs to neither."""
