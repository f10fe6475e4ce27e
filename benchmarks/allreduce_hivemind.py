"""hivemind's DecentralizedAverager for `allreduce.py`: peers as processes on loopback, timed without matchmaking.

Runs under an interpreter of its own that has hivemind, prints one JSON object, and is started by `benchmarks/allreduce.py`.
Each round is matched first (`require_trigger`); the clock runs from the trigger to the last peer's result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

COMPRESSIONS = {"none": "NoCompression", "fp16": "Float16Compression", "8bit": "Uniform8BitQuantization"}


def peer(options: dict[str, Any]) -> None:
    """One peer: told what to do by lines on standard input."""
    import hivemind
    import torch
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=options["initial"], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    tensor = torch.randn(options["elements"], generator=torch.Generator().manual_seed(options["index"]))
    averager = DecentralizedAverager(
        [tensor], dht, prefix="allreduce", target_group_size=options["peers"], min_group_size=options["peers"],
        compression=getattr(hivemind.compression, COMPRESSIONS[options["compression"]])(), allow_state_sharing=False,
        min_matchmaking_time=2.0, request_timeout=1.0, start=True, **options["averager"],
    )  # fmt: skip
    print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
    control = None
    for line in sys.stdin:
        if line.strip() == "match":
            with averager.get_tensors() as tensors:
                tensors[0][:] = torch.randn(options["elements"], generator=torch.Generator().manual_seed(options["index"]))
            control = averager.step(wait=False, require_trigger=True, timeout=60)
            while control.stage not in (AveragingStage.AWAITING_TRIGGER, AveragingStage.FINISHED):
                time.sleep(0.01)
            print(json.dumps("matched"), flush=True)
        elif line.strip() == "go":
            assert control is not None
            try:
                control.allow_allreduce()
                group = control.result(timeout=options.get("deadline_s", 120))
                outcome = f"averaged with {len(group)}" if group else "no group"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            with averager.get_tensors() as tensors:
                sample = [float(x) for x in tensors[0][:: max(1, options["elements"] // 1000)]]
            print(json.dumps({"outcome": outcome, "sample": sample}), flush=True)
    averager.shutdown()
    dht.shutdown()


def cpu_of(roots: list[int]) -> float:
    """CPU-seconds of these processes and everything below them."""
    parents, seconds = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            seconds[int(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in seconds:
        ancestor = pid
        while ancestor not in roots and ancestor in parents:
            ancestor = parents[ancestor]
        total += seconds[pid] if ancestor in roots else 0.0
    return total


def measure(options: dict[str, Any]) -> list[dict[str, float]]:
    processes: list[subprocess.Popen[str]] = []
    initial: list[str] = []

    def answers() -> list[Any]:
        return [json.loads(process.stdout.readline()) for process in processes]  # type: ignore[union-attr]

    def tell(what: str) -> None:
        for process in processes:
            process.stdin.write(what + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

    try:
        for index in range(options["peers"]):
            own = {**options, "index": index, "initial": initial}
            processes.append(subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, json.dumps(own)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            ))  # fmt: skip
            addresses = json.loads(processes[-1].stdout.readline())  # type: ignore[union-attr]
            initial = initial or addresses
        rounds = []
        for _ in range(options["rounds"]):
            tell("match")
            answers()
            roots = [process.pid for process in processes]
            cpu, began = cpu_of(roots), time.monotonic()
            tell("go")
            results = answers()
            rounds.append({
                "seconds": time.monotonic() - began, "cpu_s": cpu_of(roots) - cpu,
                "averaged": all(r["outcome"] == f"averaged with {options['peers']}" for r in results),
                "outcomes": sorted({r["outcome"] for r in results}),
            })  # fmt: skip
        return rounds
    finally:
        for process in processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "index" in given:
        peer(given)
    else:
        print(json.dumps(measure(given)))
