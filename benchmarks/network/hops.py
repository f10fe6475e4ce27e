"""What the swarm adds to each hop, and how that grows with stages and peers: real processes, compute replaced by waiting.

A micro-batch's round trip, less what its stages waited in queues and computed, divided by the stages, is the overhead of a
hop: framing, transport, event loops, claims, ledger. `alone` has one micro-batch under way, `filled` enough to keep every
compute thread busy. The occupation of a compute thread (`timed_model.py`: it sleeps) is chosen so long that a filled swarm
leaves the cores time; where they are busy all the same, the figures are those of the cores, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.process_cpu import busy_machine_s, cpu_of_tree
from benchmarks.report import machine, publish
from benchmarks.timed_model import DATA, MODEL, WIDTH
from swarm.base.config import RunConfig
from swarm.testing.launched import LaunchedSwarm

START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 60.0
#: Part of all cores above which the cores decide.
BUSY = 0.8
#: CPU-seconds that one hop of one micro-batch takes in all processes, about: sets the occupation of filled swarms.
HOP_CPU_S = 0.006
#: A forward takes a third of a round, as with real layers.
FORWARD_PART = 1 / 3
SHORTEST_S = 0.03


def occupation_s(stages: int, peers: int, cores: int) -> float:
    """Of forward and backward together: a filled swarm then takes about half of the cores."""
    return max(SHORTEST_S, HOP_CPU_S * stages * peers / (0.5 * cores))


def config_of(stages: int, occupation: float, tickets: int) -> RunConfig:
    return RunConfig(
        name="hops",
        model=MODEL,
        num_stages=stages,
        sequence_length=WIDTH,
        micro_batch_size=1,
        target_batch_size=tickets,
        model_options={
            "forward_s": [occupation * FORWARD_PART] * stages,
            "backward_s": [occupation * (1 - FORWARD_PART)] * stages,
        },
        total_steps=1000,
        eval_samples=0,
        checkpoint_every=0,
        compression="none",
        learning_rate=1e-6,
    )


def measure(stages: int, peers: int, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    occupation = SHORTEST_S if mode == "alone" else occupation_s(stages, peers, cores)
    in_flight = 1 if mode == "alone" else 2 * stages * peers
    # Whole steps of about `seconds`: their ends are outside the round trips.
    round_trip = stages * (occupation + 0.01) if mode == "alone" else occupation / peers
    tickets = max(4, round(options.seconds / round_trip))
    config = config_of(stages, occupation, tickets)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = directory / "run.json"
        run.write_bytes(config.to_bytes())
        with LaunchedSwarm(
            directory,
            run=run,
            data=DATA,
            peers_per_stage=peers,
            trainers=1,
            device="cpu",
            threads=1,
            in_flight=in_flight,
            quiet=True,
        ) as swarm:
            swarm.steps(1, START_TIMEOUT_S)
            cpu, others, began = cpu_of_tree(swarm.pid), busy_machine_s(), time.monotonic()
            lines = swarm.steps(1 + options.steps, STEP_TIMEOUT_S * (1 + options.steps))[1:]
            elapsed = time.monotonic() - began
            cpu = cpu_of_tree(swarm.pid) - cpu
            others = max(0.0, busy_machine_s() - others - cpu)
    used = cpu / elapsed / cores
    overheads = [(line["round_trip_s"] - line["queue_s"] - line["compute_s"]) / stages for line in lines]
    rate = statistics.median(tickets / line["seconds"] for line in lines)
    most = peers / occupation if mode == "filled" else 1 / (stages * occupation)
    return {
        "stages": stages,
        "peers": peers,
        "mode": mode,
        "occupation ms": occupation * 1e3,
        "overhead per hop ms": statistics.median(overheads) * 1e3,
        "CPU ms per hop": cpu / sum(line["tokens"] for line in lines) / stages * 1e3,
        "throughput of bound": rate / most,
        "cores used": used,
        "by others": others / elapsed / cores,
        "limit": "cores" if used + others / elapsed / cores > BUSY else "waiting",
    }


def draw(rows: list[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        modes = list(dict.fromkeys(row["mode"] for row in rows))
        for axes, mode in zip(figure.subplots(1, len(modes), sharey=True, squeeze=False)[0], modes, strict=True):
            for peers in sorted({row["peers"] for row in rows}):
                shown = [row for row in rows if row["mode"] == mode and row["peers"] == peers]
                if shown:
                    axes.plot(
                        [r["stages"] for r in shown], [r["overhead per hop ms"] for r in shown], "o-", label=f"{peers} a stage"
                    )
            axes.set_xlabel("stages")
            axes.set_ylabel("overhead per hop, ms")
            axes.set_title(mode)
            axes.set_ylim(bottom=0)
            axes.legend()

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 2, 4], help="peers per stage")
    parser.add_argument("--modes", nargs="+", choices=("alone", "filled"), default=["alone", "filled"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a step, about")
    parser.add_argument("--steps", type=int, default=2, help="steps that are measured, after one that is not")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    facts = machine()
    rows = []
    for stages in options.stages:
        for peers in options.peers:
            for mode in options.modes:
                rows.append(measure(stages, peers, mode, options))
                print("  " + json.dumps(rows[-1]), file=sys.stderr, flush=True)
    facts["payload"] = f"{WIDTH * 4} bytes at every boundary, each way, raw"
    if any(row["limit"] == "cores" for row in rows):
        facts["warning"] = "the cores were busy: these are upper bounds, run it again"
    facts["timed"] = f"median of {options.steps} steps of about {options.seconds:g} s"
    publish("hops", facts=facts, tables={"Overhead per hop": rows}, draw=draw(rows))


if __name__ == "__main__":
    main()
