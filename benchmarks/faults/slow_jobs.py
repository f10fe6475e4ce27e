"""Forwards and backwards of a minute with deadlines of seconds (`timing local`): `launch_local` trains without a retry, says
what it is at, and passes by a process whose job never ends, or that was stopped.

The compute threads sleep (`timed_model.py`), in one layer or in several; all else is real. Prints each step, and how long
after its last job began a hung peer was given up, in the time of its jobs; exit code 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.report import machine, publish
from benchmarks.timed_model import DATA, MODEL
from swarm.testing.launched import LaunchedSwarm, metrics_of

#: A hung peer is given up within so many of its job times.
MOST_JOBS = 3.0


def started(options: argparse.Namespace, root: Path) -> LaunchedSwarm:
    model = {
        "forward_s": [options.seconds] * 2,
        "backward_s": [options.seconds] * 2,
        "width": 16,
        "layers": options.layers,
        "hang": str(root / "hang"),
    }
    return LaunchedSwarm(
        root,
        model=MODEL,
        model_options=json.dumps(model),
        data=DATA,
        stages=2,
        peers_per_stage=2,
        steps=options.steps,
        micro_batch_size=1,
        target_batch_size=4,
        compression="none",
        eval_samples=0,
        timing="local",
        log_level="debug",
        plain=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each forward and each backward of a stage")
    parser.add_argument("--layers", type=int, default=1, help="that share them")
    parser.add_argument("--steps", type=int, default=2, help="steps of the run")
    parser.add_argument(
        "--hang",
        choices=["no", "job", "process"],
        default="no",
        help="after the first step, what of a peer of stage 1 hangs: its next layer, or all of it (SIGSTOP)",
    )
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        said: list[str] = []
        victim = 0
        try:
            with started(options, root) as swarm:
                for line in swarm.lines():
                    said.append(line)
                    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
                    if options.hang != "no" and not victim and metrics_of(root / "metrics.jsonl"):
                        victim = swarm.stage_pids(1)[0]
                        if options.hang == "job":
                            (root / "hang").write_text(str(victim))
                        else:
                            os.kill(victim, signal.SIGSTOP)
                        print(f"process {victim} of stage 1 hangs from here on ({options.hang})", flush=True)
                code = swarm.process.wait()
        finally:
            if options.hang == "process" and victim:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        steps = metrics_of(root / "metrics.jsonl")
        logs = [line for path in (root / "state" / "logs").glob("*.log") for line in path.read_text().splitlines()]
        passed_by = [line[:200] for line in logs if " passed by after " in line]
    waits = [line for line in said if "waiting for tickets of step" in line]
    held = code == 0 and len(steps) == options.steps and bool(waits)
    if options.hang == "no":
        held = held and not any(line["retries"] for line in steps)
    elif held:  # beside what a step takes, the wait for the hung one and its tickets' work once more
        held = steps[1]["seconds"] <= steps[0]["seconds"] + (MOST_JOBS + 4) * options.seconds
    print("\n".join(passed_by))
    publish(
        f"slow_jobs_{options.layers}_{options.hang}",
        facts={**facts, **vars(options), "held": held},
        tables={"steps": [{key: line[key] for key in ("step", "seconds", "retries", "loss")} for line in steps] or [{}]},
        details={"waits": waits, "passed_by": passed_by},
    )
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
