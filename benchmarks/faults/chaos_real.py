"""A swarm of real processes under real faults: does every step still count every ticket once, and how fast does it go on?

First a swarm (`proxied_swarm`) runs without faults; then, every 5 s on average, a process is killed and started again
with its state directory, or stopped for up to 15 s, or cut off, slowed down, or its replies are lost (`chaos_faults`). At
the end `chaos_checks` compares all steps and the parameters with one plain process, in fp64.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.chaos_checks import MAX_NAMED, Verdict, judge, metrics_lines
from benchmarks.faults.chaos_faults import KINDS, Chaos
from benchmarks.faults.proxied_swarm import COME_BACK_S, START_S, ProxiedSwarm, configuration
from benchmarks.report import machine, publish
from launch.run.run_files import DataPaths, create_run
from swarm.stage.saved.checkpoint import StageCheckpoint


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Fields are the options of the command line."""

    minutes: float
    interval_s: float
    baseline_s: float
    seed: int
    logs: Path | None


@dataclass
class Outcome:
    """One run, before it is judged."""

    swarm: ProxiedSwarm
    chaos: Chaos
    #: Spans of time without faults, before and after those with.
    calm: list[tuple[float, float]]
    storm: tuple[float, float]
    final: list[StageCheckpoint]
    lines: list[dict[str, Any]]
    machine: dict[str, Any]


async def _run(directory: Path, plan: FaultPlan) -> Outcome:
    rng = random.Random(plan.seed)
    swarm = ProxiedSwarm(directory, create_run(configuration("chaos-real"), DataPaths()), rng)
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


async def _show(swarm: ProxiedSwarm, chaos: Chaos) -> None:
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
        during = [
            f"{f.kind} {f.victim} ({f.role})" for f in outcome.chaos.injected if f.began < at and (f.recovered or at) > since
        ]
        rows.append({"step": step, "seconds": round(seconds, 2), "at_s": round(at - begin), "faults": "; ".join(during)})
    return rows


def _report(outcome: Outcome, verdict: Verdict, plan: FaultPlan) -> None:
    injected = outcome.chaos.injected
    before, after = (_rate(outcome.swarm.commits, *span) for span in outcome.calm)
    calm = (before + after) / 2
    storm = _rate(outcome.swarm.commits, *outcome.storm)
    kinds = []
    for kind in KINDS:
        chosen = [f for f in injected if f.kind == kind]
        roles = Counter(f.role for f in chosen)
        times = [f.recovered - f.began for f in chosen if f.recovered is not None]
        kinds.append(
            {
                "fault": kind,
                "injected": len(chosen),
                "coordinator": roles["coordinator"],
                "leader": roles["leader"],
                "longest_until_well_s": round(max(times, default=0.0), 1),
            }
        )
    checks = [{"check": name, "violations": len(failures)} for name, failures in verdict.violations.items()]
    facts = {
        **outcome.machine,
        "seed": plan.seed,
        "minutes": plan.minutes,
        "faults": len(injected),
        "spared": outcome.chaos.spared,
        "lost_replies": outcome.swarm.network.lost_replies,
        "violations": verdict.num_violations,
        **verdict.numbers,
        "fault_free_seconds": 2 * plan.baseline_s,
        "fault_free_steps_per_s": [round(before, 3), round(after, 3)],
        "steps_per_s": round(storm, 3),
        "throughput_percent": round(100 * storm / calm, 1) if calm else None,
    }
    publish(
        "chaos_real",
        facts=facts,
        tables={
            "faults injected": kinds,
            "checks": checks,
            "longest waits for a commit": _slowest(outcome) or [{"step": "none"}],
        },
        details={
            "violations": verdict.violations,
            "faults": [
                {
                    "kind": f.kind,
                    "victim": f.victim,
                    "role": f.role,
                    "at_s": round(f.began - outcome.storm[0], 1),
                    "seconds": None if f.recovered is None else round(f.recovered - f.began, 1),
                }
                for f in injected
            ],
        },
    )
    for name, failures in verdict.violations.items():
        for failure in failures[:MAX_NAMED]:
            print(f"VIOLATION {name}: {failure}")


def chaos(plan: FaultPlan) -> int:
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
    parser.add_argument(
        "--baseline", type=float, default=60.0, metavar="S", help="seconds without faults, before and again after (default 60)"
    )
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="of the faults (default: another each time)")
    parser.add_argument("--logs", type=Path, default=None, metavar="DIR", help="keep logs, metrics and checkpoints here")
    options = parser.parse_args(argv)
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    plan = FaultPlan(
        minutes=options.minutes, interval_s=options.interval, baseline_s=options.baseline, seed=seed, logs=options.logs
    )
    return 1 if chaos(plan) else 0


if __name__ == "__main__":
    sys.exit(main())
