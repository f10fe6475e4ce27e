"""How long a ticket occupies each peer, as one trainer sees it, and who gets no ticket now. Pure: time is an argument.

A peer's share of its stage is 1 / max(compute, bytes / line), for its transfers overlap with compute of other tickets
(`throughput.rate_of`). Compute is told by the peer. Its line is measured on every ticket: the seconds in which bytes moved,
without latency, which occupies nobody. Tickets that share a line make one another's transfers longer; but a peer that was
served n tickets in the time of one trip is occupied by none of them for longer than an n-th of it. Of the two ends of a
transfer the slower one is the reason.

Who helps in the mean may still do harm: a step ends with its last ticket, and a queue that is too long is waited for. So a
ticket goes to a peer only if it is expected back before the rest of the step is, and not to one whose queue is long while
another's is not. Must not know messages, nor how a router chooses among those that are left.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.base.ids import MemberKey
from swarm.policy.throughput import Rate, rate_of

#: Weight of the newest ticket in the moving averages of a peer's compute, and of the time elsewhere.
ALPHA = 0.1
#: A line is what the second best of so many tickets showed: they met no others on it.
NUM_NEWEST = 8
#: A line that was not measured for so many seconds is what the next ticket shows.
FORGOTTEN_S = 30.0
#: A transfer tells of a line if it moved this part of what the peer's largest one of the same ticket did.
TELLING_PART = 0.25
#: A ticket that may be late is expected to take so many times as long as it should.
CAUTION = 1.25
#: So many tickets wait at a peer that is to be busy all the time, for tickets do not come evenly.
SPARE = 2
#: A trip through a peer that takes so many times as long as one through another is a long one.
FAR = 2.0
#: One ticket that a peer is only asked to see whether its line is better costs at most this part of the time.
PROBE_PART = 0.01
#: And one that a peer is asked for the first time: what it says of its line may be of a moment when much else was on it.
FIRST_PROBE_PART = 0.1


class Trip(NamedTuple):
    """One ticket at one stage: who served it, and the way there from the stage before and back."""

    key: MemberKey
    queue_s: float
    compute_s: float
    #: Bytes of the way, in both directions together; its seconds; and those in which bytes moved.
    num_bytes: int
    transfer_s: float
    moving_s: float


@dataclass(slots=True)
class _Peer:
    #: Tickets of this trainer that were given to it and are not back.
    num_under_way: int = 0
    #: Tickets that it was given since `take_reasons`, and why it was left out the last time that one would have been late.
    num_given: int = 0
    late: str = ""
    compute_s: float | None = None
    #: Seconds for one byte in one direction of its line; None: not known.
    byte_s: float | None = None
    #: What the newest tickets showed of it.
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST))
    observed_at: float = float("-inf")
    #: Bytes of one ticket in one direction of its line.
    ticket_bytes: float = 0.0
    #: Latencies of the newest tickets; small requests that waited behind others' bytes are no latency.
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST))
    given_at: float = float("-inf")

    def note_line(self, byte_s: float, now: float) -> None:
        if now - self.observed_at > FORGOTTEN_S:
            self.newest.clear()
        self.newest.append(byte_s)
        self.byte_s = sorted(self.newest)[len(self.newest) // NUM_NEWEST]


class _Stage:
    def __init__(self) -> None:
        self.peers: dict[MemberKey, _Peer] = {}
        #: Seconds that a ticket spends elsewhere than at this stage's peer and on its line; None until one is back.
        self.elsewhere_s: float | None = None

    def typical(self, name: str) -> float:
        known = [
            value for peer in self.peers.values() if peer.compute_s is not None and (value := getattr(peer, name)) is not None
        ]
        return statistics.median(known) if known else 0.0

    @property
    def is_measured(self) -> bool:
        return any(peer.compute_s is not None for peer in self.peers.values())

    def line_s(self, peer: _Peer) -> float:
        return (peer.byte_s or 0.0) * (peer.ticket_bytes or self.typical("ticket_bytes"))

    def rate(self, peer: _Peer) -> Rate:
        compute_s = peer.compute_s if peer.compute_s is not None else self.typical("compute_s")
        return rate_of(compute_s, self.line_s(peer))

    def alone_s(self, peer: _Peer) -> float:
        """One ticket through this peer if nobody else asks it: compute, both directions of its line, latency."""
        compute_s = peer.compute_s if peer.compute_s is not None else self.typical("compute_s")
        return compute_s + 2 * self.line_s(peer) + min(peer.latencies, default=0.0)

    def is_far(self, peer: _Peer) -> bool:
        """Whether a ticket takes much longer there than at another peer, or nobody knows how long."""
        known = [self.alone_s(x) for x in self.peers.values() if x.compute_s is not None]
        return bool(known) and (peer.compute_s is None or self.alone_s(peer) > FAR * min(known))


class Occupancy:
    """What one trainer knows of the peers of all stages."""

    def __init__(self, num_stages: int, *, request_s: float) -> None:
        """Know nothing of anybody. Small requests have `request_s`, and wait behind the bytes of tickets."""
        self._request_s = request_s
        self._stages = [_Stage() for _ in range(num_stages)]
        #: Of the trainer's own line.
        self._own = _Peer()
        self._num_under_way = 0

    def set_members(self, members: Sequence[Iterable[MemberKey]]) -> None:
        """Take over who serves each stage; who is there already keeps what is known of it."""
        for stage, keys in zip(self._stages, members, strict=True):
            stage.peers = {key: stage.peers.get(key) or _Peer() for key in keys}

    def expect(self, stage: int, key: MemberKey, bytes_per_s: float, *, now: float) -> None:
        """Take what a peer says of its line for true until it has served a ticket. One that is slow is not tried at once."""
        peer = self._stages[stage].peers.get(key)
        if peer is not None and peer.byte_s is None and bytes_per_s > 0:
            peer.byte_s, peer.given_at = 1.0 / bytes_per_s, now

    def began(self, route: Sequence[MemberKey], *, now: float) -> bool:
        """Note that a ticket was given to one peer of each stage.

        Returns:
            Whether its trip is a long one beside others': it takes its time, and none of the others'.
        """
        self._num_under_way += 1
        is_long = False
        for stage, key in zip(self._stages, route, strict=True):
            if (peer := stage.peers.get(key)) is not None:
                is_long = is_long or stage.is_far(peer)
                peer.num_under_way += 1
                peer.num_given += 1
                peer.given_at = now
        return is_long

    def ended(self, route: Sequence[MemberKey]) -> None:
        """Note that such a ticket is back, or was given up."""
        self._num_under_way -= 1
        for stage, key in zip(self._stages, route, strict=True):
            if (peer := stage.peers.get(key)) is not None:
                peer.num_under_way = max(0, peer.num_under_way - 1)

    # ------------------------------------------------------------------------------------------------ measuring

    def observe(self, trips: Sequence[Trip], seconds: float, *, now: float) -> None:
        """Learn from a ticket that is back after `seconds`, before `ended` is called; `trips` are of all stages in order."""
        ends = [self._own, *(self._known(stage, trip.key) for stage, trip in zip(self._stages, trips, strict=True))]
        for k, (stage, trip) in enumerate(zip(self._stages, trips, strict=True)):
            peer, after = ends[k + 1], trips[k + 1] if k + 1 < len(trips) else None
            peer.ticket_bytes = (trip.num_bytes + (after.num_bytes if after else 0)) / 2
            if peer.compute_s is None:
                peer.compute_s = trip.compute_s
            peer.compute_s += ALPHA * (trip.compute_s - peer.compute_s)
            ways = [trip, *([after] if after else [])]
            peer.latencies.append(sum(max(0.0, way.transfer_s - way.moving_s) for way in ways))
            elsewhere_s = max(0.0, seconds - trip.queue_s - trip.compute_s - sum(way.transfer_s for way in ways))
            known = stage.elsewhere_s
            stage.elsewhere_s = elsewhere_s if known is None else known + ALPHA * (elsewhere_s - known)
        self._own.ticket_bytes = trips[0].num_bytes / 2
        self._own.num_under_way = self._num_under_way
        for k, trip in enumerate(trips):
            if trip.num_bytes:
                self._note_way(ends[k], ends[k + 1], trip, seconds, now)
        for peer in ends:
            peer.observed_at = now

    def _known(self, stage: _Stage, key: MemberKey) -> _Peer:
        return stage.peers.get(key) or _Peer()

    def _note_way(self, a: _Peer, b: _Peer, way: Trip, seconds: float, now: float) -> None:
        """Learn of the lines at both ends of a transfer."""
        telling = [x for x in (a, b) if way.num_bytes >= 2 * TELLING_PART * x.ticket_bytes]
        for peer, other in ((a, b), (b, a)):
            # It serves `num_under_way` tickets while one is on its trip.
            most = seconds / max(1, peer.num_under_way) / peer.ticket_bytes
            byte_s = min(way.moving_s / way.num_bytes, most)
            is_slower = peer.byte_s is None or other.byte_s is None or peer.byte_s >= other.byte_s
            if peer in telling and (is_slower or byte_s < (peer.byte_s or 0.0)):
                peer.note_line(byte_s, now)

    # ------------------------------------------------------------------------------------------------ what is known

    def rate(self, stage: int, key: MemberKey) -> Rate | None:
        """Tickets per second that a peer can serve, and what bounds them; None until it has served one."""
        peer = self._stages[stage].peers.get(key)
        return self._stages[stage].rate(peer) if peer is not None and peer.compute_s is not None else None

    def bytes_per_s(self, stage: int, key: MemberKey) -> float | None:
        """The line of a peer as far as its tickets showed it; None if they did not."""
        peer = self._stages[stage].peers.get(key)
        return 1.0 / peer.byte_s if peer is not None and peer.compute_s is not None and peer.byte_s else None

    def tickets_per_s(self) -> float | None:
        """What all together can serve: the least of the stages' summed rates; None until every stage was measured."""
        if not all(stage.is_measured for stage in self._stages):
            return None
        return min(
            sum(stage.rate(peer).tickets_per_s for peer in stage.peers.values() if peer.compute_s is not None)
            for stage in self._stages
        )

    def take_reasons(self, stage: int) -> dict[MemberKey, str]:
        """Who was given no ticket since the last time because it would have been late, and how late."""
        peers = self._stages[stage].peers
        reasons = {key: peer.late for key, peer in peers.items() if peer.late and not peer.num_given}
        for peer in peers.values():
            peer.num_given, peer.late = 0, ""
        return reasons

    # ------------------------------------------------------------------------------------------------ deciding

    def must_wait(self) -> bool:
        """Whether all peers of some stage are at their first ticket: the next one waits until one of them is known."""
        return any(
            len(stage.peers) > 1 and not stage.is_measured and all(peer.num_under_way for peer in stage.peers.values())
            for stage in self._stages
        )

    def left_out(self, stage: int, among: Collection[MemberKey], *, num_left: int | None, now: float) -> dict[MemberKey, str]:
        """Say who of `among` gets no ticket now, with the reason; never all of them.

        Args:
            stage: which one.
            among: peers of it that may be tried.
            num_left: tickets of the step that nobody has been given yet, this one not counted; None: not known.
            now: seconds.
        """
        here = self._stages[stage]
        peers = {key: here.peers[key] for key in among if key in here.peers}
        pace = self.tickets_per_s()
        if len(peers) < 2 or not here.is_measured or pace is None:
            return {}
        unknown = [key for key, peer in peers.items() if peer.compute_s is None and peer.num_under_way]
        out = dict.fromkeys(unknown, "it is at its first ticket")
        for key, peer in peers.items():
            if peer.num_under_way * here.line_s(peer) > self._request_s / 2:
                out[key] = f"the bytes of its {peer.num_under_way} tickets take {here.line_s(peer):.3g} s each"
        back_s = {key: self._back_s(here, peer) for key, peer in peers.items() if key not in out}
        if num_left is not None and back_s:
            first = min(back_s, key=lambda key: back_s[key])
            rest_s = (self._num_under_way + num_left + 1) / pace
            for key, late_s in back_s.items():
                is_late = key != first and CAUTION * late_s > max(rest_s, back_s[first])
                if is_late and not self._is_due(here, peers[key], late_s, now):
                    out[key] = f"a ticket takes {late_s:.3g} s there, the rest of the step {rest_s:.3g} s"
                    peers[key].late = out[key]
        queue_s = {key: self._queue_s(here, peer) for key, peer in peers.items() if key not in out}
        near = {key for key in queue_s if here.rate(peers[key]).bound == "compute"} or queue_s.keys()
        most_s = max(0.0, min((queue_s[key] for key in near), default=0.0))
        for key, waits_s in queue_s.items():
            if waits_s > (most_s if key in near else 0.0):
                out[key] = f"{peers[key].num_under_way} tickets are there, which take {waits_s:.3g} s longer than elsewhere"
        return out

    def _is_due(self, stage: _Stage, peer: _Peer, late_s: float, now: float) -> bool:
        """Whether a peer that will be late is tried all the same: nobody knows it, and its line is no reason; or by the clock."""
        if peer.num_under_way:
            return False
        if peer.compute_s is not None:
            return now - peer.given_at >= late_s / PROBE_PART
        return stage.rate(peer).bound == "compute" or now - peer.given_at >= late_s / FIRST_PROBE_PART

    def _back_s(self, stage: _Stage, peer: _Peer) -> float:
        """When a ticket would be back that this peer is given now; those before it may use its line both ways in turn."""
        before_s = peer.num_under_way * max(1 / stage.rate(peer).tickets_per_s, 2 * stage.line_s(peer))
        unknown = 2.0 if peer.compute_s is None else 1.0
        return unknown * (stage.alone_s(peer) + max(stage.elsewhere_s or 0.0, before_s))

    def _queue_s(self, stage: _Stage, peer: _Peer) -> float:
        """How long what it was given occupies it, beyond the time of one trip and what keeps it busy; below 0 it may be idle."""
        trip_s = (stage.elsewhere_s or 0.0) + stage.alone_s(peer)
        return (peer.num_under_way - SPARE) / stage.rate(peer).tickets_per_s - trip_s
