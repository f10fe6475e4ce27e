"""Random fault schedules: drawn from a seed, run on the real peer code in virtual time, checked against one process.

A schedule is data: `str(schedule)` is what a failing test prints, and `run_schedule(Schedule.draw(seed))` replays it.
Every fault is one that promises 1 to 4 must survive; a kill is carried out only while another peer of the stage holds
the newest state, since a stage of which nobody is left is a different promise (see `Schedule.draw`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from swarm.base.config import RunConfig, Timing
from swarm.lifecycle.step import Ledger
from swarm.peer.stage.stage_peer import StagePeer
from swarm.peer.trainer.trainer import Trainer
from swarm.policy.role_changes import Role
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.nodes import Node
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config

#: (kind, weight). Kinds are the methods of `Faults`.
KINDS = (
    ("kill_stage_peer", 4),
    ("pause", 4),
    ("cut", 3),
    ("cut_one_way", 2),
    ("isolate", 2),
    ("hang", 2),
    ("half_backward", 3),
    ("kill_coordinator", 2),
    ("kill_trainer", 2),
    ("newcomer", 2),
    ("slow", 2),
    ("partition", 1),
)
#: In schedules with an even seed peers also move and change roles: some on purpose, and some because a policy decides so this
#: often.
REBALANCE_EVERY_S = 0.4


@dataclass(frozen=True)
class Fault:
    """`kind` happens `at_s` after the first commit could happen, to the peers that `choice` picks, for `for_s`."""

    kind: str
    at_s: float
    for_s: float
    choice: int


@dataclass(frozen=True)
class Schedule:
    """One simulated run."""

    seed: int
    num_stages: int
    peers_per_stage: int
    trainers: int
    backbones: int
    delay_steps: int
    drop: float
    duplicate: float
    faults: tuple[Fault, ...]
    #: The first and the last stage hold copies of one parameter.
    tied: bool = False
    #: Most seconds that the event loop comes late, as one under load does.
    late_s: float = 0.0

    @classmethod
    def draw(cls, seed: int, *, tied: bool = False) -> Schedule:
        """At least 3 stages x 2 peers, 2 trainers and 5 faults."""
        rng = random.Random(seed)
        kinds = rng.choices([k for k, _ in KINDS], [w for _, w in KINDS], k=rng.randint(5, 9))
        faults = sorted(
            (Fault(k, round(rng.uniform(0.0, 1.6), 3), round(rng.uniform(0.05, 12.0), 3), rng.getrandbits(16)) for k in kinds),
            key=lambda f: f.at_s,
        )
        moving = random.Random(f"moves of {seed}")
        moves = [
            Fault(kind, round(moving.uniform(0.0, 1.6), 3), 0.0, moving.getrandbits(16))
            for kind in ("move", "move", "role", "role")
        ]
        faults = sorted([*faults, *(moves if seed % 2 == 0 else [])], key=lambda f: f.at_s)
        lossy = rng.random() < 0.5
        late_s = random.Random(f"load of {seed}").choice([0.0, 0.002, 0.02])
        return cls(
            seed=seed,
            num_stages=rng.choice([3, 3, 4]),
            peers_per_stage=rng.choice([2, 2, 3]),
            trainers=2,
            backbones=rng.choice([1, 1, 2]),
            delay_steps=rng.choice([0, 0, 1]),
            drop=0.005 if lossy else 0.0,
            duplicate=0.02 if lossy else 0.0,
            faults=tuple(faults),
            tied=tied,
            late_s=late_s,
        )

    def config(self) -> RunConfig:
        """The configuration of this schedule's run."""
        timing = Timing(rebalance_every_s=REBALANCE_EVERY_S if self.seed % 2 == 0 else 0.0)
        options = {"tied": True} if self.tied else {}
        return small_config(
            num_stages=self.num_stages,
            total_steps=4,
            delay_steps=self.delay_steps,
            timing=timing,
            model_options=options,
            max_group=2 if self.seed % 3 == 0 else 16,
        )

    def __str__(self) -> str:
        first_line = (
            f"Schedule.draw({self.seed}{', tied=True' if self.tied else ''}): {self.num_stages} stages x "
            f"{self.peers_per_stage} peers, {self.trainers} trainers, "
            f"{self.backbones} backbones, delay {self.delay_steps}, drop {self.drop}, duplicate {self.duplicate}, "
            f"late {self.late_s} s"
        )
        return "\n  ".join([first_line, *(f"{f.at_s:6.3f} s {f.kind} for {f.for_s} s, choice {f.choice}" for f in self.faults)])


def _keeps_up(peer: StagePeer, other: StagePeer) -> bool:
    """`other` has sealed no attempt, and so holds no average that may be decided on, that `peer` has no part in."""
    for step, state in other.member.steps.items():
        theirs = state.accumulator.ledger
        mine = peer.member.steps[step].accumulator.ledger if step in peer.member.steps else None
        if theirs.state != "open" and (mine is None or _advance(mine) < _advance(theirs)):
            return False
    return True


def _advance(ledger: Ledger) -> tuple[object, int]:
    return ledger.attempt.order, ("open", "frozen", "averaging", "prepared", "committed").index(ledger.state)


@dataclass
class Faults:
    """Carries faults out on a simulation; what cannot be done now is left out and not counted."""

    simulation: Simulation
    injected: Counter[str] = field(default_factory=Counter)

    async def run(self, fault: Fault) -> None:
        """Wait for a fault's time and inject it, if it may happen then."""
        await asyncio.sleep(fault.at_s)
        if await getattr(self, fault.kind)(random.Random(fault.choice), fault.for_s):
            self.injected[fault.kind] += 1

    def _stage_nodes(self) -> list[Node]:
        return [n for n in self.simulation.nodes.values() if isinstance(n.peer, StagePeer)]

    def _expendable(self, node: Node) -> bool:
        """Another peer of its stage serves the newest state, and nothing is wrong with it."""
        newest = max(other.stage_peer.committed.num_commits for other in self._stage_nodes())
        return any(
            other is not node
            and other.stage_peer.stage == node.stage_peer.stage
            and other.stage_peer.membership.serving
            and not self._moves(other)
            and other.stage_peer.committed.up_to_date
            and other.stage_peer.committed.num_commits == newest
            and other.name not in self.simulation.troubled
            and _keeps_up(other.stage_peer, node.stage_peer)
            for other in self._stage_nodes()
        )

    def _moves(self, node: Node) -> bool:
        """A record has it go to another stage."""
        record, me = node.stage_peer.committed.record, node.stage_peer.stage_context.me
        return record is not None and any(move.member.key == me.key for move in record.moves)

    async def move(self, rng: random.Random, for_s: float) -> bool:
        """A stage peer is moved by the next record."""
        nodes = [n for n in self._stage_nodes() if n.stage_peer.membership.serving]
        if not nodes:
            return False
        node = rng.choice(nodes)
        assert isinstance(node.peer, StagePeer)
        others = [k for k in range(self.simulation.config.num_stages) if k != node.peer.stage]
        return self.simulation.move(node.name, rng.choice(others))

    async def role(self, rng: random.Random, for_s: float) -> bool:
        """The next record has a stage peer do something else than before."""
        nodes = [n for n in self._stage_nodes() if n.stage_peer.membership.serving]
        roles: list[Role] = ["aggregate", "aggregate", "compute", "both"]
        return bool(nodes) and self.simulation.give_role(rng.choice(nodes).name, rng.choice(roles))

    async def kill_stage_peer(self, rng: random.Random, for_s: float) -> bool:
        """A stage peer dies and comes back after a while."""
        victims = [n for n in self._stage_nodes() if self._expendable(n)]
        if not victims:
            return False
        node = rng.choice(victims)
        assert isinstance(node.peer, StagePeer)
        stage = node.peer.stage
        self.simulation.troubled.add(node.name)
        await self.simulation.kill(node.name)
        await asyncio.sleep(for_s / 4)
        # The same identity, another incarnation, as often as not at the same address.
        await self.simulation.add_stage_peer(node.name, stage, same_port=rng.random() < 0.5)
        self.simulation.troubled.discard(node.name)
        return True

    async def newcomer(self, rng: random.Random, for_s: float) -> bool:
        """Another stage peer joins."""
        stage = rng.randrange(self.simulation.config.num_stages)
        await self.simulation.add_stage_peer(f"stage{stage}.new{rng.getrandbits(16)}", stage)
        return True

    async def _trouble(self, rng: random.Random, for_s: float, begin: str, end: str, *, expendable: bool = True) -> bool:
        nodes = [n for n in self.simulation.nodes.values() if n.name not in self.simulation.troubled]
        nodes = [n for n in nodes if not isinstance(n.peer, StagePeer) or not expendable or self._expendable(n)]
        if not nodes:
            return False
        node = rng.choice(nodes)
        self.simulation.troubled.add(node.name)
        getattr(self.simulation, begin)(node)
        await asyncio.sleep(for_s)
        getattr(self.simulation, end)(node)
        await asyncio.sleep(0.5)
        self.simulation.troubled.discard(node.name)
        return True

    async def pause(self, rng: random.Random, for_s: float) -> bool:
        """A peer is stopped for a while."""
        return await self._trouble(rng, for_s, "pause", "resume")

    async def isolate(self, rng: random.Random, for_s: float) -> bool:
        """A peer is cut off for a while."""
        return await self._trouble(rng, for_s, "isolate", "rejoin")

    async def hang(self, rng: random.Random, for_s: float) -> bool:
        """A device hangs for a while."""
        return await self._trouble(rng, for_s, "hang", "unhang")

    async def slow(self, rng: random.Random, for_s: float) -> bool:
        """A stage peer computes slowly from now on."""
        nodes = self._stage_nodes()
        rng.choice(nodes).slowness = rng.choice([3.0, 10.0, 40.0])
        return True

    async def cut(self, rng: random.Random, for_s: float, *, one_way: bool = False) -> bool:
        """Two peers do not reach each other for a while."""
        a, b = rng.sample(sorted(self.simulation.nodes), 2)
        first, second = self.simulation.nodes[a].address, self.simulation.nodes[b].address
        self.simulation.network.cut(first, second, one_way=one_way)
        await asyncio.sleep(for_s)
        self.simulation.network.heal(first, second, one_way=one_way)
        return True

    async def cut_one_way(self, rng: random.Random, for_s: float) -> bool:
        """One peer does not reach another for a while."""
        return await self.cut(rng, for_s, one_way=True)

    async def partition(self, rng: random.Random, for_s: float) -> bool:
        """Two halves that cannot see each other; each may be able to go on alone."""
        names = sorted(self.simulation.nodes)
        half = [name for name in names if rng.random() < 0.5]
        if self.simulation.troubled or not 0 < len(half) < len(names):
            return False
        self.simulation.troubled.update(names)
        self.simulation.partition(half)
        await asyncio.sleep(for_s)
        self.simulation.heal_partition()
        await asyncio.sleep(5.0)
        self.simulation.troubled.difference_update(names)
        return True

    async def half_backward(self, rng: random.Random, for_s: float) -> bool:
        """The next accumulation of a peer fails after part of the gradient was added, as running out of memory does."""
        rng.choice(self._stage_nodes()).fail_halfway = 1
        return True

    async def kill_coordinator(self, rng: random.Random, for_s: float) -> bool:
        """The coordinator dies and comes back after a while."""
        node = next((n for n in self.simulation.nodes.values() if self.simulation.coordinates(n)), None)
        if node is None:
            return False
        return await self._restart(node, for_s)

    async def kill_trainer(self, rng: random.Random, for_s: float) -> bool:
        """A trainer dies and comes back after a while."""
        trainers = [n for n in self.simulation.nodes.values() if isinstance(n.peer, Trainer)]
        return await self._restart(rng.choice(trainers), for_s) if trainers else False

    async def _restart(self, node: Node, for_s: float) -> bool:
        trainer = isinstance(node.peer, Trainer)
        self.simulation.troubled.add(node.name)
        await self.simulation.kill(node.name)
        await asyncio.sleep(for_s / 4)
        await (self.simulation.add_trainer if trainer else self.simulation.add_backbone)(node.name)
        self.simulation.troubled.discard(node.name)
        return True


async def _run(schedule: Schedule) -> Counter[str]:
    simulation = Simulation(
        schedule.config(),
        seed=schedule.seed,
        drop=schedule.drop,
        drop_reply=schedule.drop,
        duplicate=schedule.duplicate,
        jitter_s=0.002,
    )
    faults = Faults(simulation)
    try:
        await simulation.start(peers_per_stage=schedule.peers_per_stage, trainers=schedule.trainers, backbones=schedule.backbones)
        await simulation.began()
        running = [asyncio.ensure_future(faults.run(fault)) for fault in schedule.faults]
        await simulation.finish(within_s=600.0)
        for task in running:
            if not task.done():
                task.cancel()
        for result in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        check(simulation, lineages=any(f.kind == "partition" for f in schedule.faults))
    finally:
        await simulation.abandon()
    return faults.injected + simulation.network.injected


def run_schedule(schedule: Schedule) -> Counter[str]:
    """Run one schedule; returns how many faults of each kind happened.

    Raises:
        AssertionError: a promise was broken; the message ends with the schedule.
    """
    try:
        return run_checked(_run(schedule), seed=schedule.seed, late_s=schedule.late_s)
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{schedule}") from error


@dataclass(frozen=True)
class Result:
    """The outcome of one seed: the faults that happened, and the violation with its schedule or ""."""

    seed: int
    faults: Counter[str]
    violation: str
    cpu_s: float


def _alone() -> None:
    """A worker uses one core, says nothing, and does not look for garbage in what it imported."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(50_000)


def _run_seed(seed: int, tied: bool = False) -> Result:
    began = time.process_time()
    faults, violation = Counter[str](), ""
    try:
        faults = run_schedule(Schedule.draw(seed, tied=tied))
    except AssertionError as error:
        violation = str(error)
    return Result(seed, faults, violation, time.process_time() - began)


def run_seeds(seeds: Iterable[int], *, workers: int = 2, tied: bool = False) -> Iterator[Result]:
    """Run `Schedule.draw(seed, tied=tied)` for each, on `workers` processes; results come in the order of the seeds."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_alone) as pool:
        yield from pool.map(partial(_run_seed, tied=tied), seeds, chunksize=4)
