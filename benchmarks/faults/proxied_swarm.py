"""A swarm of real processes, each behind a proxy that can break its network: start each, ask it, bring it back.

3 stages x 3 peers, 2 trainers and 2 backbones on loopback addresses (`faulty_proxy`). Each process has a state directory
and an address that outlive it, and joins through anybody who is well. Owns processes and what is seen of them; must not
know which faults are chosen, nor what a run must have kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.chaos_checks import Evidence
from launch.processes.children import Child, Children
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.errors import SwarmError
from swarm.base.ids import Address
from swarm.net.http.transport import HttpTransport
from swarm.stage.saved.checkpoint import StageCheckpoint
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.faulty_proxy import FaultyNetwork, Place
from swarm.wire.framing import Frame
from swarm.wire.messages import Hello, RunInfo, StatusReply

NUM_STAGES, PEERS_PER_STAGE, TRAINERS, BACKBONES = 3, 3, 2, 2
#: A process that was disturbed serves again within this time, the swarm under load included.
COME_BACK_S = 60.0
START_S = 120.0
POLL_S = 0.5
CHECKPOINT_EVERY = 10
ASK_S = 2.0


def configuration(name: str) -> RunConfig:
    """Small enough that two cores carry 13 processes."""
    return RunConfig(
        name=name,
        model="llama-tiny",
        model_options={"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 2},
        num_stages=NUM_STAGES,
        sequence_length=16,
        micro_batch_size=2,
        target_batch_size=16,
        total_steps=10**6,
        lr_schedule="constant",
        precision="fp64",
        compression="none",
        eval_samples=0,
        checkpoint_every=CHECKPOINT_EVERY,
        checkpoint_copies=PEERS_PER_STAGE,
        checkpoint_keep=3,
    )


@dataclass(eq=False)
class Process:
    """One peer's process, in its present life or between two."""

    name: str
    role: str
    stage: int | None
    place: Place
    child: Child | None = None
    lives: int = 0
    peer: str = ""
    #: The fault that it suffers from, or has not recovered from.
    trouble: str = ""
    serving: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None and self.child.alive else None


class ProxiedSwarm:
    """Processes, their network, and what is seen of them."""

    def __init__(self, directory: Path, config: RunConfig, rng: random.Random) -> None:
        self.config = config
        self.rng = rng
        self.evidence = Evidence()
        self.failures: list[str] = []
        #: (time, step) as the first trainer told of each commit.
        self.commits: list[tuple[float, int]] = []
        self._directory = directory
        self._logs = directory / "logs"
        self._logs.mkdir()
        self.state_root = directory / "state"
        self._port = 0
        self.processes: dict[str, Process] = {}
        roles = [("backbone", None, i) for i in range(BACKBONES)]
        roles += [("stage", k, i) for i in range(PEERS_PER_STAGE) for k in range(NUM_STAGES)]
        roles += [("trainer", None, i) for i in range(TRAINERS)]
        for n, (role, stage, i) in enumerate(roles, start=1):
            name = f"{role}-{i}" if stage is None else f"stage-{stage}-{i}"
            self.processes[name] = Process(name, role, stage, Place(name, f"127.0.1.{n}", f"127.0.2.{n}"))
        self._children = Children(self._logs, self._on_report, argument=config.to_bytes().decode())
        self._transport = HttpTransport(connect_s=1.0)
        self.network = FaultyNetwork([], 0, rng, lambda name: None)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ending = False

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """All processes serve, and the first step has committed.

        Raises:
            SwarmError, TimeoutError: they do not.
        """
        self._port = _free_port([host for p in self.processes.values() for host in (p.place.inside, p.place.outside)])
        self.network = FaultyNetwork(
            [p.place for p in self.processes.values()], self._port, self.rng, lambda name: self.processes[name].pid
        )
        await self.network.start()
        (self._directory / "run.json").write_bytes(self.config.to_bytes())
        await self._children.start()
        await self._children.ready()
        async with asyncio.timeout(START_S):
            for role in ("backbone", "stage", "trainer"):
                chosen = [p for p in self.processes.values() if p.role == role]
                for process in chosen:
                    await self.spawn(process)
                    if role == "backbone":
                        await process.serving.wait()
                await asyncio.gather(*(p.serving.wait() for p in chosen))
            self.background(self._observe())
            while not self.commits:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        self.ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._children.close(grace_s=10.0)
        await self.network.close()
        await self._transport.close()

    def background(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def spawn(self, process: Process) -> None:
        """Start `process`, for the first time or again, with its own state directory and address."""
        process.lives += 1
        process.serving.clear()
        await self.network.listen(process.name)
        words = [
            "--host",
            process.place.inside,
            "--public-host",
            process.place.outside,
            "--port",
            str(self._port),
            "--state-dir",
            str(self.state_root / process.name),
        ]
        if process.name == "backbone-0" and process.lives == 1:
            words += ["--run", str(self._directory / "run.json")]
        else:
            words += ["--join", str(self._contact(process))]
        if process.role == "stage":
            words += ["--stage", str(process.stage), "--device", "cpu", "--threads", "1", "--memory-limit", "256MiB"]
        if process.role == "trainer":
            words += ["--metrics", str(self.metrics(process))]
        program = f"launch_{process.role}"
        life = f"{process.name}.{process.lives}"
        process.child = await self._children.spawn(
            life, f"launch.{process.role}:main", words, title=f"{program} {' '.join(words)}"
        )
        child = process.child
        child.ended.add_done_callback(lambda _: self._on_end(process, child))

    def _contact(self, newcomer: Process) -> Address:
        others = [p for p in self.processes.values() if p is not newcomer and p.serving.is_set() and not p.trouble]
        return Address(self.rng.choice(others).place.outside, self._port)

    def metrics(self, process: Process) -> Path:
        return self._directory / f"{process.name}.jsonl"

    def _on_report(self, life: str, report: dict[str, Any]) -> None:
        process = self.processes[life.rpartition(".")[0]]
        if report["event"] == "serving":
            process.serving.set()
        elif report["event"] == "step" and report["step"] > (self.commits[-1][1] if self.commits else 0):
            self.commits.append((time.monotonic(), report["step"]))

    def _on_end(self, process: Process, child: Child) -> None:
        """A process that ends though nobody killed it is a finding, and comes back as its operator would bring it back."""
        self.network.refuse(process.name)
        if self.ending or process.trouble == "kill":
            return
        words = " | ".join(child.last_words(num_lines=2))
        self.failures.append(f"{process.name} ended by itself with code {child.ended.result()}: {words}")
        process.trouble = "ended by itself"
        self.background(self.come_back(process, restart_after_s=1.0))

    # ------------------------------------------------------------------------------------------------ looking

    async def status(self, process: Process) -> StatusReply | None:
        try:
            reply = await ask(self._transport, Address(process.place.inside, self._port), timeout_s=ASK_S)
        except SwarmError:
            return None
        process.peer = reply.member.peer
        return reply

    async def statuses(self) -> dict[str, StatusReply]:
        """What everybody says who is not in trouble."""
        chosen = [p for p in self.processes.values() if p.pid is not None and not p.trouble]
        replies = await asyncio.gather(*(self.status(p) for p in chosen))
        return {p.name: reply for p, reply in zip(chosen, replies, strict=True) if reply is not None}

    async def _observe(self) -> None:
        """Note the newest records and checkpoints while they are there to be seen."""
        rounds = 0
        while True:
            await asyncio.sleep(POLL_S)
            rounds += 1
            calm = [p for p in self.processes.values() if p.role == "stage" and p.pid is not None and not p.trouble]
            await asyncio.gather(*(self._note_record(p) for p in self.rng.sample(calm, min(2, len(calm)))))
            if rounds % 10 == 0 and self.state_root.is_dir():
                with contextlib.suppress(OSError):  # pruned while it was read
                    self.evidence.saw_checkpoints(self.state_root)

    async def _note_record(self, process: Process) -> None:
        with contextlib.suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                address = Address(process.place.inside, self._port)
                reply = (await self._transport.call(address, Frame(Hello()), stall_s=ASK_S)).message
            if isinstance(reply, RunInfo) and reply.record is not None:
                self.evidence.saw(reply.record)

    def is_well(self, process: Process, status: StatusReply | None) -> bool:
        """It takes its part in steps again."""
        if status is None:
            return False
        newest = self.commits[-1][1] if self.commits else 0
        return status.state in ("serving", "training", "coordinating", "watching") and (
            process.role != "stage" or status.step >= newest - 1
        )

    async def come_back(self, process: Process, *, restart_after_s: float | None = None) -> None:
        """Until `process` takes its part again, after a restart if it was killed."""
        trouble, began = process.trouble, time.monotonic()
        if restart_after_s is not None:
            await asyncio.sleep(restart_after_s)
            await self.spawn(process)
        told = False
        while not self.is_well(process, await self.status(process)):
            if not told and time.monotonic() - began > COME_BACK_S:
                told = True
                self.failures.append(f"{process.name} does not serve {COME_BACK_S:g} s after {trouble!r}")
            await asyncio.sleep(0.3)
        process.trouble = ""

    # ------------------------------------------------------------------------------------------------ the end

    async def finish(self) -> list[StageCheckpoint]:
        """The first checkpoint from now on that every peer has written, or else the newest complete one; one each stage.

        Raises:
            ConfigError: no checkpoint is complete.
        """
        begun_at, until = self.commits[-1][1], time.monotonic() + 2 * COME_BACK_S
        while time.monotonic() < until:
            await asyncio.sleep(1.0)
            version_ids: dict[str, dict[str, StageCheckpoint]] = {}
            for checkpoint in self.evidence.saw_checkpoints(self.state_root):
                if checkpoint.record.step + 1 > begun_at:
                    owner = checkpoint.directory.relative_to(self.state_root).parts[0]
                    version_ids.setdefault(checkpoint.record.version_id, {})[owner] = checkpoint
            for copies in version_ids.values():
                if len(copies) == NUM_STAGES * PEERS_PER_STAGE:
                    return [copies[f"stage-{stage}-0"] for stage in range(NUM_STAGES)]
        self.failures.append(f"{2 * COME_BACK_S:g} s after the faults the peers have written no common checkpoint")
        return find_complete([self.state_root])


def _free_port(hosts: Sequence[str]) -> int:
    """A port number that nobody uses at any of `hosts`, for TCP or UDP."""
    for port in random.sample(range(20000, 30000), 200):
        with contextlib.ExitStack() as stack:
            try:
                for host in hosts:
                    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                        stack.enter_context(socket.socket(socket.AF_INET, kind)).bind((host, port))
            except OSError:
                continue
            return port
    raise SwarmError("no port is free at all loopback addresses")
