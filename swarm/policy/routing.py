"""Stochastic wiring by interleaved weighted round robin (SWARM, arXiv 2301.11913, section 3.2).

One `StageRouter` for each stage and trainer. Pure: time and randomness are arguments.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from swarm.base.ids import MemberKey

EMA_ALPHA = 0.1
FIRST_BAN_S = 1.0
#: Peers of one stage that a route names.
MAX_CANDIDATES = 4


@dataclass(slots=True)
class _Peer:
    key: MemberKey
    assigned_work_s: float
    num_assigned: int = 0
    #: Samples reserved before anyone of the stage was measured.
    num_uncharged: int = 0
    #: Moving average of seconds a sample, not yet divided by its mass.
    average_s: float = 0.0
    #: Sum of that average's weights, which is below 1 at first.
    average_mass: float = 0.0
    num_failures: int = 0
    banned_until: float = 0.0

    @property
    def seconds_per_sample(self) -> float | None:
        """Bias-corrected exponential moving average, or None until measured."""
        return self.average_s / self.average_mass if self.average_mass else None


class Router(Protocol):
    """Chooses among the peers of one stage, for one trainer."""

    def set_members(self, keys: Iterable[MemberKey]) -> None:
        """Take over the stage's members."""

    def candidates(
        self,
        num_samples: int,
        *,
        now: float,
        first: MemberKey | None = None,
        limit: int = MAX_CANDIDATES,
        without: Container[MemberKey] = (),
    ) -> list[MemberKey]:
        """Peers to try with so many samples, in order, `limit` at most; the first is expected to serve them.

        `first` goes in front if it may be tried, and those of `without` are left out. An empty list means that nobody of the
        stage may be tried at `now`.
        """

    def observe(self, key: MemberKey, seconds: float, num_samples: int, *, reserved: MemberKey | None = None) -> None:
        """Hear that so many samples occupied `key`, its compute or its line, for `seconds`; `reserved` was expected to serve."""

    def failed(self, key: MemberKey, *, now: float, waited_s: float = 0.0, num_samples: int = 1) -> None:
        """Hear that a peer was silent, unreachable or broken."""


class MakeRouter(Protocol):
    """Makes a router, such as the class `StageRouter`."""

    def __call__(self, rng: random.Random, *, max_ban_s: float) -> Router:
        """`rng` is the trainer's; a peer that failed should be left out for `max_ban_s` seconds at most."""


class StageRouter:
    """Spreads micro-batches over the peers of one stage in proportion to their speed."""

    def __init__(self, rng: random.Random, *, max_ban_s: float = 30.0) -> None:
        self._rng = rng
        self._max_ban_s = max_ban_s
        self._peers: dict[MemberKey, _Peer] = {}
        #: (assigned work in s, number of micro-batches assigned, random tie, peer); until anyone is measured the number decides.
        self._heap: list[tuple[float, int, float, MemberKey]] = []

    def set_members(self, keys: Iterable[MemberKey]) -> None:
        """Take over the stage's members; a new one enters at the heap's minimum, so that it is tried at once."""
        keys = list(keys)
        gone = set(self._peers) - set(keys)
        for key in sorted(gone):
            del self._peers[key]
        lowest = self._lowest()
        for key in keys:
            if key not in self._peers:
                self._peers[key] = _Peer(key, lowest)
        self._rebuild()

    def _lowest(self) -> float:
        """Least assigned work among the peers that are in use: where newcomers and returning peers begin."""
        in_use = [p.assigned_work_s for p in self._peers.values() if not p.banned_until]
        return min(in_use or [p.assigned_work_s for p in self._peers.values()], default=0.0)

    def _end_bans(self, now: float) -> None:
        """A peer that comes back is not given all that it missed."""
        back = [p for p in self._peers.values() if p.banned_until and p.banned_until <= now]
        if back:
            lowest = self._lowest()
            for peer in back:
                peer.banned_until = 0.0
                peer.assigned_work_s = max(peer.assigned_work_s, lowest)
            self._rebuild()

    def _excuse(self, without: Container[MemberKey], order: list[MemberKey]) -> None:
        """Who is left out now is not given later all that it missed."""
        lowest = self._peers[order[0]].assigned_work_s if order else 0.0
        behind = [p for p in self._peers.values() if p.assigned_work_s < lowest and p.key in without]
        for peer in behind:
            peer.assigned_work_s = lowest
        if behind:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [self._entry(peer) for peer in self._peers.values()]
        heapq.heapify(self._heap)

    def _entry(self, peer: _Peer) -> tuple[float, int, float, MemberKey]:
        return (peer.assigned_work_s, peer.num_assigned, self._rng.random(), peer.key)

    def _charge(self, peer: _Peer, num_samples: int) -> None:
        cost = self._cost(peer)
        peer.assigned_work_s += num_samples * cost
        peer.num_assigned += 1
        if not cost:
            peer.num_uncharged += num_samples

    def _cost(self, peer: _Peer) -> float:
        own = peer.seconds_per_sample
        if own is not None:
            return own
        measured = [p.seconds_per_sample for p in self._peers.values() if p.seconds_per_sample is not None]
        return statistics.median(measured) if measured else 0.0

    def candidates(
        self,
        num_samples: int,
        *,
        now: float,
        first: MemberKey | None = None,
        limit: int = MAX_CANDIDATES,
        without: Container[MemberKey] = (),
    ) -> list[MemberKey]:
        """Peers to try, in order; work is reserved at the first. `first` goes in front if it may be tried.

        Banned peers and those of `without` are left out. An empty list means that nobody of the stage may be tried at `now`.
        """
        self._end_bans(now)
        order = [entry[-1] for entry in heapq.nsmallest(len(self._heap), self._heap)]
        order = [key for key in order if self._peers[key].banned_until <= now and key not in without]
        self._excuse(without, order)
        if first in order:
            order.remove(first)
            order.insert(0, first)
        order = order[:limit]
        if order:
            self._charge(self._peers[order[0]], num_samples)
            self._heap = [entry for entry in self._heap if entry[-1] != order[0]]
            heapq.heapify(self._heap)
            heapq.heappush(self._heap, self._entry(self._peers[order[0]]))
        return order

    def observe(self, key: MemberKey, seconds: float, num_samples: int, *, reserved: MemberKey | None = None) -> None:
        """A micro-batch occupied `key` for `seconds`; `reserved` is who was charged for it."""
        peer = self._peers.get(key)
        if peer is None:
            return
        first = peer.seconds_per_sample is None
        peer.average_s = (1 - EMA_ALPHA) * peer.average_s + EMA_ALPHA * seconds / max(1, num_samples)
        peer.average_mass = (1 - EMA_ALPHA) * peer.average_mass + EMA_ALPHA
        peer.num_failures = 0
        if first:  # what was reserved before anyone was measured cost nothing: charged now
            peer.assigned_work_s += peer.num_uncharged * (peer.seconds_per_sample or 0.0)
            peer.num_uncharged = 0
            self._rebuild()
        if reserved is not None and reserved != key:
            self._charge(peer, num_samples)
            self._rebuild()

    def failed(self, key: MemberKey, *, now: float, waited_s: float = 0.0, num_samples: int = 1) -> None:
        """A peer was silent, unreachable or broken: charged what was waited for, and banned for a doubling time.

        What fails while it is banned was under way before, and makes the ban no longer.
        """
        peer = self._peers.get(key)
        if peer is None:
            return
        failures = peer.num_failures
        if waited_s > 0:  # it was of no use: that never makes the peer look faster than one that answers
            self.observe(key, max(waited_s, 2 * num_samples * self._cost(peer)), num_samples)
        if peer.banned_until > now:
            peer.num_failures = failures
            return
        peer.num_failures = failures + 1
        peer.banned_until = now + min(self._max_ban_s, FIRST_BAN_S * 2 ** (peer.num_failures - 1))

    def seconds_per_sample(self, key: MemberKey) -> float | None:
        """The measured seconds of one sample at a peer; None if it is unknown or was not measured."""
        peer = self._peers.get(key)
        return peer.seconds_per_sample if peer else None
