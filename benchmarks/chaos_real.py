"""A swarm of real processes under real faults: does every step still count every ticket once, and how fast does it go on?

3 stages x 3 peers, 2 trainers and 2 backbones on loopback addresses, each behind a proxy that can break the network
(`faulty_proxy`). First the same swarm runs without faults; then, every 5 s on average, a process is killed and started
again with its state directory, or stopped for up to 15 s, or cut off, slowed down, or its replies are lost; the
coordinator and the stages' leaders are picked as victims more often than others. A stage's last peer that is up to date
is spared. At the end `chaos_checks` compares all steps and the parameters with one plain process, in fp64.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_checks import MAX_NAMED, Evidence, Verdict, judge, metrics_lines
from faulty_proxy import Fault, FaultyNetwork, Place
from report import machine, publish

from launch.children import Child, Children
from launch.run_files import DataPaths, create_run
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.errors import SwarmError
from swarm.base.ids import Address
from swarm.net.http import HttpTransport
from swarm.stage.checkpoint import StageCheckpoint, find_complete
from swarm.wire.framing import Frame
from swarm.wire.messages import Hello, RunInfo, StatusReply

NUM_STAGES, PEERS_PER_STAGE, TRAINERS, BACKBONES = 3, 3, 2, 2
#: A process that was disturbed serves again within this time, the swarm under load included.
COME_BACK_S = 60.0
START_S = 120.0
POLL_S = 0.5
CHECKPOINT_EVERY = 10
ASK_S = 2.0
#: Relative frequencies.
KINDS = {
    "kill": 6, "stop": 5, "lost replies": 3, "cut off": 2, "cut link": 3, "delay": 2, "reset connections": 2,
}  # fmt: skip


def configuration(name: str) -> RunConfig:
    """Small enough that two cores carry 13 processes."""
    return RunConfig(
        name=name, model="llama-tiny",
        model_options={"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 2},
        num_stages=NUM_STAGES, sequence_length=16, micro_batch_size=2, target_batch_size=16, total_steps=10**6,
        lr_schedule="constant", precision="fp64", compression="none", eval_samples=0, checkpoint_every=CHECKPOINT_EVERY,
        checkpoint_copies=PEERS_PER_STAGE, checkpoint_keep=3,
    )  # fmt: skip


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


@dataclass
class Injected:
    """A fault as it goes into the report."""

    kind: str
    victim: str
    role: str
    began: float
    recovered: float | None = None


class RealSwarm:
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
        words = ["--host", process.place.inside, "--public-host", process.place.outside, "--port", str(self._port),
                 "--state-dir", str(self.state_root / process.name)]  # fmt: skip
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
            heads: dict[str, dict[str, StageCheckpoint]] = {}
            for checkpoint in self.evidence.saw_checkpoints(self.state_root):
                if checkpoint.record.step + 1 > begun_at:
                    owner = checkpoint.directory.relative_to(self.state_root).parts[0]
                    heads.setdefault(checkpoint.record.head, {})[owner] = checkpoint
            for copies in heads.values():
                if len(copies) == NUM_STAGES * PEERS_PER_STAGE:
                    return [copies[f"stage-{stage}-0"] for stage in range(NUM_STAGES)]
        self.failures.append(f"{2 * COME_BACK_S:g} s after the faults the peers have written no common checkpoint")
        return find_complete([self.state_root])


class Chaos:
    """Disturbs a swarm."""

    def __init__(self, swarm: RealSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng
        self.injected: list[Injected] = []
        self.spared = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, *, interval_s: float) -> None:
        """Begin faults for `seconds`, one each `interval_s` on average, then wait until all is well again."""
        due = time.monotonic()
        until = due + seconds
        while (due := due + self._rng.expovariate(1 / interval_s)) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._one_fault()
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        if self._running:
            await asyncio.wait(self._running, timeout=2 * COME_BACK_S)

    async def _one_fault(self) -> None:
        statuses = await self._swarm.statuses()
        for _ in range(20):
            kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
            role, victim = self._victim(statuses)
            group = [victim]
            if kind == "cut link":
                group.append(self._rng.choice([p for p in self._swarm.processes.values() if p is not victim]))
            if self._spares(group, statuses):
                continue
            for process in group:
                process.trouble = kind
            task = self._swarm.background(self._disturb(kind, role, group))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return
        self.spared += 1

    def _victim(self, statuses: dict[str, StatusReply]) -> tuple[str, Process]:
        """The coordinator, a leader, or anybody; with what it is."""
        processes = self._swarm.processes
        reigning = [(s.detail.get("ballot", 0), n) for n, s in statuses.items() if s.detail.get("coordinator")]
        coordinator = max(reigning)[1] if reigning else None
        newest = max(statuses.values(), key=lambda s: s.step).stages if statuses else ()
        by_peer = {p.peer: p for p in processes.values()}
        firsts = [next((x.peer for x in members if x.ready), "") for members in newest]
        leaders = [by_peer[peer] for peer in firsts if peer in by_peer]
        draw = self._rng.random()
        if draw < 0.25 and coordinator is not None:
            return "coordinator", processes[coordinator]
        if draw < 0.5 and leaders:
            return "leader", self._rng.choice(leaders)
        victim = self._rng.choice(list(processes.values()))
        if victim.name == coordinator:
            return "coordinator", victim
        return ("leader" if victim in leaders else victim.role), victim

    def _spares(self, group: list[Process], statuses: dict[str, StatusReply]) -> bool:
        """Whether a fault here would leave a stage without a peer that is up to date, or the run without a trainer."""
        if any(process.trouble or process.pid is None for process in group):
            return True
        newest = max((s.step for s in statuses.values()), default=0)
        left = [
            p for p in self._swarm.processes.values()
            if p not in group and not p.trouble and (s := statuses.get(p.name)) is not None
            and (p.role != "stage" or (s.state == "serving" and s.step >= newest - 1
                                       and any(x.ready and x.peer == p.peer for x in s.stages[p.stage or 0])))
        ]  # fmt: skip
        stages = {p.stage for p in left if p.role == "stage"}
        return len(stages) < NUM_STAGES or not {"trainer", "backbone"} <= {p.role for p in left}

    async def _disturb(self, kind: str, role: str, group: list[Process]) -> None:
        swarm, rng, victim = self._swarm, self._rng, group[0]
        entry = Injected(kind, " - ".join(p.name for p in group), role, time.monotonic())
        self.injected.append(entry)
        seconds = rng.uniform(1.0, 15.0)
        assert victim.child is not None
        if kind == "kill":
            victim.child.signal(signal.SIGKILL)
            await victim.child.ended
            await swarm.come_back(victim, restart_after_s=rng.choice([0.0, rng.uniform(0.0, 5.0)]))
        else:
            if kind == "stop":
                victim.child.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                victim.child.signal(signal.SIGCONT)
            elif kind == "reset connections":
                swarm.network.reset(victim.name)
            else:
                fault = {
                    "lost replies": Fault("lost_replies", victim.name, part=rng.uniform(0.1, 0.6), silent=rng.random() < 0.3),
                    "cut off": Fault("cut", victim.name),
                    "cut link": Fault("cut", victim.name, frozenset(p.name for p in group[1:])),
                    "delay": Fault("delay", victim.name, delay_s=rng.uniform(0.02, 0.6)),
                }[kind]  # fmt: skip
                swarm.network.begin(fault)
                await asyncio.sleep(seconds)
                swarm.network.end(fault)
            await asyncio.gather(*(swarm.come_back(p) for p in group if p.trouble == kind))
        entry.recovered = time.monotonic()


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


# ---------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Fields are the options of the command line."""

    minutes: float
    interval_s: float
    baseline_s: float
    seed: int
    logs: Path | None


@dataclass
class Outcome:
    """One run, before it is judged."""

    swarm: RealSwarm
    chaos: Chaos
    #: Spans of time without faults, before and after those with.
    calm: list[tuple[float, float]]
    storm: tuple[float, float]
    final: list[StageCheckpoint]
    lines: list[dict[str, Any]]
    machine: dict[str, Any]


async def _run(directory: Path, plan: Plan) -> Outcome:
    rng = random.Random(plan.seed)
    swarm = RealSwarm(directory, create_run(configuration("chaos-real"), DataPaths()), rng)
    chaos = Chaos(swarm, rng)
    here = machine()
    try:
        await swarm.start()
        await asyncio.sleep(3.0)
        calm_from = time.monotonic()
        await asyncio.sleep(plan.baseline_s)
        storm_from = time.monotonic()
        _say(f"without faults: {_rate(swarm.commits, calm_from, storm_from):.2f} steps per second; now with faults")
        showing = swarm.background(_show(swarm, chaos))
        await chaos.run(60.0 * plan.minutes, interval_s=plan.interval_s)
        storm_to = storm_from + 60.0 * plan.minutes
        showing.cancel()
        _say("no more faults")
        again_from = time.monotonic()
        await asyncio.sleep(plan.baseline_s)
        calm = [(calm_from, storm_from), (again_from, time.monotonic())]
        _say("waiting until every peer has written the same checkpoint")
        final = await swarm.finish()
    finally:
        await asyncio.shield(asyncio.create_task(swarm.close()))
    files = [swarm.metrics(p) for p in swarm.processes.values() if p.role == "trainer"]
    return Outcome(swarm, chaos, calm, (storm_from, storm_to), final, metrics_lines(files), here)


def _say(text: str) -> None:
    print(text, flush=True)


async def _show(swarm: RealSwarm, chaos: Chaos) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(15.0)
        troubled = ", ".join(f"{p.name} ({p.trouble})" for p in swarm.processes.values() if p.trouble)
        step, seconds = swarm.commits[-1][1], time.monotonic() - began
        _say(f"{seconds:4.0f} s: step {step}, {len(chaos.injected)} faults; now: {troubled or 'none'}")


def _rate(commits: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Steps per second."""
    steps = [step for at, step in commits if begin <= at < end]
    return (steps[-1] - steps[0] + 1) / (end - begin) if steps else 0.0


def _slowest(outcome: Outcome, count: int = 8) -> list[dict[str, Any]]:
    """The longest waits between two commits under faults, and the faults that lay in each."""
    begin = outcome.storm[0]
    commits = [(at, step) for at, step in outcome.swarm.commits if at >= begin]
    waits = [(b[0] - a[0], a[0], b[0], b[1]) for a, b in itertools.pairwise(commits)]
    rows = []
    for seconds, since, at, step in sorted(waits, reverse=True)[:count]:
        during = [f"{f.kind} {f.victim} ({f.role})" for f in outcome.chaos.injected
                  if f.began < at and (f.recovered or at) > since]  # fmt: skip
        rows.append({"step": step, "seconds": round(seconds, 2), "at_s": round(at - begin), "faults": "; ".join(during)})
    return rows


def _report(outcome: Outcome, verdict: Verdict, plan: Plan) -> None:
    injected = outcome.chaos.injected
    before, after = (_rate(outcome.swarm.commits, *span) for span in outcome.calm)
    calm = (before + after) / 2
    storm = _rate(outcome.swarm.commits, *outcome.storm)
    kinds = []
    for kind in KINDS:
        chosen = [f for f in injected if f.kind == kind]
        roles = Counter(f.role for f in chosen)
        times = [f.recovered - f.began for f in chosen if f.recovered is not None]
        kinds.append({
            "fault": kind, "injected": len(chosen), "coordinator": roles["coordinator"], "leader": roles["leader"],
            "longest_until_well_s": round(max(times, default=0.0), 1),
        })  # fmt: skip
    checks = [{"check": name, "violations": len(failures)} for name, failures in verdict.violations.items()]
    facts = {
        **outcome.machine, "seed": plan.seed, "minutes": plan.minutes, "faults": len(injected), "spared": outcome.chaos.spared,
        "lost_replies": outcome.swarm.network.lost_replies, "violations": verdict.num_violations, **verdict.numbers,
        "fault_free_seconds": 2 * plan.baseline_s, "fault_free_steps_per_s": [round(before, 3), round(after, 3)],
        "steps_per_s": round(storm, 3),
        "throughput_percent": round(100 * storm / calm, 1) if calm else None,
    }  # fmt: skip
    publish("chaos_real", facts=facts, tables={
        "faults injected": kinds, "checks": checks, "longest waits for a commit": _slowest(outcome) or [{"step": "none"}],
    }, details={
        "violations": verdict.violations,
        "faults": [{"kind": f.kind, "victim": f.victim, "role": f.role, "at_s": round(f.began - outcome.storm[0], 1),
                    "seconds": None if f.recovered is None else round(f.recovered - f.began, 1)} for f in injected],
    })  # fmt: skip
    for name, failures in verdict.violations.items():
        for failure in failures[:MAX_NAMED]:
            print(f"VIOLATION {name}: {failure}")


def chaos(plan: Plan) -> int:
    """Run, judge, print and write the result; returns the number of violations."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        try:
            bound_s = 60.0 * plan.minutes + 2 * plan.baseline_s + START_S + 6 * COME_BACK_S
            outcome = _bounded(lambda: _run(directory, plan), bound_s)
            _say("comparing with one plain process")
            verdict = judge(outcome.swarm.config, outcome.lines, outcome.swarm.evidence, outcome.final)
            verdict.check("nobody ends or stays away by itself", outcome.swarm.failures)
            _report(outcome, verdict, plan)
            return verdict.num_violations
        finally:
            if plan.logs is not None:
                shutil.copytree(directory, plan.logs, dirs_exist_ok=True)


def _bounded(work: Callable[[], Awaitable[Outcome]], seconds: float) -> Outcome:
    async def main() -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with asyncio.timeout(seconds):
            return await work()

    return asyncio.run(main())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="minutes with faults (default 10)")
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds between faults (default 5)")
    parser.add_argument("--baseline", type=float, default=60.0, metavar="S",
                        help="seconds without faults, before and again after (default 60)")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="of the faults (default: another each time)")
    parser.add_argument("--logs", type=Path, default=None, metavar="DIR", help="keep logs, metrics and checkpoints here")
    options = parser.parse_args(argv)
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    plan = Plan(minutes=options.minutes, interval_s=options.interval, baseline_s=options.baseline, seed=seed,
                logs=options.logs)  # fmt: skip
    return 1 if chaos(plan) else 0


if __name__ == "__main__":
    sys.exit(main())
