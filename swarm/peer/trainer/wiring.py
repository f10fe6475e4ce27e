"""Stochastic wiring: turns the newest record's members into a route for each micro-batch, by IWRR at each stage.

The shell around `policy/routing.py`: feeds it with hops and failures. Knows no transport.
"""

from __future__ import annotations

import random

from swarm.base.ids import MemberKey
from swarm.peer.presence import Presence
from swarm.policy.routing import MAX_CANDIDATES, MakeRouter, StageRouter
from swarm.wire import messages as m


class Wiring:
    """Chooses routes for one trainer, with one router for each stage."""

    def __init__(
        self, num_stages: int, rng: random.Random, presence: Presence, *, max_ban_s: float, router: MakeRouter = StageRouter
    ) -> None:
        self._presence = presence
        self._routers = [router(rng, max_ban_s=max_ban_s) for _ in range(num_stages)]
        self._members: list[dict[MemberKey, m.Member]] = [{} for _ in range(num_stages)]

    def set_record(self, record: m.CommitRecord) -> None:
        """Take over the members of the newest record; those that are not ready are not routed to."""
        for stage, router in enumerate(self._routers):
            self._members[stage] = {x.key: x for x in record.members[stage] if x.ready}
            router.set_members(self._members[stage])
        self._presence.liveness.set_groups(self._members)

    def route(
        self, num_samples: int, *, now: float, served_by: dict[int, str] | None = None, avoid: frozenset[str] = frozenset()
    ) -> m.Route | int:
        """Choose candidates for every stage; else return the first stage that has none at `now`.

        Who may be gone is left out; where all of a stage may be, they are tried, for the stage before may reach them.

        Args:
            num_samples: size of the micro-batch, for the work that is reserved.
            now: seconds on the trainer's clock.
            served_by: for a re-issued ticket, the peer that served each stage before: it is asked first.
            avoid: peers that are asked last.
        """
        route = []
        for stage, router in enumerate(self._routers):
            peer = (served_by or {}).get(stage)
            first = next((key for key in self._members[stage] if key[0] == peer and peer not in avoid), None)
            if first is None and avoid:
                first = next((key for key in self._members[stage] if key[0] not in avoid), None)
            liveness, members = self._presence.liveness, self._members[stage]
            keys = router.candidates(num_samples, now=now, first=first, without=liveness.suspected(members))
            keys = keys or router.candidates(num_samples, now=now, first=first)
            if not keys:
                return stage
            route.append(tuple(self._members[stage][key] for key in keys))
        return tuple(route)

    def is_whole(self, route: m.Route, stage: int | None) -> bool:
        """Whether `route` leaves out nobody of `stage`, or names as many as a route can. A peer said which: it may be none."""
        return stage is not None and stage < len(route) and len(route[stage]) >= min(MAX_CANDIDATES, len(self._members[stage]))

    def is_outdated(self, route: m.Route) -> bool:
        """Tell whether all candidates of a stage fell silent since `route` was made, and others of it did not."""
        liveness = self._presence.liveness
        return any(
            len(liveness.silent(x.key for x in candidates)) == len(candidates) and len(liveness.silent(members)) < len(members)
            for candidates, members in zip(route, self._members, strict=True)
        )

    async def wait_for_candidates(self) -> None:
        """Wait while all of a stage are suspected, and some of them not looked at yet: nobody of it can be chosen."""
        liveness = self._presence.liveness
        while any(len(liveness.silent(members)) < len(members) == len(liveness.suspected(members)) for members in self._members):
            await self._presence.look_ended()

    def observe(self, route: m.Route, hops: tuple[m.Hop, ...], num_samples: int) -> None:
        """Feed the hops of a finished micro-batch: queue and compute seconds of each stage."""
        for hop in hops:
            reserved = route[hop.stage][0].key
            key = next((x.key for x in route[hop.stage] if x.peer == hop.peer), None)
            if key is not None:
                seconds = hop.queue_s + hop.forward_s + hop.backward_s
                self._routers[hop.stage].observe(key, seconds, num_samples, reserved=reserved)

    def failed(self, stage: int, peer: str, *, now: float, waited_s: float, num_samples: int) -> None:
        """Ban `peer` for a while: it could not be used."""
        key = next((key for key in self._members[stage] if key[0] == peer), None)
        if key is not None:
            self._routers[stage].failed(key, now=now, waited_s=waited_s, num_samples=num_samples)
