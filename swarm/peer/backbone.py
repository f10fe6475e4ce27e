"""A backbone peer: bootstrap, coordinator and perhaps aggregator without a device. Composition root; needs no torch itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.peer.context import PeerContext
from swarm.peer.coordinator.candidacy import WAITING_STATE
from swarm.peer.coordinator.election import Election
from swarm.peer.coordinator.rebalancing import Planner
from swarm.peer.link import Link, Tasks
from swarm.peer.run_info import RunInfoServer
from swarm.policy.rebalance import plan_moves
from swarm.wire import messages as m

if TYPE_CHECKING:
    from swarm.peer.aggregator import Aggregator

#: A coordinator that leaves takes so long, in seconds, to end the steps that are open, and an aggregator its attempts.
DRAIN_S = 8.0


class Backbone:
    """Bootstraps newcomers and perhaps coordinates, until it is stopped.

    Args:
        context: who this peer is.
        aggregator: makes the part that helps with averages; None if it does not.
        plan: decides who moves to another stage, while this peer coordinates.
    """

    def __init__(
        self, context: PeerContext, aggregator: Callable[[Link], Aggregator] | None = None, *, plan: Planner = plan_moves
    ) -> None:
        self.context = context
        self._tasks = Tasks()
        self.link = Link(context)
        self.election = Election(self.link, self._tasks, rank=0, plan=plan)
        self.aggregator = None if aggregator is None else aggregator(self.link)
        RunInfoServer(self.link, record=lambda: self.record, status=self._status, coordinator=lambda: self.election.known)
        self._stopped = asyncio.Event()

    @property
    def record(self) -> m.CommitRecord | None:
        """The newest record, while this peer coordinates."""
        return self.election.coordinator.record if self.election.coordinator is not None else None

    def _status(self) -> m.StatusReply:
        coordinator, record, heard = self.election.coordinator, self.record, self.election.heard
        step, version_id, stages = (heard.step, heard.version_id, heard.stages) if heard is not None else (-1, "", ())
        if record is not None:
            step, version_id, stages = record.step + 1, record.version_id, record.members
        detail: dict[str, str | int | float | bool] = {
            "coordinator": coordinator is not None,
            "total_steps": self.context.config.total_steps,
        }
        if coordinator is not None:
            detail |= {"trainers": len(coordinator.leasing.trainers), "moves": coordinator.rebalancing.reason[:200]}
        waiting_for = self.election.waiting_for or (str(heard.detail.get("waiting_for", "")) if heard is not None else "")
        if waiting_for:
            detail["waiting_for"] = waiting_for[:200]
        if record is not None and record.step >= 0:
            detail["loss"] = "none: the step was skipped" if record.loss is None else record.loss
            detail |= {"saved_step": record.saved} if record.saved else {}
        if self.aggregator is not None:
            detail |= self.aggregator.status()
        return m.StatusReply(
            role="backbone",
            member=self.context.member(),
            step=step,
            version_id=version_id,
            state="coordinating" if coordinator else WAITING_STATE if self.election.candidacy is not None else "watching",
            detail=detail,
            stages=stages,
            ballot=self.election.ballot,
        )

    async def start(self) -> None:
        """Serve, join the DHT and stand for election."""
        await self.link.serve()
        await self.context.dht.start(self.context.bootstrap)
        self._tasks.start(self.link.presence.keep_looking(), "looks", vital=True)
        self._tasks.start(self.election.run(), "election", vital=True)
        if self.aggregator is not None:
            self._tasks.start(self.aggregator.announce_loop(), "announce aggregator")

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    async def run(self) -> None:
        """Wait for `stop`.

        Raises:
            SwarmError: a part of the peer failed.
        """
        await self._tasks.until(self._stopped)

    async def close(self) -> None:
        """End the steps that this peer coordinates and the averages that it helps with, within a bound, and go."""
        until = asyncio.get_running_loop().time() + DRAIN_S
        await self.election.retire(until)
        if self.aggregator is not None:
            await self.aggregator.retire(until)
        await self._tasks.close()
        if self.aggregator is not None:
            self.aggregator.close()
        await self.context.dht.close()
        await self.context.transport.close()
