"""A coordinator's leadership of the run, which all its parts share: its ballot, the newest record, whether it still stands.

Stages have leaders of their own, whom the coordinator chooses (`chosen_leaders.py`). A leadership ends by `Demoted`; by
`Rivalry` it is open to question. Owns the condition that waiting parts watch; decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarm.base.errors import SwarmError
from swarm.base.ids import Ballot
from swarm.peer.checkpoint_record import LastCheckpointRecord
from swarm.peer.link import Link, RefusedBy
from swarm.wire import messages as m

#: Records kept for trainers that lag.
MAX_RECORDS = 256

#: Finds the announced peers of every stage: a hint for where to look.
Rosters = Callable[[], Awaitable[list[list[m.Member]]]]


class Demoted(SwarmError):
    """A coordinator with a higher ballot was accepted, or the run goes on in another lineage."""


class Rivalry(SwarmError):
    """Somebody holds a record that is newer than this coordinator's and not its own."""

    def __init__(self, record: m.CommitRecord) -> None:
        super().__init__(f"a record of step {record.step} in era {record.era} exists")
        self.record = record


class RunLeadership:
    """One coordinator's leadership of the run, from its election on."""

    def __init__(self, link: Link, ballot: Ballot, rosters: Rosters) -> None:
        self.link = link
        self.context = link.context
        self.config = link.context.config
        self.timing = link.context.config.timing
        self.ballot = ballot
        self.rosters = rosters
        self.record: m.CommitRecord | None = None
        self.checkpoint_record = LastCheckpointRecord(link.context)
        self.records: list[m.CommitRecord] = []
        self.rival: m.CommitRecord | None = None
        #: Stages that have no live member now; while there are any this lineage is not pushed on others.
        self.lost: set[int] = set()
        #: What the run waits for, in words, for operators and trainers.
        self.waiting_for = "peers"
        self.changed = asyncio.Condition()
        self._demoted: Demoted | None = None

    @property
    def now(self) -> float:
        """The loop's time, in seconds."""
        return asyncio.get_running_loop().time()

    @property
    def newest(self) -> m.CommitRecord:
        """The newest record, once there is one."""
        assert self.record is not None
        return self.record

    def take(self, record: m.CommitRecord) -> None:
        """Note that `record` is the newest from here on."""
        self.record = record
        self.checkpoint_record.note(record)
        self.records.append(record)
        del self.records[:-MAX_RECORDS]

    async def notify(self) -> None:
        """Wake all who wait in `wait`."""
        async with self.changed:
            self.changed.notify_all()

    async def wait(self, seconds: float) -> None:
        """Wait until something changes, for at most `seconds`.

        Raises:
            Demoted, Rivalry: as `check`.
        """
        self.check()
        try:
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait()
        except TimeoutError:
            pass
        self.check()

    def tell_waiting(self, reason: str) -> None:
        """Note that the run waits for `reason` from here on, as whoever asks is told."""
        self.waiting_for = reason

    def meet_rival(self, record: m.CommitRecord) -> None:
        """Note that somebody follows `record`, which is newer and not of this lineage: whoever waits here learns of it."""
        self.rival = record

    def forget_rival(self) -> None:
        """Note that it is known which of the two lineages goes on."""
        self.rival = None

    def demote(self, reason: str) -> None:
        """End the leadership: whoever waits in it learns of it."""
        self._demoted = Demoted(reason)

    def check(self) -> None:
        """Return if this leadership stands.

        Raises:
            Demoted, Rivalry: this leadership is over, or another lineage may go on.
        """
        if self._demoted is not None:
            raise self._demoted
        if self.rival is not None:
            raise Rivalry(self.rival)

    def raise_if_newer(self, refused: RefusedBy) -> None:
        """Look whether a refusal says that another coordinator leads, or that a record exists which this one lacks.

        Raises:
            Demoted, Rivalry: it does.
        """
        if refused.code == "lower_ballot":
            self.demote(refused.reason)
            self.check()
        record = refused.refusal.record
        if record is not None and record.newer_than(self.record):
            raise Rivalry(record)
