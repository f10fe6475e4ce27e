"""What a stage peer knows of one step that has not committed. Owns the fields; the rules are `stage_member`'s."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import torch

from swarm.averaging.all_reduce import Round, StageSum
from swarm.base.errors import LinkError
from swarm.net.transport import Progress
from swarm.stage.accumulator import Accumulator
from swarm.wire import messages as m


@dataclass(frozen=True)
class OwnSums:
    """This stage's sums of parameters of which other stages hold copies, by name of the tie, in one attempt."""

    attempt: m.Attempt
    parts: dict[str, torch.Tensor]


class Turns:
    """So many requests to one auxiliary send their bytes at once; once one has failed, those that wait for a turn do too."""

    def __init__(self, num: int) -> None:
        self._free = asyncio.Semaphore(num)
        self.failure: LinkError | None = None

    async def take(self) -> None:
        """
        Raises:
            LinkError: that of a request before.
        """
        await self._free.acquire()
        if self.failure is not None:
            self._free.release()
            raise self.failure

    def give_back(self) -> None:
        self._free.release()


@dataclass
class StepState:
    """What a member knows of one step that has not committed."""

    accumulator: Accumulator
    leader: m.Member | None = None
    #: What was sealed, on its device; taken by the round of the same attempt.
    contribution: torch.Tensor | None = None
    round: Round | None = None
    average: StageSum | None = None
    #: The last average that a newer attempt replaced: a record that was decided on it may yet arrive.
    overtaken: StageSum | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Counts the bytes of slices that this member sends and gets back.
    exchanged: Progress = field(default_factory=Progress)
    #: What members of other stages may ask for.
    own_sums: OwnSums | None = None
    #: How answers advance of those that wait for no heartbeat of this stage: members of other stages, and auxiliaries.
    from_others: Progress = field(default_factory=Progress)
    #: Of the requests to each auxiliary in the round.
    turns: dict[tuple[str, str], Turns] = field(default_factory=dict)

    def follow(self, progress: Progress, round_: Round) -> None:
        """A round advances with slices, sums and bytes; not with heartbeats, or members would keep each other waiting."""
        progress.follow(lambda: round_.num_parts)
        progress.follow(lambda: self.exchanged.num_bytes)

    def held_sum(self, digest: str) -> StageSum | None:
        """The average with this digest, if this member holds it."""
        return next((x for x in (self.average, self.overtaken) if x is not None and x.digest == digest), None)
