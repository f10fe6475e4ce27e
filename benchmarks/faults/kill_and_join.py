"""A local swarm loses two peers of different stages to SIGKILL and gets a newcomer; every step still counts every ticket.

Prints each step's seconds around the faults and whether the promises held; exit code 1 if one did not. The smoke test of
elasticity with real processes: `benchmarks/faults/chaos.py` is the long one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from swarm.testing.launched import Launched, LaunchedSwarm, metrics_of

START_S = 120.0
#: The run has stalled if what is waited for takes longer.
STALLED_S = 300.0
#: A step may take this much longer than the median.
SLACK_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of the run")
    parser.add_argument("--kills", type=int, nargs=2, default=[10, 25], help="steps after which a peer is killed")
    parser.add_argument("--join", type=int, default=35, help="step after which a newcomer joins")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with ExitStack() as processes:
            swarm = processes.enter_context(LaunchedSwarm(root, stages=3, peers_per_stage=2, steps=options.steps, plain=True))
            address = swarm.says(r"launch_stage --join (\S+)", START_S)[1]
            for stage, step in enumerate(options.kills):
                swarm.steps(step, STALLED_S)
                os.kill(swarm.stage_pids(stage)[0], signal.SIGKILL)
                print(f"step {step}: killed a peer of stage {stage}", flush=True)
            swarm.steps(options.join, STALLED_S)
            processes.enter_context(Launched("launch.stage", root / "newcomer", join=address, threads=1, quiet=True))
            print(f"step {options.join}: a newcomer joins", flush=True)
            code = swarm.process.wait(timeout=STALLED_S)
        lines = metrics_of(root / "metrics.jsonl")
    seconds = [line["seconds"] for line in lines]
    median = statistics.median(seconds)
    checks = {
        f"exit code 0 (was {code})": code == 0,
        f"{options.steps} committed steps (were {len(lines)})": [x["step"] for x in lines] == list(range(1, options.steps + 1)),
        "every step with every ticket at every stage": all(len(set(x["tickets"])) == 1 and x["tickets"][0] == 8 for x in lines),
        f"slowest step {max(seconds):.2f} s, median {median:.2f} s, at most {SLACK_S:g} s more": max(seconds) <= median + SLACK_S,
        f"the newcomer served (peers at the end: {lines[-1]['peers']})": sum(lines[-1]["peers"]) == 5,
    }
    for step in sorted({*options.kills, options.join}):
        around = ", ".join(f"{x['step']}: {x['seconds']:.2f}" for x in lines[step - 2 : step + 4])
        print(f"seconds of steps {around}")
    for text, held in checks.items():
        print(f"{'ok  ' if held else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
