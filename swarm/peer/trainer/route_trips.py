"""Sends one micro-batch along one route, from stage 0 and back, and tells the trainer's wiring what that took.

Owns the request and the reports to the wiring. Must not know leases, retries or steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from swarm.base.errors import RemoteError
from swarm.base.ids import Ticket
from swarm.net.transport import Progress
from swarm.peer.hop import HopResult, call_stage
from swarm.peer.link import Link, Refuse, RefusedBy
from swarm.peer.trainer.reports import RoundTrips
from swarm.peer.trainer.wiring import Wiring
from swarm.wire import messages as m
from swarm.wire.framing import Buffer

Specs = tuple[m.TensorSpec, ...]


class RouteTrips:
    """Sends one trainer's micro-batches."""

    def __init__(self, link: Link, wiring: Wiring) -> None:
        self._link = link
        self.wiring = wiring
        self._round_trips = RoundTrips()

    def taken_round_trips(self) -> RoundTrips:
        """Return where the time went since this was asked last."""
        taken, self._round_trips = self._round_trips, RoundTrips()
        return taken

    async def train(
        self,
        ticket: Ticket,
        version_id: str,
        tensors: Specs,
        buffers: Sequence[Buffer],
        served_by: dict[int, str],
        avoid: frozenset[str],
        *,
        with_norms: bool = False,
    ) -> tuple[m.Trained, int]:
        """Send a micro-batch forward and backward.

        Args:
            ticket, version_id: of the micro-batch, and of the parameters that it uses.
            tensors, buffers: its samples.
            served_by: who served each stage the last time; asked first, and brought up to date.
            avoid: peers that are asked last.
            with_norms: the stages tell the norms of what they compute.

        Returns:
            What the stages made of it, and how often it was sent again on its way because a peer failed.

        Raises:
            RemoteError: nobody could take it; of stage 0 the wiring knows who failed.
        """
        result = await self._one("train", ticket, version_id, tensors, buffers, served_by, avoid, with_norms or None)
        self._round_trips.add(result.seconds, result.trained.hops)
        return result.trained, len(result.failed) + sum(len(hop.failed) for hop in result.trained.hops)

    async def evaluate(self, ticket: Ticket, version_id: str, tensors: Specs, buffers: Sequence[Buffer]) -> m.Trained:
        """Send a batch forward only; the routers are not told how long that took.

        Raises:
            RemoteError: as `train`.
        """
        result = await self._one("eval", ticket, version_id, tensors, buffers, {}, frozenset())
        return result.trained

    async def _one(
        self,
        mode: Literal["train", "eval"],
        ticket: Ticket,
        version_id: str,
        tensors: Specs,
        buffers: Sequence[Buffer],
        served_by: dict[int, str],
        avoid: frozenset[str],
        with_norms: bool | None = None,
    ) -> HopResult:
        await self.wiring.wait_for_candidates()
        num_samples, now, is_timed = _num_samples(tensors), asyncio.get_running_loop().time(), mode == "train"
        chosen = self.wiring.choose(ticket, num_samples, now=now, served_by=served_by, avoid=avoid, is_timed=is_timed)
        if isinstance(chosen, int):
            raise RemoteError(f"stage {chosen} has no peer that may be tried now")
        try:
            return await self._along(chosen.route, mode, ticket, version_id, tensors, buffers, served_by, with_norms)
        finally:
            self.wiring.ended(chosen)

    async def _along(
        self,
        route: m.Route,
        mode: Literal["train", "eval"],
        ticket: Ticket,
        version_id: str,
        tensors: Specs,
        buffers: Sequence[Buffer],
        served_by: dict[int, str],
        with_norms: bool | None,
    ) -> HopResult:
        loop = asyncio.get_running_loop()
        context, num_samples = self._link.context, _num_samples(tensors)
        served_by.update({stage: candidates[0].peer for stage, candidates in enumerate(route)})

        def request(remaining: m.Route) -> m.Train:
            if self.wiring.is_outdated(remaining):
                raise RemoteError("peers have gone since the route was made")
            return m.Train(
                run=context.run,
                mode=mode,
                ticket=ticket,
                version_id=version_id,
                stage=0,
                route=remaining,
                tensors=tensors,
                with_norms=with_norms,
            )

        def failed(stage: int, peer: str, waited_s: float) -> None:
            self.wiring.failed(stage, peer, now=loop.time(), waited_s=waited_s, num_samples=num_samples)

        try:
            result = await call_stage(self._link, route, request, buffers, stage=0, progress=Progress())
        except RefusedBy as refused:  # from further down
            stage = refused.refusal.stage
            if refused.code == "failed_everywhere" and not self.wiring.is_whole(route, stage):
                raise RemoteError(f"all that may be tried now: {refused}") from None
            if refused.code == "no_candidate" and stage is not None and stage < len(route):
                for candidate in route[stage]:
                    self._link.presence.suspect(candidate, "the stage before could not use it")
            raise
        except Refuse as refused:  # every candidate of stage 0 failed
            if refused.code == "failed_everywhere" and self.wiring.is_whole(route, 0):
                raise
            for candidate in route[0]:
                failed(0, candidate.peer, 0.0)
            raise RemoteError(str(refused)) from None
        for member, _, waited_s in result.failed:
            failed(0, member.peer, waited_s)
        for hop in result.trained.hops:
            served_by[hop.stage] = hop.peer
            for member in [x for x in route[hop.stage] if x.peer == hop.peer]:
                self._link.presence.heard(member)
            for peer, _ in hop.failed:
                failed(hop.stage, peer, context.config.timing.stall_s if peer in hop.stalled else 0.0)
                for member in [x for x in route[hop.stage] if x.peer == peer]:
                    self._link.presence.suspect(member, "the stage before could not use it")
        if mode == "train":
            num_bytes = sum(spec.num_bytes for spec in tensors) + result.frame.body_bytes
            self.wiring.observe(route, result, num_samples, num_bytes=num_bytes, now=loop.time())
        return result


def _num_samples(tensors: Specs) -> int:
    return tensors[0].shape[0] if tensors[0].shape else 1
