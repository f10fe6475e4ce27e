"""hivemind's DecentralizedAverager for `allreduce.py` and `recovery.py`: peers as processes on loopback, without matchmaking.

Runs under an interpreter of its own that has hivemind, prints one JSON object, and is started by one of these scripts.
Each round is matched first (`require_trigger`); the clock runs from the trigger to the last peer's result, or from the kill
of one peer in the midst of a round to each survivor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.process_cpu import tree_of

COMPRESSIONS = {"none": "NoCompression", "fp16": "Float16Compression", "8bit": "Uniform8BitQuantization"}


#: A survivor that has not said anything this long after its own deadline hangs.
SLACK_S = 10.0
LOCK_S = 2.0


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
        [tensor],
        dht,
        prefix="allreduce",
        target_group_size=options["peers"],
        min_group_size=options["peers"],
        compression=getattr(hivemind.compression, COMPRESSIONS[options["compression"]])(),
        allow_state_sharing=False,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        start=True,
        **options["averager"],
    )
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
            ended = time.monotonic()
            is_free = averager.lock_averaged_tensors.acquire(timeout=LOCK_S)  # what `get_tensors` waits for, for ever
            sample = [float(x) for x in averager._averaged_tensors[0][:: max(1, options["elements"] // 1000)]]
            if is_free:
                averager.lock_averaged_tensors.release()
            else:
                outcome = f"tensors stay locked after {outcome}"
            print(json.dumps({"outcome": outcome, "sample": sample, "at": ended}), flush=True)
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


class Peers:
    """The processes of one group."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(self, options: dict[str, Any]) -> None:
        initial: list[str] = []
        for index in range(options["peers"]):
            own = {**options, "index": index, "initial": initial}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", __spec__.name, json.dumps(own)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            addresses = self.answer(index)
            initial = initial or addresses

    def answer(self, index: int) -> Any:
        return json.loads(self.processes[index].stdout.readline())  # type: ignore[union-attr]

    def answers(self) -> list[Any]:
        return [self.answer(index) for index in range(len(self.processes))]

    def answers_by(self, until: float) -> list[Any]:
        """None of those that have none by then."""
        found = []
        for index, process in enumerate(self.processes):
            can_be_read = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]
            found.append(self.answer(index) if can_be_read else None)
        return found

    def tell(self, what: str) -> None:
        for process in self.processes:
            process.stdin.write(what + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

    def kill_last(self) -> float:
        """SIGKILL to a peer and all its helpers, as when its machine dies; returns when."""
        process = self.processes.pop()
        tree, now = tree_of(process.pid), time.monotonic()
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        return now

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def started(options: dict[str, Any]) -> Iterator[Peers]:
    peers = Peers()
    try:
        peers.start(options)
        yield peers
    finally:
        peers.close()


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """`rounds` rounds that nobody disturbs."""
    with started(options) as peers:
        return [one_round(peers, options) for _ in range(options["rounds"])]


def one_round(peers: Peers, options: dict[str, Any]) -> dict[str, Any]:
    peers.tell("match")
    peers.answers()
    cpu, began = cpu_of(peers.pids), time.monotonic()
    peers.tell("go")
    results = peers.answers()
    return {
        "seconds": time.monotonic() - began,
        "cpu_s": cpu_of(peers.pids) - cpu,
        "averaged": all(r["outcome"] == f"averaged with {options['peers']}" for r in results),
        "outcomes": sorted({r["outcome"] for r in results}),
    }


def disturbed(options: dict[str, Any]) -> list[dict[str, Any]]:
    """One peer is killed after each of `parts` of a round's usual time (0: before it is triggered), in groups of their own."""
    kills = []
    for part in options["parts"]:
        with started(options) as peers:
            usual_s = [one_round(peers, options)["seconds"] for _ in range(3)][-1]
            peers.tell("match")
            peers.answers()
            if part:
                peers.tell("go")
                time.sleep(part * usual_s)
            killed_at = peers.kill_last()
            if not part:
                peers.tell("go")
            survivors = peers.answers_by(killed_at + options["deadline_s"] + SLACK_S)
        for survivor in filter(None, survivors):
            survivor["seconds"] = survivor.pop("at") - killed_at
        kills.append({"part": part, "usual_s": usual_s, "survivors": survivors})
    return kills


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "index" in given:
        peer(given)
    else:
        print(json.dumps(disturbed(given) if "parts" in given else measure(given)))
