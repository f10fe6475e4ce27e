"""A whole swarm in one process and in virtual time: the real peer code on the in-memory twins, with a small torch model.

`Simulation` starts backbones, stage peers and trainers, and injects faults; `check` compares with the plain loop of
`small_model`. Used by `tests/sim` and `benchmarks/faults/chaos.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from launch.processes.runner import CLOSE_TIMEOUT_S
from swarm.base.config import RunConfig
from swarm.base.errors import LinkBroken, SwarmError
from swarm.base.ids import Address, new_incarnation
from swarm.net.identity import Identity
from swarm.net.transport import Handler, Progress
from swarm.peer.aggregator import Aggregator
from swarm.peer.backbone import Backbone
from swarm.peer.context import PeerContext
from swarm.peer.link import Link
from swarm.peer.stage.stage_peer import Machine, StagePeer
from swarm.peer.trainer.reports import Evaluation, StepReport, TicketReport
from swarm.peer.trainer.trainer import Trainer
from swarm.policy.rebalance import PlannedMove, RebalancePlan, plan_moves
from swarm.policy.throughput import Swarm
from swarm.stage.accumulator import Accumulator
from swarm.stage.executor import InlineExecutor, Outcome, Priority, Threads
from swarm.stage.layout import Layout
from swarm.stage.module import Tie, ties_of
from swarm.testing.memory_dht import MemoryDht, MemoryDhtNetwork
from swarm.testing.memory_transport import MemoryNetwork, MemoryTransport
from swarm.testing.simulation.invariants import CheckedLoop, Invariants, WatchedProgress
from swarm.testing.simulation.small_model import PlainResult, SmallFactory, SmallFeed, one_process
from swarm.wire.framing import Frame
from swarm.wire.messages import CommitRecord, Join, Joining, Message

T = TypeVar("T")

#: Nodes that hold each DHT record: discovery has tests of its own, and its datagrams are most of what a run costs.
DHT_REPLICATION = 3


class _Planner:
    """The policy, but for one move that a test wants."""

    def __init__(self) -> None:
        self.wanted: PlannedMove | None = None

    def __call__(self, swarm: Swarm, *, period_s: float, min_peers: int = 1) -> RebalancePlan:
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            return plan_moves(swarm, period_s=period_s, min_peers=min_peers)
        there = any(worker.key == wanted.key and worker.stage == wanted.source for worker in swarm.workers)
        return RebalancePlan((wanted,) if there else (), f"moved on purpose: {wanted}", 0.0, 0.0)


@dataclass
class Node:
    """One process of the simulation."""

    name: str
    address: Address
    identity: Identity
    peer: StagePeer | Trainer | Backbone
    executor: InlineExecutor | None = None
    planner: _Planner = field(default_factory=_Planner)
    running: asyncio.Task[None] | None = None
    reports: list[StepReport] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    tickets: list[TicketReport] = field(default_factory=list)
    #: Compute takes this many times as long.
    slowness: float = 1.0
    #: So many accumulations to come fail after a part of the gradient was added.
    fail_halfway: int = 0


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


class _Transport(MemoryTransport):
    """Tells the simulation of every request, which may hold it back, and of every reply; may falsify both."""

    def __init__(self, simulation: Simulation, address: Address, **options: float) -> None:
        super().__init__(simulation.network, address, **options)  # type: ignore[arg-type]
        self._simulation = simulation

    async def start(self, handler: Handler) -> None:
        async def falsifying(frame: Frame, progress: Progress) -> Frame:
            return self._simulation.falsified(self.address, await handler(frame, progress))

        await super().start(falsifying)

    async def call(self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None) -> Frame:
        simulation = self._simulation
        now = asyncio.get_running_loop().time()
        call = Call(self.address, address, request.message, stall_s, now, WatchedProgress(progress, now))
        for before in simulation.before_request:
            await before(call)
        call.progress.advanced_at = asyncio.get_running_loop().time()
        simulation.open_calls[call] = None
        try:
            request = simulation.falsified(self.address, request)
            reply = await super().call(address, request, stall_s=stall_s, progress=call.progress)
            if any(lost(call) for lost in simulation.lose_reply):
                raise LinkBroken(f"{address}: the reply was lost (injected)")
            call.reply = reply.message
        except BaseException as error:
            call.error = error
            raise
        finally:
            del simulation.open_calls[call]
            for after in simulation.after_reply:
                after(call)
        return reply


class _Executor(InlineExecutor):
    """Every job of the compute thread may have changed a ledger."""

    def __init__(self, simulation: Simulation, duration: Callable[[Priority], float]) -> None:
        super().__init__(duration)
        self._invariants = simulation.invariants

    async def run(self, job: Callable[[], T], priority: Priority, kind: str | None = None) -> Outcome[T]:
        def noted() -> T:
            self._invariants.ledgers_changed = True
            return job()

        return await super().run(noted, priority, kind)


class _Accumulator(Accumulator):
    """Fails halfway when told to, as a real one does when memory runs out."""

    def __init__(self, node: Node, step: int, layout: Layout, *, dtype: torch.dtype, device: str) -> None:
        super().__init__(step, layout, dtype=dtype, device=device)
        self._node = node

    def add_all(self, gradients: list[torch.Tensor | None], factor: float = 1.0) -> None:
        if self._node.fail_halfway:
            self._node.fail_halfway -= 1
            super().add_all([gradients[0], *[None for _ in gradients[1:]]], factor)
            raise RuntimeError("out of memory (injected)")
        super().add_all(gradients, factor)


class Simulation:
    """Peers on one in-memory network; every random draw comes from `seed`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        seed: int = 0,
        feed: object | None = None,
        factory: object | None = None,
        forward_s: float = 0.010,
        state_dir: Path | None = None,
        **network: float,
    ) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(random.Random(self.rng.getrandbits(64)), **{"latency_s": 0.002, **network})
        self.dht_network = MemoryDhtNetwork(random.Random(self.rng.getrandbits(64)))
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.factory = factory or SmallFactory(config.num_stages, dtype, bool(config.model_options.get("tied")))
        self.feed = feed or SmallFeed(config)
        self.nodes: dict[str, Node] = {}
        self._state_dir = state_dir
        self._forward_s = forward_s
        #: Seconds of a seal and of an optimizer step.
        self.control_s = 0.0005
        self._next_port = 1000
        self._identities: dict[str, Identity] = {}
        self._addresses: dict[str, Address] = {}
        #: Names of nodes that a fault is at work on.
        self.troubled: set[str] = set()
        #: Every record that any peer saw, by step: two heads for one step are two models.
        self.version_ids: dict[int, set[str]] = {}
        self.commits: dict[int, CommitRecord] = {}
        #: Requests under way, in the order in which they were sent.
        self.open_calls: dict[Call, None] = {}
        #: Awaited before a request is sent: a phase can be met, and held, here. See `phases.py`.
        self.before_request: list[Callable[[Call], Awaitable[None]]] = []
        #: Called when a request has its reply or its caller gave up.
        self.after_reply: list[Callable[[Call], None]] = []
        #: A request that one of these is true of was served, but its caller sees a broken link.
        self.lose_reply: list[Callable[[Call], bool]] = []
        #: What a peer sends instead of each frame, by its address: a peer that computes wrong values.
        self.falsify: dict[Address, Callable[[Frame], Frame]] = {}
        self.invariants = Invariants(self)
        loop = asyncio.get_running_loop()
        if isinstance(loop, CheckedLoop):
            loop.checks.append(self.invariants.check)

    def falsified(self, source: Address, frame: Frame) -> Frame:
        return self.falsify[source](frame) if source in self.falsify else frame

    @property
    def next_address(self) -> Address:
        """Of the node that is added next."""
        return Address("10.0.0.1", self._next_port + 1)

    def is_paused(self, address: Address) -> bool:
        return address in self.network._paused

    # ------------------------------------------------------------------------------------------------ starting

    def _context(self, name: str, *, same_port: bool = False, state_dir: Path | None = None) -> PeerContext:
        if same_port and name in self._addresses:
            address = self._addresses[name]
            self.dht_network.heal([address])
        else:
            address = self._addresses[name] = self.next_address
            self._next_port += 1
        identity = self._identities.get(name)
        if identity is None:
            identity = self._identities[name] = Identity.ephemeral(random.Random(self.rng.getrandbits(64)))
        timing = self.config.timing
        transport = _Transport(self, address, connect_s=timing.connect_s, heartbeat_s=timing.heartbeat_s)
        live = [node.address for node in self.nodes.values() if node.running is not None and not node.running.done()]
        return PeerContext(
            config=self.config,
            config_bytes=self.config.to_bytes(),
            identity=identity,
            incarnation=new_incarnation(self.rng),
            transport=transport,
            dht=MemoryDht(self.dht_network, identity=identity, address=address, replication=DHT_REPLICATION),
            rng=random.Random(self.rng.getrandbits(64)),
            advertise_host=address.host,
            bootstrap=tuple(live[:3]),
            state_dir=state_dir,
        )

    def _duration(self, name: str) -> Callable[[Priority], float]:
        def duration(priority: Priority) -> float:
            base = {Priority.CONTROL: self.control_s, Priority.BACKWARD: 2 * self._forward_s}.get(priority, self._forward_s)
            node = self.nodes.get(name)
            return base * self.rng.uniform(0.8, 1.2) * (node.slowness if node is not None else 1.0)

        return duration

    async def add_backbone(self, name: str, *, aggregates: bool = False, limit_bytes: int = 2**30) -> Node:
        context = self._context(name)

        def aggregator(link: Link) -> Aggregator:
            return Aggregator(link, InlineExecutor(lambda priority: 0.0005), limit_bytes=limit_bytes)

        node = Node(name, context.transport.address, context.identity, None)  # type: ignore[arg-type]
        node.peer = Backbone(context, aggregator if aggregates else None, plan=node.planner)
        return await self._start(node)

    async def add_stage_peer(
        self, name: str, stage: int, *, memory_limit_bytes: int = 2**30, same_port: bool = False, keeps: bool = True
    ) -> Node:
        """A name that was there before is the same identity; with `same_port` it is found at the same address, too."""
        state_dir = self._state_dir / name if keeps and self._state_dir is not None else None
        context = self._context(name, same_port=same_port, state_dir=state_dir)
        executor = _Executor(self, self._duration(name))
        node = Node(name, context.transport.address, context.identity, None, executor)  # type: ignore[arg-type]
        node.peer = peer = StagePeer(
            context,
            stage=stage,
            factory=self.factory,
            threads=Threads(
                compute=executor,
                background=InlineExecutor(lambda priority: 0.0005),
                storage=InlineExecutor(lambda priority: 0.0005),
            ),
            machine=Machine(memory_limit_bytes=memory_limit_bytes),
            make_accumulator=functools.partial(_Accumulator, node),
        )

        def watch() -> None:
            peer.committed.on_commit.extend((self._note, lambda record: self.invariants.note_taken_over(peer, record)))

        watch()
        peer.on_move.append(watch)
        return await self._start(node)

    def _note(self, record: CommitRecord) -> None:
        self.version_ids.setdefault(record.step, set()).add(record.version_id)
        self.commits[record.step] = record

    async def add_trainer(self, name: str, **options: object) -> Node:
        context = self._context(name)
        node = Node(name, context.transport.address, context.identity, None)  # type: ignore[arg-type]
        node.peer = Trainer(
            context,
            feed=self.feed,
            on_step=node.reports.append,
            on_evaluation=node.evaluations.append,
            plan=node.planner,
            **{"on_ticket": node.tickets.append, **options},  # type: ignore[arg-type]
        )
        return await self._start(node)

    async def _start(self, node: Node) -> Node:
        self.nodes[node.name] = node
        await node.peer.start()
        node.running = asyncio.get_running_loop().create_task(node.peer.run(), name=node.name)
        return node

    async def start(self, *, peers_per_stage: int = 2, trainers: int = 1, backbones: int = 1) -> None:
        for i in range(backbones):
            await self.add_backbone(f"backbone{i}")
        for stage in range(self.config.num_stages):
            for i in range(peers_per_stage):
                await self.add_stage_peer(f"stage{stage}.{i}", stage)
        for i in range(trainers):
            await self.add_trainer(f"trainer{i}")

    # ------------------------------------------------------------------------------------------------ faults

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

    def move(self, name: str, target: int) -> bool:
        """The next record moves this stage peer, whatever the policy thinks; False if nobody coordinates."""
        coordinators = {n.peer.election.coordinator: n for n in self.nodes.values() if self.coordinates(n)}  # type: ignore[union-attr]
        if not coordinators:
            return False
        peer = self.nodes[name].peer
        assert isinstance(peer, StagePeer)
        coordinator = max(coordinators, key=lambda c: c.ballot)
        coordinators[coordinator].planner.wanted = PlannedMove(peer.stage_context.me.key, peer.stage, target)
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
            context = self._context(f"joiner{number}")
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
        """SIGSTOP."""
        self.network.pause(node.address)
        self.dht_network.isolate(node.address)
        if node.executor is not None:
            node.executor.hung = True

    def resume(self, node: Node) -> None:
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
        for a, b in list(self.network._cuts):  # also from those that died meanwhile, and may return to their address
            if node.address in (a, b):
                self.network.heal(a, b, one_way=True)
        self.dht_network.heal([node.address])

    def partition(self, names: list[str]) -> None:
        """Cut `names` off from all others, but not from each other."""
        for a in names:
            for b in [n for n in self.nodes if n not in names]:
                self.network.cut(self.nodes[a].address, self.nodes[b].address)
        self.dht_network.isolate(*(self.nodes[n].address for n in names))

    def heal_partition(self) -> None:
        for a, b in list(self.network._cuts):
            self.network.heal(a, b, one_way=True)
        self.dht_network.heal()

    def hang(self, node: Node) -> None:
        """The device hangs under a lively event loop."""
        if node.executor is not None:
            node.executor.hung = True

    def unhang(self, node: Node) -> None:
        if node.executor is not None:
            node.executor.hung = False

    def coordinates(self, node: Node) -> bool:
        return not isinstance(node.peer, StagePeer) and node.peer.election.coordinator is not None

    async def began(self, *, within_s: float = 60.0) -> None:
        """Until some peer knows the genesis record."""
        async with asyncio.timeout(within_s):
            while not self.version_ids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    # ------------------------------------------------------------------------------------------------ ending

    def stage_peers(self, stage: int | None = None) -> list[StagePeer]:
        return [
            node.peer
            for node in self.nodes.values()
            if isinstance(node.peer, StagePeer) and (stage is None or node.peer.stage == stage)
        ]

    async def finish(self, *, within_s: float = 600.0) -> None:
        """Until every trainer is done; fails if a peer did."""
        try:
            async with asyncio.timeout(within_s):
                while not self._all_done():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not finished within {within_s} s; {self.describe()}") from None
        await asyncio.sleep(2.0)  # the last record reaches everyone
        for node in self.nodes.values():
            if node.running is not None and node.running.done():
                node.running.result()
        # A peer of each stage holds what it made: some may hang still, and what was let go is noticed after a while.
        until = asyncio.get_running_loop().time() + 60.0 + self.config.timing.stage_lost_s
        while not all(self._holders(stage) for stage in range(self.config.num_stages)):
            assert asyncio.get_running_loop().time() < until, f"a stage has no holder of the last step; {self.describe()}"
            await asyncio.sleep(0.5)

    def _all_done(self) -> bool:
        """Every trainer ended, and a trainer that ended saw the last step; a failed peer ends the wait too."""
        for node in self.nodes.values():
            if node.running is not None and node.running.done() and not node.running.cancelled() and node.running.exception():
                return True
        trainers = [n for n in self.nodes.values() if isinstance(n.peer, Trainer)]
        return bool(trainers) and all(n.running is not None and n.running.done() for n in trainers)

    def describe(self) -> str:
        """What everyone does, for a failure message."""
        lines = []
        for node in self.nodes.values():
            peer = node.peer
            if isinstance(peer, StagePeer):
                lines.append(f"{node.name}: {peer.membership.state} at {peer.committed.num_commits}")
            elif isinstance(peer, Trainer):
                lines.append(f"{node.name}: at {peer.record.step + 1 if peer.record else None}, {len(peer._running)} in flight")
            if self.coordinates(node):
                lines.append(f"{node.name} coordinates, waiting for {peer.election.coordinator.waiting_for}")  # type: ignore[union-attr]
        return "; ".join(lines)

    async def abandon(self) -> None:
        """Drop everything without a word."""
        for name in list(self.nodes):
            await self.kill(name)

    async def close(self) -> None:
        for node in self.nodes.values():
            if node.running is not None:
                node.running.cancel()
                await asyncio.gather(node.running, return_exceptions=True)
        for node in self.nodes.values():
            await node.peer.close()

    def _holders(self, stage: int) -> list[StagePeer]:
        """Peers of a stage that hold the state after the last step."""
        peers = [peer for peer in self.stage_peers(stage) if peer.committed.up_to_date]
        return [peer for peer in peers if peer.committed.versions.newest.num_commits == self.config.total_steps]

    def parameters(self) -> torch.Tensor:
        """The whole parameter vector, from the first up-to-date peer of each stage."""
        parts = []
        for stage in range(self.config.num_stages):
            parts.append(self._holders(stage)[0].committed.versions.newest.masters)
        return torch.cat(parts)

    def copies(self, tie: Tie) -> list[torch.Tensor]:
        """Every copy of a tied parameter, of all peers that hold the state after the last step."""
        return [
            holder.stage_context.compute.layout.named(holder.committed.versions.newest.masters)[name]
            for stage, name in tie.places
            for holder in self._holders(stage)
        ]

    def records(self) -> list[float]:
        """Loss of every committed step, from the trainer that saw most."""
        best = max((n.reports for n in self.nodes.values() if isinstance(n.peer, Trainer)), key=len)
        return [report.record.loss for report in best]


_plain: dict[bytes, PlainResult] = {}


def check(simulation: Simulation, *, lineages: bool = False) -> None:
    """Promises 1, 2 and 3 at the end of a run in fp64 without compression.

    Args:
        simulation: has finished.
        lineages: a step may have had several heads, because the run was set back or split.

    Raises:
        AssertionError: saying which promise, and where.
    """
    config = simulation.config
    key = config.to_bytes()
    plain = _plain.get(key)
    if plain is None:
        plain = _plain[key] = one_process(config)
    losses: dict[int, float] = {}
    for step, record in simulation.commits.items():
        if step >= 0:
            tickets = [result.num_tickets for result in record.results]
            assert tickets == [config.tickets_per_step] * config.num_stages, f"exactly_once: step {step}: {tickets}"
            losses[step] = record.loss
    assert sorted(losses) == list(range(config.total_steps)), f"steps committed: {sorted(losses)}"
    for step, loss in losses.items():
        expected = plain.losses[step]
        assert abs(loss - expected) <= 1e-8 * abs(expected), f"same_as_one_process: step {step}: {loss} not {expected}"
    for step, version_ids in simulation.version_ids.items():
        assert len(version_ids) == 1 or lineages, f"two heads for step {step}"
    distance = float((simulation.parameters() - plain.parameters).norm() / plain.parameters.norm())
    assert distance < 1e-8, f"same_as_one_process: parameters differ by {distance}"
    for peer in simulation.stage_peers():
        captured = peer.stage_context.compute._captured
        if not peer.context.transport.held_bytes:  # a peer that moved may still serve one of its old stage
            kept = peer._budget.used_bytes - (captured._reserved_bytes if captured is not None else 0)
            assert kept == 0, f"bounded: stage {peer.stage} serves nothing and reserves {kept} bytes for micro-batches"
    for tie in ties_of(simulation.factory):  # type: ignore[arg-type]
        first, *others = simulation.copies(tie)
        assert all(torch.equal(first, other) for other in others), f"replicas_identical: copies of {tie.name} differ"
    for stage in range(config.num_stages):
        states = {
            (p.committed.versions.newest.version_id, p.committed.state_digest)
            for p in simulation.stage_peers(stage)
            if p.membership.serving and p.committed.up_to_date and p.committed.state_digest
        }
        assert (
            len({digest for version_id, digest in states if version_id in simulation.version_ids[config.total_steps - 1]}) == 1
        ), f"replicas_identical: stage {stage}: {states}"
