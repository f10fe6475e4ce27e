"""The processes of a simulated swarm: each is the product's own peer on the in-memory twins of network, DHT and threads.

Owns how they are built and started. Must not know which faults they meet, nor what a run's outcome should be.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swarm.base.config import RunConfig
from swarm.base.ids import Address, new_incarnation
from swarm.net.identity import Identity
from swarm.peer.aggregator import Aggregator
from swarm.peer.backbone import Backbone
from swarm.peer.context import PeerContext
from swarm.peer.coordinator.coordinator import Coordinator
from swarm.peer.link import Link
from swarm.peer.stage.stage_peer import Machine, StagePeer
from swarm.peer.trainer.reports import Evaluation, FeedLike, StepReport, TicketReport
from swarm.peer.trainer.trainer import Trainer
from swarm.stage.executor import InlineExecutor, Priority, Threads
from swarm.stage.module import StageFactory
from swarm.testing.memory_dht import MemoryDht, MemoryDhtNetwork
from swarm.testing.memory_transport import MemoryNetwork
from swarm.testing.simulation.invariants import CheckedLoop, Invariants
from swarm.testing.simulation.small_model import SmallFactory, SmallFeed
from swarm.testing.simulation.tapped import Call, FailingAccumulator, Planner, TappedExecutor, TappedTransport
from swarm.wire.framing import Frame
from swarm.wire.messages import CommitRecord

#: Nodes that hold each DHT record: discovery has tests of its own, and its datagrams are most of what a run costs.
DHT_REPLICATION = 3


@dataclass(eq=False)
class Node:
    """One process of the simulation."""

    name: str
    address: Address
    identity: Identity
    peer: StagePeer | Trainer | Backbone
    executor: InlineExecutor | None = None
    planner: Planner = field(default_factory=Planner)
    running: asyncio.Task[None] | None = None
    reports: list[StepReport] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    tickets: list[TicketReport] = field(default_factory=list)
    #: Compute takes this many times as long.
    slowness: float = 1.0
    #: So many accumulations to come fail after a part of the gradient was added.
    fail_halfway: int = 0

    @property
    def stage_peer(self) -> StagePeer:
        """The peer, which serves a stage."""
        assert isinstance(self.peer, StagePeer), f"{self.name} serves no stage"
        return self.peer


class Nodes:
    """Peers on one in-memory network; every random draw comes from `seed`.

    Args:
        config: of the run that all peers are of.
        seed: decides every random draw.
        feed: what trainers read; the small model's by default.
        factory: builds the stages; the small model's by default.
        forward_s: virtual seconds of a forward; a backward takes twice as long.
        state_dir: where peers keep their checkpoints; without it nobody keeps any.
        network: options of `MemoryNetwork`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        seed: int = 0,
        feed: FeedLike | None = None,
        factory: StageFactory | None = None,
        forward_s: float = 0.010,
        state_dir: Path | None = None,
        **network: float,
    ) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(random.Random(self.rng.getrandbits(64)), **{"latency_s": 0.002, **network})
        self.dht_network = MemoryDhtNetwork(random.Random(self.rng.getrandbits(64)))
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.factory: StageFactory = factory or SmallFactory(config.num_stages, dtype, bool(config.model_options.get("tied")))
        self.feed: FeedLike = feed or SmallFeed(config)
        self.nodes: dict[str, Node] = {}
        self._state_dir = state_dir
        self._forward_s = forward_s
        #: Seconds of a seal and of an optimizer step.
        self.control_s = 0.0005
        self._next_port = 1000
        #: Each name's own, which it keeps over restarts.
        self.identities: dict[str, Identity] = {}
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
        """What leaves `source` instead of `frame`."""
        return self.falsify[source](frame) if source in self.falsify else frame

    @property
    def next_address(self) -> Address:
        """The address of the node that is added next."""
        return Address("10.0.0.1", self._next_port + 1)

    def context(self, name: str, *, same_port: bool = False, state_dir: Path | None = None) -> PeerContext:
        """What a peer of that name is made of; a name that was there before is the same identity."""
        if same_port and name in self._addresses:
            address = self._addresses[name]
            self.dht_network.heal([address])
        else:
            address = self._addresses[name] = self.next_address
            self._next_port += 1
        identity = self.identities.get(name)
        if identity is None:
            identity = self.identities[name] = Identity.ephemeral(random.Random(self.rng.getrandbits(64)))
        timing = self.config.timing
        transport = TappedTransport(self, address, connect_s=timing.connect_s, heartbeat_s=timing.heartbeat_s)
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
        """Start a backbone; with `aggregates` it reduces averages, too, in at most `limit_bytes`."""
        context = self.context(name)

        def aggregator(link: Link) -> Aggregator:
            return Aggregator(link, InlineExecutor(lambda priority: 0.0005), limit_bytes=limit_bytes)

        planner = Planner()
        peer = Backbone(context, aggregator if aggregates else None, plan=planner)
        return await self._start(Node(name, context.transport.address, context.identity, peer, planner=planner))

    async def add_stage_peer(
        self, name: str, stage: int, *, memory_limit_bytes: int = 2**30, same_port: bool = False, keeps: bool = True
    ) -> Node:
        """Start a stage peer.

        A name that was there before is the same identity; with `same_port` it is found at the same address, too.
        """
        state_dir = self._state_dir / name if keeps and self._state_dir is not None else None
        context = self.context(name, same_port=same_port, state_dir=state_dir)
        executor = TappedExecutor(self, self._duration(name))
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
            make_accumulator=partial(FailingAccumulator, node),
        )

        def watch() -> None:
            peer.committed.on_commit.extend((self._note, lambda record: self.invariants.note_taken_over(peer, record)))

        watch()
        peer.on_move.append(watch)
        return await self._start(node)

    def _note(self, record: CommitRecord) -> None:
        self.version_ids.setdefault(record.step, set()).add(record.version_id)
        self.commits[record.step] = record

    async def add_trainer(self, name: str, **options: Any) -> Node:
        """Start a trainer; `options` as of `Trainer`."""
        context = self.context(name)
        reports: list[StepReport] = []
        evaluations: list[Evaluation] = []
        tickets: list[TicketReport] = []
        told = {"on_step": reports.append, "on_evaluation": evaluations.append, "on_ticket": tickets.append}
        planner = Planner()
        trainer = Trainer(context, feed=self.feed, plan=planner, **{**told, **options})
        node = Node(
            name,
            context.transport.address,
            context.identity,
            trainer,
            planner=planner,
            reports=reports,
            evaluations=evaluations,
            tickets=tickets,
        )
        return await self._start(node)

    async def _start(self, node: Node) -> Node:
        self.nodes[node.name] = node
        await node.peer.start()
        node.running = asyncio.get_running_loop().create_task(node.peer.run(), name=node.name)
        return node

    async def start(self, *, peers_per_stage: int = 2, trainers: int = 1, backbones: int = 1) -> None:
        """Start a whole swarm: `backbone0`, `stage0.0`, `stage0.1`, ..., `trainer0`."""
        for i in range(backbones):
            await self.add_backbone(f"backbone{i}")
        for stage in range(self.config.num_stages):
            for i in range(peers_per_stage):
                await self.add_stage_peer(f"stage{stage}.{i}", stage)
        for i in range(trainers):
            await self.add_trainer(f"trainer{i}")

    def stage_peers(self, stage: int | None = None) -> list[StagePeer]:
        """The stage peers that live, of one stage or of all."""
        return [
            node.peer
            for node in self.nodes.values()
            if isinstance(node.peer, StagePeer) and (stage is None or node.peer.stage == stage)
        ]

    def coordinator_at(self, node: Node) -> Coordinator | None:
        """The coordinator that works in this node's process; None if it coordinates nothing."""
        return None if isinstance(node.peer, StagePeer) else node.peer.election.coordinator

    def coordinates(self, node: Node) -> bool:
        """Whether this node coordinates the run."""
        return self.coordinator_at(node) is not None
