"""A backbone peer: bootstrap and coordinator without a device. Composition root; needs no torch."""

from __future__ import annotations

import asyncio

from swarm.peer.context import PeerContext
from swarm.peer.link import Link, Tasks
from swarm.peer.run_info import RunInfoServer
from swarm.peer.seat import Seat
from swarm.wire import messages as m

#: A coordinator that leaves takes so long, in seconds, to end the steps that are open.
DRAIN_S = 8.0


class Backbone:
    """Serves until stopped."""

    def __init__(self, context: PeerContext) -> None:
        self.context = context
        self._tasks = Tasks()
        self.link = Link(context)
        self.seat = Seat(self.link, self._tasks, rank=0)
        RunInfoServer(self.link, record=lambda: self.record, status=self._status, coordinator=lambda: self.seat.known)
        self._stopped = asyncio.Event()

    @property
    def record(self) -> m.CommitRecord | None:
        return self.seat.coordinator.record if self.seat.coordinator is not None else None

    def _status(self) -> m.StatusReply:
        coordinator = self.seat.coordinator
        detail: dict[str, str | int | float | bool] = {"coordinator": coordinator is not None}
        if coordinator is not None:
            detail |= {
                "ballot": coordinator.ballot.counter, "waiting_for": coordinator.waiting_for[:200],
                "trainers": len(coordinator.trainers), "moves": coordinator.rebalancing.reason[:200],
                "loss": self.record.loss if self.record else 0.0,
            }  # fmt: skip
        return m.StatusReply(
            role="backbone", member=self.context.member(), step=self.record.step + 1 if self.record else 0,
            head=self.record.head if self.record else "", state="coordinating" if coordinator else "watching",
            detail=detail, stages=self.record.members if self.record else (),
        )  # fmt: skip

    async def start(self) -> None:
        await self.link.serve()
        await self.context.dht.start(self.context.bootstrap)
        self._tasks.start(self.seat.run(), "seat", vital=True)

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        """Until `stop`.

        Raises:
            SwarmError: a part of the peer failed.
        """
        await self._tasks.until(self._stopped)

    async def close(self) -> None:
        await self.seat.retire(asyncio.get_running_loop().time() + DRAIN_S)
        await self._tasks.close()
        await self.context.dht.close()
        await self.context.transport.close()
