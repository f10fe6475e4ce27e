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
    """A member's part in an attempt.

    `flat` [N] is a sum over its tickets; None if its ledger is empty. `tokens` are those of each member, in their order,
    and `me` is this one's place.
    """

    flat: torch.Tensor | None
    tokens: tuple[int, ...]
    me: int
    step: int


class Compressor(Protocol):
    """Decides what one peer sends of its contributions at one stage, and what it keeps back."""

    @property
    def keeps_back(self) -> bool:
        """Whether it keeps something back, which goes with its peer."""

    @property
    def residual(self) -> torch.Tensor | None:
        """Where this peer's own copy begins the next step of a local run, [N] as `shared - own`; None: with what all share."""

    def compress(self, contribution: Contribution) -> Compression:
        """Begin the exchanges of one attempt; nothing here changes before `adopt`."""

    def adopt(self, state: Any) -> None:
        """Keep `state`, which a compression returned: its attempt was committed."""

    def forget(self) -> None:
        """Drop what was kept back: another lineage or another stage goes on, and it belongs to neither."""
