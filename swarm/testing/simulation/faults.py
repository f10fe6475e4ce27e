"""What may happen to the processes of a simulated swarm: they die, leave, stop, hang, move, change roles,
and lose their network.

Owns each fault and its end. Must not know when a fault comes (`schedules.py`) nor what it may cost (`simulation.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from launch.processes.runner import CLOSE_TIMEOUT_S
from swarm.base.errors import SwarmError
from swarm.net.transport import Progress
from swarm.peer.backbone import Backbone
from swarm.peer.coordinator.coordinator import Coordinator
from swarm.peer.link import Link
from swarm.peer.stage.stage_peer import StagePeer
from swarm.policy.rebalance import PlannedMove
from swarm.policy.role_changes import Colleague, Decision, Role
from swarm.policy.roles import Work
from swarm.testing.simulation.nodes import Node, Nodes
from swarm.wire.framing import Frame
from swarm.wire.messages import Join, Joining


class Faults(Nodes):
    """The faults of a simulation, one method each."""

    async def kill(self, name: str) -> None:
        """SIGKILL: connections break, nothing is said, memory is gone."""
        node = self.nodes.pop(name)
        self.network.crash(node.address)
        self.dht_network.isolate(node.address)
        if node.running is not None:
            node.running.cancel()
            await asyncio.gather(node.running, return_exceptions=True)
        await node.peer._tasks.close()
        if isinstance(node.peer, StagePeer):
            node.peer._threads.close()
        if isinstance(node.peer, Backbone) and node.peer.aggregator is not None:
            node.peer.aggregator.close()
        await node.peer.context.dht.close()

    async def leave(self, name: str) -> None:
        """SIGTERM: the peer says so, finishes what it has and goes, in the time that a launcher gives it."""
        node = self.nodes[name]
        node.peer.stop()
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await node.peer.close()
        del self.nodes[name]

    def _coordinator(self) -> tuple[Node, Coordinator] | None:
        coordinators = {node: found for node in self.nodes.values() if (found := self.coordinator_at(node)) is not None}
        return max(coordinators.items(), key=lambda item: item[1].ballot, default=None)

    def give_role(self, name: str, role: Role) -> bool:
        """The next record gives this stage peer a role, whatever the policy thinks; False if nobody coordinates."""
        found = self._coordinator()
        if found is None:
            return False
        wanted, roles = self.nodes[name].stage_peer.stage_context.me.peer[:8], found[1].rebalancing.roles

        def revise(colleagues: Sequence[Colleague], work: Work) -> Decision:
            return tuple(role if x.name == wanted else x.role for x in colleagues), "given on purpose"

        roles.revise, roles.decided_at = revise, -1e9
        return True

    def move(self, name: str, target: int) -> bool:
        """The next record moves this stage peer, whatever the policy thinks; False if nobody coordinates."""
        found = self._coordinator()
        if found is None:
            return False
        peer = self.nodes[name].stage_peer
        node, coordinator = found
        node.planner.want(PlannedMove(peer.stage_context.me.key, peer.stage, target))
        coordinator.rebalancing._decided_at = -1e9  # a decision is due
        return True

    async def fell(self, name: str, how: str) -> None:
        """A peer goes: `killed` (connections are refused), `preempted` (nothing answers) or `stopped` (nothing is said)."""
        node = self.nodes[name]
        if how == "stopped":
            self.pause(node)
            return
        if how == "preempted":
            self.isolate(node)
        await self.kill(name)

    async def silent_joiners(self, count: int, *, stage: int | None = None, for_s: float, refuses: bool = False) -> None:
        """So many peers hold the newest state and ask to be listed for `for_s`; nobody answers where they say that they are.

        With `refuses` nobody even listens there.
        """

        async def silent(frame: Frame, progress: Progress) -> Frame:
            await asyncio.Event().wait()
            raise AssertionError

        async def ask(number: int) -> None:
            context = self.context(f"joiner{number}")
            if not refuses:
                await context.transport.start(silent)
            link = Link(context)
            while True:
                coordinators = [node for node in self.nodes.values() if self.coordinates(node)]
                record = self.commits[max(self.commits)] if self.commits else None
                joins = stage if stage is not None else number % self.config.num_stages
                request = Join(
                    run=context.run,
                    stage=joins,
                    member=context.member(ready=True),
                    version_id=record.version_id if record else None,
                )
                for node in coordinators:
                    with contextlib.suppress(SwarmError):
                        await link.ask(node.address, request, Joining)
                await asyncio.sleep(self.config.timing.request_s / 8)

        asking = [asyncio.ensure_future(ask(number)) for number in range(count)]
        await asyncio.sleep(for_s)
        for task in asking:
            task.cancel()
        for result in await asyncio.gather(*asking, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise AssertionError(f"a joiner ended: {result!r}")
        for number in range(count):
            self.network.crash(self._addresses[f"joiner{number}"])

    def pause(self, node: Node) -> None:
        """SIGSTOP: it takes requests, and nothing advances."""
        self.network.pause(node.address)
        self.dht_network.isolate(node.address)
        if node.executor is not None:
            node.executor.hung = True

    def resume(self, node: Node) -> None:
        """SIGCONT."""
        self.network.resume(node.address)
        self.dht_network.heal([node.address])
        if node.executor is not None:
            node.executor.hung = False

    def isolate(self, node: Node) -> None:
        """No packet to or from anyone."""
        for other in self.nodes.values():
            if other is not node:
                self.network.cut(node.address, other.address)
        self.dht_network.isolate(node.address)

    def rejoin(self, node: Node) -> None:
        """Undo `isolate`."""
        self.network.heal_all(node.address)  # also from those that died meanwhile, and may return to their address
        self.dht_network.heal([node.address])

    def partition(self, names: list[str]) -> None:
        """Cut `names` off from all others, but not from each other."""
        for a in names:
            for b in [n for n in self.nodes if n not in names]:
                self.network.cut(self.nodes[a].address, self.nodes[b].address)
        self.dht_network.isolate(*(self.nodes[n].address for n in names))

    def heal_partition(self) -> None:
        """Undo every cut."""
        self.network.heal_all()
        self.dht_network.heal()

    def hang(self, node: Node) -> None:
        """The device hangs under a lively event loop."""
        if node.executor is not None:
            node.executor.hung = True

    def unhang(self, node: Node) -> None:
        """Undo `hang`."""
        if node.executor is not None:
            node.executor.hung = False
