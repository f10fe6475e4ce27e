"""The coordinator's soft state of one step: which tickets are free, leased or done. Pure; gets `now` as an argument.

No safety rests on it: a ticket leased twice is accumulated once, because claims and seals say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.base.ids import MemberKey


@dataclass(slots=True)
class _Lease:
    trainer: MemberKey
    until: float


class TicketPool:
    """Tickets `0..num_tickets-1` of one step.

    Invariant: each ticket is in exactly one of free, leased, done.
    """

    def __init__(self, step: int, num_tickets: int) -> None:
        self.step = step
        self.num_tickets = num_tickets
        self._free: dict[int, None] = dict.fromkeys(range(num_tickets))
        self._leased: dict[int, _Lease] = {}
        self._done: set[int] = set()
        #: Those that were freed after a lease: whoever takes one computes it again.
        self._freed: set[int] = set()
        #: Peers that should not be asked for a ticket again if others can be.
        self.avoid: dict[int, frozenset[str]] = {}

    def lease(self, trainer: MemberKey, want: int, *, now: float, lease_s: float) -> list[int]:
        """Hand out up to `want` free tickets, lowest index first."""
        taken = sorted(self._free)[:want]
        for index in taken:
            del self._free[index]
            self._leased[index] = _Lease(trainer, now + lease_s)
        return taken

    def num_again(self, indexes: Iterable[int]) -> int:
        """Count those of `indexes` that were leased before."""
        return len(self._freed.intersection(indexes))

    def renew(self, trainer: MemberKey, holding: Iterable[int], *, now: float, lease_s: float) -> None:
        """Note what a trainer works on: its leases live on, and those that a new coordinator did not know are added."""
        held = set(holding)
        for index in held:
            lease = self._leased.get(index)
            if lease is not None and lease.trainer == trainer:
                lease.until = now + lease_s
            elif index in self._free:
                del self._free[index]
                self._leased[index] = _Lease(trainer, now + lease_s)

    def done(self, index: int) -> None:
        """Note that a trainer got the ticket's result back."""
        if 0 <= index < self.num_tickets:
            self._free.pop(index, None)
            self._leased.pop(index, None)
            self._done.add(index)

    def free(self, indexes: Iterable[int]) -> None:
        """Lease these again: a seal did not cover them."""
        for index in indexes:
            if index not in self._free:
                self._freed.add(index)
            self._leased.pop(index, None)
            self._done.discard(index)
            self._free[index] = None

    def avoid_peers(self, index: int, peers: frozenset[str]) -> None:
        """Have `peers` asked for the ticket only where no others can be."""
        self.avoid[index] = self.avoid.get(index, frozenset()) | peers

    def expire(self, now: float) -> list[int]:
        """Free the leases of trainers that are silent; returns the tickets."""
        late = sorted(index for index, lease in self._leased.items() if lease.until <= now)
        self.free(late)
        return late

    def drop_trainer(self, trainer: MemberKey) -> None:
        """Free the leases of a trainer that leaves."""
        self.free([index for index, lease in self._leased.items() if lease.trainer == trainer])

    @property
    def num_free(self) -> int:
        """Tickets that nobody works on or has done."""
        return len(self._free)

    @property
    def num_done(self) -> int:
        """Tickets that were reported done."""
        return len(self._done)

    @property
    def complete(self) -> bool:
        """Every ticket was reported done; whether the stages hold them is for the seals to say."""
        return len(self._done) == self.num_tickets
