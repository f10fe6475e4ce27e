"""Does the step protocol keep its promises under faults? Random fault schedules on the real peer code in virtual time.

`--simulated N` runs N schedules of `swarm/testing/simulation/schedules.py`, each with at least 3 stages x 2 peers, 2
trainers, 4 steps of 8 tickets and 5 faults, and compares each with one plain process: every ticket exactly once per
stage, replicas bit-identical, losses and the whole parameter vector equal in fp64 to 1e-8, and the invariants of
`swarm/testing/simulation/invariants.py` after every turn of the event loop. A violation prints the schedule that replays it.

`--real --minutes M` runs real processes and breaks them for M minutes: see `chaos_real.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.report import machine, publish
from swarm.testing.simulation.schedules import run_seeds

PROGRESS_EVERY = 100


def simulated(num_schedules: int, *, first_seed: int, workers: int, tied: bool) -> int:
    """Run the schedules, print and write the result; returns the number of violations."""
    began = time.monotonic()
    facts: dict[str, Any] = {**machine(), "first_seed": first_seed, "schedules": num_schedules, "workers": workers, "tied": tied}
    faults: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    cpu_s = 0.0
    seeds = range(first_seed, first_seed + num_schedules)
    for count, result in enumerate(run_seeds(seeds, workers=workers, tied=tied), start=1):
        faults.update(result.faults)
        cpu_s += result.cpu_s
        if result.violation:
            violations.append({"seed": result.seed, "violation": result.violation})
            print(f"VIOLATION {result.violation}", flush=True)
        if count % PROGRESS_EVERY == 0:
            print(f"{count} schedules, {len(violations)} violations, {time.monotonic() - began:.0f} s", flush=True)
    facts |= {"violations": len(violations), "seconds": round(time.monotonic() - began), "cpu_seconds": round(cpu_s)}
    rows = [{"fault": kind, "injected": count} for kind, count in faults.most_common()]
    publish(
        "chaos_simulated_tied" if tied else "chaos_simulated",
        facts=facts,
        tables={"faults injected": rows},
        details={"violations": violations},
    )
    return len(violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--simulated", type=int, metavar="N", help="random schedules to run")
    how.add_argument("--real", action="store_true", help="real processes instead; takes the options of chaos_real.py")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="seed of the first (default 0)")
    parser.add_argument("--workers", type=int, default=2, metavar="P", help="processes, one core each (default 2)")
    parser.add_argument("--tied", action="store_true", help="the first and the last stage share a parameter")
    arguments, others = parser.parse_known_args()
    if arguments.real:
        from benchmarks.faults.chaos_real import main as real

        return real(others)
    if others:
        parser.error(f"unknown: {' '.join(others)}")
    violations = simulated(arguments.simulated, first_seed=arguments.first_seed, workers=arguments.workers, tied=arguments.tied)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
