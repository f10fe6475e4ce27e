"""A local swarm loses two peers of different stages to SIGKILL and gets a newcomer; every step still counts every ticket.

Prints each step's seconds around the faults and whether the promises held; exit code 1 if one did not. The smoke test of
elasticity with real processes: `benchmarks/faults/chaos.py` is the long one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: A step may take this much longer than the median.
SLACK_S = 10.0


def lines_of(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int, deadline_s: float = 300.0) -> None:
    began = time.monotonic()
    while len(lines_of(metrics)) < step:
        if process.poll() is not None or time.monotonic() - began > deadline_s:
            raise SystemExit(f"the run ended or stalled before step {step} (exit code {process.poll()})")
        time.sleep(0.05)


def stage_pids(state_dir: Path, stage: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-f", "--", f"^launch_stage .*{re.escape(str(state_dir))}/stage-{stage}-"],
        capture_output=True,
        text=True,
        check=False,
    )
    return sorted(int(pid) for pid in found.stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of the run")
    parser.add_argument("--kills", type=int, nargs=2, default=[10, 25], help="steps after which a peer is killed")
    parser.add_argument("--join", type=int, default=35, help="step after which a newcomer joins")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        metrics, state = root / "metrics.jsonl", root / "state"
        command = [
            sys.executable,
            "-m",
            "launch.local",
            "--stages",
            "3",
            "--peers-per-stage",
            "2",
            "--steps",
            str(options.steps),
            "--metrics",
            str(metrics),
            "--state-dir",
            str(state),
            "--plain",
        ]
        swarm = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert swarm.stdout is not None
        address = ""
        newcomer = None
        try:
            for line in swarm.stdout:
                if found := re.search(r"launch_stage --join (\S+)", line):
                    address = found[1]
                    break
            for stage, step in enumerate(options.kills):
                wait_for_step(swarm, metrics, step)
                os.kill(stage_pids(state, stage)[0], signal.SIGKILL)
                print(f"step {step}: killed a peer of stage {stage}", flush=True)
            wait_for_step(swarm, metrics, options.join)
            newcomer = subprocess.Popen(
                [sys.executable, "-m", "launch.stage", "--join", address, "--threads", "1", "--quiet"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            print(f"step {options.join}: a newcomer joins", flush=True)
            code = swarm.wait(timeout=300)
        finally:
            for process in (swarm, newcomer):
                if process is not None and process.poll() is None:
                    process.terminate()
                    process.wait(timeout=20)
        lines = lines_of(metrics)
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
