"""Stochastic wiring: turns the newest record's members into a route for each micro-batch, by IWRR at each stage.

The shell around `policy/routing.py` and `policy/occupancy.py`: feeds them with hops and failures. Knows no transport.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from swarm.base.config import RunConfig
from swarm.base.ids import MemberKey, Ticket
from swarm.lifecycle.commit_record import computing
from swarm.peer.hop import HopResult
from swarm.peer.presence import Presence
from swarm.policy.occupancy import Occupancy, Trip
from swarm.policy.routing import MAX_CANDIDATES, MakeRouter, StageRouter
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A route, and the peers that are expected to serve it."""

    route: m.Route
    #: It passes a peer that takes long, and leaves the others idle.
    is_long: bool = False

    @property
    def keys(self) -> tuple[MemberKey, ...]:
        """The first candidate of each stage."""
        return tuple(candidates[0].key for candidates in self.route)


class Wiring:
    """Chooses routes for one trainer, with one router for each stage.

    Args:
        config: of the run.
        rng: breaks ties.
        presence: knows who may be gone.
        router: makes each stage's router.
    """

    def __init__(self, config: RunConfig, rng: random.Random, presence: Presence, router: MakeRouter = StageRouter) -> None:
        self._presence = presence
        self._config = config
        self._routers = [router(rng, max_ban_s=config.timing.record_ttl_s) for _ in range(config.num_stages)]
        self._members: list[dict[MemberKey, m.Member]] = [{} for _ in range(config.num_stages)]
        #: Ready members that only aggregate: they are routed to if nobody else can be.
        self._aggregating: list[dict[MemberKey, m.Member]] = [{} for _ in range(config.num_stages)]
        #: How long a ticket occupies whom.
        self.occupancy = Occupancy(config.num_stages, request_s=config.timing.request_s)
        #: Of each open step the highest number of a ticket that was sent, in the era of the newest record.
        self._highest: dict[int, int] = {}
        self._era = 0
        #: Micro-batches under way that pass a peer behind a slow line, say: they keep nobody else busy.
        self.num_long = 0
        #: Set, and replaced, when a micro-batch has ended.
        self._ended = asyncio.Event()

    def set_record(self, record: m.CommitRecord) -> None:
        """Take over the members of the newest record; those that are not ready, or only aggregate, are not routed to."""
        for stage, router in enumerate(self._routers):
            self._members[stage] = {x.key: x for x in computing(record.members[stage])}
            self._aggregating[stage] = {x.key: x for x in record.members[stage] if x.ready and x.key not in self._members[stage]}
            router.set_members(self._members[stage])
        self.occupancy.set_members(self._members)
        self._highest = {k: n for k, n in self._highest.items() if k > record.step and record.era == self._era}
        self._era = record.era
        self._presence.liveness.set_groups([a | b for a, b in zip(self._members, self._aggregating, strict=True)])
        self._wake()

    def _widen(self, stage: int) -> bool:
        """Route to those of a stage that only aggregate, until the next record; False if there is none."""
        aggregating, self._aggregating[stage] = self._aggregating[stage], {}
        if aggregating:
            self._members[stage] = self._members[stage] | aggregating
            self._routers[stage].set_members(self._members[stage])
            self.occupancy.set_members(self._members)
        return bool(aggregating)

    def members(self, stage: int) -> dict[MemberKey, m.Member]:
        """Those that may be routed to."""
        return self._members[stage]

    def choose(
        self,
        ticket: Ticket,
        num_samples: int,
        *,
        now: float,
        served_by: dict[int, str] | None = None,
        avoid: frozenset[str] = frozenset(),
        is_timed: bool = True,
    ) -> Chosen | int:
        """Choose candidates for every stage; else return the first stage that has none at `now`.

        Who may be gone is left out; where all of a stage may be, they are tried, for the stage before may reach them. Whose
        help would make the step longer is asked last. Who gets a route calls `ended` when it is done with it.

        Args:
            ticket: of the micro-batch.
            num_samples: size of the micro-batch, for the work that is reserved.
            now: seconds on the trainer's clock.
            served_by: for a re-issued ticket, the peer that served each stage before: it is asked first.
            avoid: peers that are asked last.
            is_timed: a step waits for it.
        """
        if is_timed:
            self._highest[ticket.step] = max(ticket.index, self._highest.get(ticket.step, 0))
        route = []
        for stage, router in enumerate(self._routers):
            suspected = self._presence.liveness.suspected(self._members[stage])
            if all(key in suspected or key[0] in avoid for key in self._members[stage]):
                self._widen(stage)
            peer = (served_by or {}).get(stage)
            first = next((key for key in self._members[stage] if key[0] == peer and peer not in avoid), None)
            if first is None and avoid:
                first = next((key for key in self._members[stage] if key[0] not in avoid), None)
            suspected = self._presence.liveness.suspected(self._members[stage])
            among = [key for key in self._members[stage] if key not in suspected]
            late = self.occupancy.left_out(stage, among, num_left=self._num_left(ticket.step), now=now) if is_timed else {}
            if first is not None:
                late.pop(first, None)
            keys = router.candidates(num_samples, now=now, first=first, without=suspected | late.keys())
            if keys:
                keys += [key for key in late if key not in keys][: MAX_CANDIDATES - len(keys)]
            else:
                keys = router.candidates(num_samples, now=now, first=first, without=suspected)
            keys = keys or router.candidates(num_samples, now=now, first=first)
            if not keys and self._widen(stage):
                keys = router.candidates(num_samples, now=now)
            if not keys:
                return stage
            route.append(tuple(self._members[stage][key] for key in keys))
        is_long = self.occupancy.began([candidates[0].key for candidates in route], now=now)
        self.num_long += is_long
        return Chosen(tuple(route), is_long)

    def _num_left(self, step: int) -> int:
        """Tickets that come before anybody waits for those of `step`: numbers are leased in their order."""
        config = self._config
        return config.tickets_per_step * (1 + config.delay_steps) - 1 - self._highest.get(step, 0)

    def ended(self, chosen: Chosen) -> None:
        """Note that a micro-batch is back, or was given up."""
        self.num_long -= chosen.is_long
        self.occupancy.ended(chosen.keys)
        self._wake()

    def _wake(self) -> None:
        self._ended.set()
        self._ended = asyncio.Event()

    def is_whole(self, route: m.Route, stage: int | None) -> bool:
        """Whether `route` leaves out nobody of `stage`, or names as many as a route can. A peer said which: it may be none."""
        if stage is None or stage >= len(route):
            return False
        return len(route[stage]) >= min(MAX_CANDIDATES, len(self._members[stage]) + len(self._aggregating[stage]))

    def is_outdated(self, route: m.Route) -> bool:
        """Tell whether all candidates of a stage fell silent since `route` was made, and others of it did not."""
        liveness = self._presence.liveness
        return any(
            len(liveness.silent(x.key for x in candidates)) == len(candidates) and len(liveness.silent(members)) < len(members)
            for candidates, members in zip(route, self._members, strict=True)
        )

    async def wait_for_candidates(self) -> None:
        """Wait while all of a stage are suspected, and some of them not looked at yet: nobody of it can be chosen.

        So does a second ticket for each peer of a stage while none of them is known: a slow one would get half of all.
        """
        liveness = self._presence.liveness
        while self.occupancy.must_wait():
            await self._ended.wait()
        while any(len(liveness.silent(members)) < len(members) == len(liveness.suspected(members)) for members in self._members):
            await self._presence.look_ended()

    def observe(self, route: m.Route, result: HopResult, num_samples: int, *, num_bytes: int, now: float) -> None:
        """Feed the hops of a finished micro-batch: how long it occupied who served each stage.

        Args:
            route: that it took.
            result: of its first hop.
            num_samples: its size.
            num_bytes: on the way to the first stage and back.
            now: seconds on the trainer's clock.
        """
        trips: list[Trip] = []
        sent_bytes, transfer_s, moving_s = num_bytes, result.transfer_s, result.moving_s
        for hop, after in zip(result.trained.hops, [*result.trained.hops[1:], None], strict=True):
            key = next((x.key for x in route[hop.stage] if x.peer == hop.peer), None)
            if key is None:
                return
            trips.append(Trip(key, hop.queue_s, hop.forward_s + hop.backward_s, sent_bytes, transfer_s, moving_s))
            if after is not None:
                sent_bytes, transfer_s = hop.num_bytes, hop.transfer_s
                moving_s = transfer_s if after.moving_s is None else after.moving_s
        if len(trips) != len(self._routers):
            return
        self.occupancy.observe(trips, result.seconds, now=now)
        for stage, trip in enumerate(trips):
            rate = self.occupancy.rate(stage, trip.key)
            if rate is not None:
                seconds = 1.0 / rate.tickets_per_s
                self._routers[stage].observe(trip.key, seconds, num_samples, reserved=route[stage][0].key)

    def failed(self, stage: int, peer: str, *, now: float, waited_s: float, num_samples: int) -> None:
        """Ban `peer` for a while: it could not be used."""
        key = next((key for key in self._members[stage] if key[0] == peer), None)
        if key is not None:
            self._routers[stage].failed(key, now=now, waited_s=waited_s, num_samples=num_samples)
