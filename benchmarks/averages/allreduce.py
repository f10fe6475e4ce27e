"""The all-reduce of a stage, peers as processes on loopback, beside hivemind's DecentralizedAverager in the same run.

The product's own member, leader, rounds and HTTP transport; a driver plays the coordinator: it has the leader collect
seals and average them, and times the `Average` request, at whose end every peer holds the average, its digest and its
sum of squares. hivemind is timed from its trigger, without matchmaking, if its interpreter is named:

    python -m venv DIR && DIR/bin/pip install hivemind==1.1.12 "numpy<2"
    python -m benchmarks.averages.allreduce --hivemind-python DIR/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.averages.allreduce_hivemind import cpu_of
from benchmarks.averages.allreduce_peer import gradient_of
from benchmarks.averages.allreduce_shaped import shaped
from benchmarks.averages.allreduce_swarm import CHECKED, WARM_UP, swarm_of
from benchmarks.report import machine, publish


async def measure(num_peers: int, num_elements: int, compression: str, rounds: int) -> dict[str, Any]:
    """Rounds of one case, after the warm-up."""
    async with swarm_of(num_peers, num_elements, **fields_of(compression)) as swarm:
        roots = [process.pid for process in swarm.processes]
        seconds, cpu_s = [], []
        for _ in range(WARM_UP + rounds):
            attempt, seals = await swarm.seals()
            cpu, began = cpu_of(roots), time.monotonic()
            reply = await swarm.average(attempt, seals)
            seconds.append(time.monotonic() - began)
            cpu_s.append(cpu_of(roots) - cpu)
            if reply.result is None or len(reply.result.holders) != num_peers:
                raise SystemExit(f"{num_peers} peers, {compression}: {reply.reason}")
        total = sum(gradient_of(i, num_elements)[:CHECKED] for i in range(num_peers))
        parts = [await swarm.part(holder, reply.result) for holder in swarm.members]
        if not all(torch.equal(part, parts[0]) for part in parts):
            raise SystemExit("replicas differ")
        return {"seconds": seconds[WARM_UP:], "cpu_s": cpu_s[WARM_UP:], "error": float((parts[0] - total).norm() / total.norm())}


def fields_of(compression: str) -> dict[str, Any]:
    return {"average_compression": compression}


def hivemind(python: str, num_peers: int, num_elements: int, compression: str, rounds: int) -> list[dict[str, Any]] | None:
    options = {
        "peers": num_peers,
        "elements": num_elements,
        "compression": compression,
        "rounds": WARM_UP + rounds,
        "averager": {},
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "benchmarks.averages.allreduce_hivemind", json.dumps(options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    if done.returncode:
        print(f"hivemind, {num_peers} peers, {compression}: failed: {done.stderr[-500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout)[WARM_UP:]


def loopback_bytes_per_s(num_streams: int, num_bytes: int = 2**29) -> float:
    """Of so many plain sockets at once, all together."""

    def sink(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        buffer = bytearray(2**20)
        while connection.recv_into(buffer):
            pass

    children, began = [], time.monotonic()
    for _ in range(num_streams):
        listener = socket.create_server(("127.0.0.1", 0))
        pid = os.fork()
        if pid == 0:
            threading.Thread(target=sink, args=(listener,)).start()
            with socket.create_connection(listener.getsockname()) as sender:
                block = bytes(2**20)
                for _ in range(num_bytes // len(block)):
                    sender.sendall(block)
            os._exit(0)
        children.append(pid)
        listener.close()
    for pid in children:
        os.waitpid(pid, 0)
    return num_streams * num_bytes / (time.monotonic() - began)


def draw(rows: list[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        labels = [f"{row['peers']} peers\n{row['compression']}" for row in rows]
        places = range(len(rows))
        for axes, what, title in zip(
            figure.subplots(1, 2), (("s", "hivemind s"), ("CPU-s", "hivemind CPU-s")), ("seconds", "CPU-seconds"), strict=True
        ):
            axes.bar([x - 0.2 for x in places], [row[what[0]] for row in rows], 0.4, label="swarm")
            axes.bar([x + 0.2 for x in places], [row[what[1]] or 0 for row in rows], 0.4, label="hivemind 1.1.12", color="0.6")
            axes.set_xticks(list(places), labels, fontsize=7)
            axes.set_title(f"{title} per round")
            axes.legend()

    return on


def loopback(options: argparse.Namespace) -> None:
    alone = loopback_bytes_per_s(1)
    rows, details = [], {}
    for num_peers in options.peers:
        together = loopback_bytes_per_s(num_peers)
        for compression in options.compression:
            ours = asyncio.run(measure(num_peers, options.elements, compression, options.rounds))
            theirs = None
            reference = {"none": "none", "fp16": "fp16", "bf16": "fp16"}.get(compression, "8bit")
            if options.hivemind_python:
                theirs = hivemind(options.hivemind_python, num_peers, options.elements, reference, options.rounds)
            seconds, cpu_s = statistics.median(ours["seconds"]), statistics.median(ours["cpu_s"])
            their_s = statistics.median(r["seconds"] for r in theirs) if theirs else 0.0
            their_cpu_s = statistics.median(r["cpu_s"] for r in theirs) if theirs else 0.0
            width = {"none": 4.0, "fp16": 2.0, "bf16": 2.0}.get(compression, 1.0)
            sent = 2 * (num_peers - 1) / num_peers * options.elements * width
            rows.append(
                {
                    "peers": num_peers,
                    "compression": compression,
                    "s": seconds,
                    "CPU-s": cpu_s,
                    "error": ours["error"],
                    "hivemind s": their_s,
                    "x faster": their_s / seconds,
                    "hivemind CPU-s": their_cpu_s,
                    "x less CPU": their_cpu_s / cpu_s,
                    "x wire alone": seconds / (sent / alone),
                    "x wire shared": seconds / (num_peers * sent / together),
                }
            )
            details[f"{num_peers} peers, {compression}"] = {"swarm": ours, "hivemind": theirs}
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, file=sys.stderr, flush=True)
    facts = machine() | {
        "values": f"{options.elements} fp32 per peer, one torch thread per process",
        "timed": f"median of {options.rounds} rounds after {WARM_UP}",
        "loopback": f"{alone / 1e9:.2f} GB/s one plain socket",
        "wire": "lower bound 2(n-1)/n x bytes of one peer over that socket's rate (alone), or of all peers over the rate "
        "of n sockets at once (shared)",
        "hivemind": "1.1.12, no matchmaking, 8-bit by Uniform8BitQuantization" if options.hivemind_python else "not measured",
    }
    tables = {"All-reduce, peers as processes on loopback": rows}
    publish(options.name, facts=facts, tables=tables, details=details, draw=draw(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", type=int, default=[4, 8], metavar="N", help="peers (default: 4 8)")
    parser.add_argument("--elements", type=int, default=25_000_000, metavar="N", help="fp32 values (default: 25000000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that are timed (default: 3)")
    parser.add_argument(
        "--compression",
        nargs="+",
        default=["none", "fp16", "int8"],
        choices=("none", "fp16", "bf16", "8bit", "int8"),
        help="of the averages (default: none fp16 int8)",
    )
    parser.add_argument("--hivemind-python", metavar="PYTHON", help="interpreter that has hivemind 1.1.12")
    parser.add_argument("--shaped", action="store_true", help="12 peers on links with limits instead (needs root, ip, tc)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of the shaped links' rates (default: 1)")
    parser.add_argument(
        "--shaped-elements", type=int, default=4_000_000, metavar="N", help="fp32 values with --shaped (default: 4000000)"
    )
    parser.add_argument("--name", default="allreduce", help="of the result files (default: allreduce)")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    torch.set_num_threads(1)
    chosen = parse()
    if chosen.shaped:
        shaped(chosen)
    else:
        loopback(chosen)
