"""The parts of a simulated peer that a test can look into: each request is a `Call`, and what is sent can be held or falsified.

Owns what lies between a peer and its in-memory twins. Must not know what a fault is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from swarm.base.errors import LinkBroken
from swarm.base.ids import Address
from swarm.net.transport import Handler, Progress
from swarm.policy.rebalance import PlannedMove, RebalancePlan, plan_moves
from swarm.policy.throughput import Swarm
from swarm.stage.accumulator import Accumulator
from swarm.stage.executor import InlineExecutor, Outcome, Priority
from swarm.stage.layout import Layout
from swarm.testing.memory_transport import MemoryTransport
from swarm.testing.simulation.invariants import WatchedProgress
from swarm.wire.framing import Frame
from swarm.wire.messages import Message

if TYPE_CHECKING:
    from swarm.testing.simulation.nodes import Node, Nodes

T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """One request between two peers, from before it is sent until its caller has the reply or gave up."""

    source: Address
    target: Address
    message: Message
    stall_s: float
    began_at: float
    progress: WatchedProgress
    reply: Message | None = None
    error: BaseException | None = None


class TappedTransport(MemoryTransport):
    """Tells the simulation of every request, which may hold it back, and of every reply; may falsify both."""

    def __init__(self, nodes: Nodes, address: Address, **options: float) -> None:
        super().__init__(nodes.network, address, **options)  # type: ignore[arg-type]
        self._nodes = nodes

    async def start(self, handler: Handler) -> None:
        """Listen as the in-memory transport does, with replies that may be falsified."""

        async def falsifying(frame: Frame, progress: Progress) -> Frame:
            return self._nodes.falsified(self.address, await handler(frame, progress))

        await super().start(falsifying)

    async def call(self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None) -> Frame:
        """Send a request as the in-memory transport does, seen and perhaps held, falsified or lost."""
        nodes = self._nodes
        now = asyncio.get_running_loop().time()
        call = Call(self.address, address, request.message, stall_s, now, WatchedProgress(progress, now))
        for before in nodes.before_request:
            await before(call)
        call.progress.advanced_at = asyncio.get_running_loop().time()
        nodes.open_calls[call] = None
        try:
            request = nodes.falsified(self.address, request)
            reply = await super().call(address, request, stall_s=stall_s, progress=call.progress)
            if any(lost(call) for lost in nodes.lose_reply):
                raise LinkBroken(f"{address}: the reply was lost (injected)")
            call.reply = reply.message
        except BaseException as error:
            call.error = error
            raise
        finally:
            del nodes.open_calls[call]
            for after in nodes.after_reply:
                after(call)
        return reply


class TappedExecutor(InlineExecutor):
    """Every job of the compute thread may have changed a ledger."""

    def __init__(self, nodes: Nodes, duration: Callable[[Priority], float]) -> None:
        super().__init__(duration)
        self._invariants = nodes.invariants

    async def run(self, job: Callable[[], T], priority: Priority, kind: str | None = None) -> Outcome[T]:
        """Run a job, and have the ledgers looked at afterwards."""

        def noted() -> T:
            self._invariants.ledgers_changed = True
            return job()

        return await super().run(noted, priority, kind)


class FailingAccumulator(Accumulator):
    """Fails halfway when told to, as a real one does when memory runs out."""

    def __init__(self, node: Node, step: int, layout: Layout, *, dtype: torch.dtype, device: str) -> None:
        super().__init__(step, layout, dtype=dtype, device=device)
        self._node = node

    def add_all(self, gradients: list[torch.Tensor | None], factor: float = 1.0) -> None:
        """Add gradients; halfway only when that was asked for."""
        if self._node.fail_halfway:
            self._node.fail_halfway -= 1
            super().add_all([gradients[0], *[None for _ in gradients[1:]]], factor)
            raise RuntimeError("out of memory (injected)")
        super().add_all(gradients, factor)


class Planner:
    """The policy of rebalancing, but for one move that a test wants."""

    def __init__(self) -> None:
        self._wanted: PlannedMove | None = None

    def want(self, move: PlannedMove) -> None:
        """Let the next decision be this move, if its peer is where it is to leave."""
        self._wanted = move

    def __call__(self, swarm: Swarm, *, period_s: float, min_peers: int = 1) -> RebalancePlan:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return plan_moves(swarm, period_s=period_s, min_peers=min_peers)
        there = any(worker.key == wanted.key and worker.stage == wanted.source for worker in swarm.workers)
        return RebalancePlan((wanted,) if there else (), f"moved on purpose: {wanted}", 0.0, 0.0)
