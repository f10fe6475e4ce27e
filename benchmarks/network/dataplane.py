"""The data plane measured: payloads through the product's own transport, between two processes on two cores.

Beside it, in the same run, raw sockets (blocking, a thread for each connection, buffers reused), bare aiohttp, which carries
the product's requests and bounds them, and hivemind's RemoteExpert if its interpreter is named:

    python -m venv DIR && DIR/bin/pip install hivemind==1.1.12 "numpy<2"
    python -m benchmarks.network.dataplane --hivemind-python DIR/bin/python

`echo` sends the payload back, `one way` answers with a few bytes; MB/s and CPU-seconds per GB count the payload once. CPU is
that of all processes of both ends. 8-bit payloads count as the fp32 tensors that they carry; their bound is what one thread
at each end quantises and restores, with nothing sent.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from benchmarks.network.dataplane_peers import CLIENTS, Deadline
from benchmarks.process_cpu import busy_machine_s, cpu_of_tree
from benchmarks.report import ROOT, machine, publish
from swarm.wire.compression import CODECS, code_tensor, decode_coded

MIB = 2**20
SIZES = (1 * MIB, 8 * MIB, 32 * MIB)
IN_FLIGHT = (1, 8)
KINDS = {"echo": "echo", "sink": "one way"}
SMALL_BYTES = 1024
QUIET_CORES = 0.1
HIVEMIND_S = 100


@contextmanager
def server(kind: str) -> Iterator[int]:
    """A server process; yields its port."""
    words = [sys.executable, "-m", "benchmarks.network.dataplane_peers", kind]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(timeout=20)


def measure(system: str, port: int, kind: str, size: int, in_flight: int, seconds: float) -> dict[str, Any]:
    marks: list[tuple[float, float, float]] = []

    def mark() -> float:
        marks.append((time.perf_counter(), cpu_of_tree(os.getpid()), busy_machine_s()))
        return marks[-1][0]

    def phases() -> Iterator[Deadline]:
        """A warm-up, and what counts."""
        began = mark()
        yield lambda done: time.perf_counter() < began + seconds / 2 or done < 2
        began = mark()
        yield lambda done: time.perf_counter() < began + seconds or done < 2
        mark()

    calls = CLIENTS[system](port, kind, size, in_flight, phases())
    elapsed, cpu, busy = (after - before for before, after in zip(marks[1], marks[2], strict=True))
    num_bytes = size * len(calls)
    return {
        "system": system,
        "kind": kind,
        "size": size,
        "in_flight": in_flight,
        "MB/s": num_bytes / elapsed / 1e6,
        "CPU s/GB": cpu / num_bytes * 1e9,
        "by_others": max(0.0, busy - cpu) / elapsed,
        "p50_ms": statistics.median(calls) * 1e3,
    }


def quantiser(size: int, seconds: float) -> dict[str, float]:
    """MB/s of fp32 that one thread quantises, and restores."""
    tensor = torch.randn(size // 4)
    spec, coded, _ = code_tensor("x", tensor, CODECS["8bit"], "input")

    def rate(job: Callable[[], Any]) -> float:
        job()
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            job()
            count += 1
        return size * count / (time.perf_counter() - began) / 1e6

    return {
        "quantise": rate(lambda: code_tensor("x", tensor, CODECS["8bit"], "input")),
        "restore": rate(lambda: decode_coded(spec, coded)),
    }


def bound(rates: dict[str, float], kind: str, in_flight: int) -> float:
    """MB/s if nothing but the quantiser took time: one call after the other, or both ends' threads busy at once."""
    quantise, restore = 1 / rates["quantise"], 1 / rates["restore"]
    at_once = {"sink": max(quantise, restore), "echo": quantise + restore}[kind]
    alone = {"sink": quantise + restore, "echo": 2 * (quantise + restore)}[kind]
    return 1 / (alone if in_flight == 1 else at_once)


def hivemind(python: str, sizes: list[int], seconds: float) -> dict[str, Any]:
    """Its p50 and its rows: as many as it measures in `HIVEMIND_S`."""
    command = [python, "-W", "ignore", "-m", "benchmarks.network.dataplane_hivemind", json.dumps([sizes, IN_FLIGHT, seconds])]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.DEVNULL, process_group=0, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            child.wait(HIVEMIND_S)
        except subprocess.TimeoutExpired:
            print(f"  hivemind measured not everything in {HIVEMIND_S} s", file=sys.stderr)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        output.seek(0)
        first, *rows = [json.loads(line) for line in output.read().splitlines() if line.startswith("{")]
    return {**first, "rows": rows}


def row_of(
    ours: dict[str, Any], raw: dict[str, Any], bare: dict[str, Any], theirs: dict[str, Any] | None, *, is_compared: bool
) -> dict[str, Any]:
    row = {
        "what": KINDS[ours["kind"]],
        "MiB": ours["size"] // MIB,
        "in flight": ours["in_flight"],
        "MB/s": ours["MB/s"],
        "of raw": ours["MB/s"] / raw["MB/s"],
        "raw MB/s": raw["MB/s"],
        "CPU s/GB": ours["CPU s/GB"],
        "raw CPU s/GB": raw["CPU s/GB"],
        "aiohttp MB/s": bare["MB/s"],
        "of aiohttp": ours["MB/s"] / bare["MB/s"],
        "aiohttp of raw": bare["MB/s"] / raw["MB/s"],
    }
    if is_compared:
        row |= dict.fromkeys(("hivemind MB/s", "x its", "its CPU s/GB", "CPU of its"), "too slow")
    if theirs is not None:
        row |= {
            "hivemind MB/s": theirs["MB/s"],
            "x its": ours["MB/s"] / theirs["MB/s"],
            "its CPU s/GB": theirs["CPU s/GB"],
            "CPU of its": ours["CPU s/GB"] / theirs["CPU s/GB"],
        }
    return row


def draw(rows: list[dict[str, Any]]) -> Callable[[Any], None]:
    systems = {"raw sockets": "raw MB/s", "swarm": "MB/s", "hivemind": "hivemind MB/s"}

    def on(figure: Any) -> None:
        for axes, what in zip(figure.subplots(1, 2), KINDS.values(), strict=True):
            shown = [row for row in rows if row["what"] == what]
            for offset, (name, key) in enumerate(systems.items()):
                bars = {i + 0.27 * offset: row[key] for i, row in enumerate(shown) if isinstance(row.get(key), float)}
                if bars:
                    axes.bar(list(bars), list(bars.values()), 0.27, label=name)
            axes.set_xticks([i + 0.27 for i in range(len(shown))], [f"{r['MiB']} MiB\nx {r['in flight']}" for r in shown])
            axes.set_yscale("log")
            axes.set_ylabel("MB/s")
            axes.set_title(what)
            axes.legend()

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", help="interpreter that has hivemind 1.1.12")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure, in each repetition")
    parser.add_argument("--repetitions", type=int, default=3, help="of all but hivemind, in turns; medians")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share")
    parser.add_argument("--sizes", type=int, nargs="+", default=[size // MIB for size in SIZES], help="MiB")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    torch.set_num_threads(1)
    gc.freeze()  # as the launchers do
    facts = machine()
    sizes = [size * MIB for size in options.sizes]
    cases = [(kind, size, in_flight) for kind in KINDS for size in sizes for in_flight in IN_FLIGHT]
    runs: list[dict[str, Any]] = []
    with server("swarm") as swarm_port, server("raw") as raw_port, server("aiohttp") as bare_port:
        ports = {"swarm": swarm_port, "raw sockets": raw_port, "aiohttp": bare_port, "swarm 8bit": swarm_port}
        for _ in range(options.repetitions):
            for case in cases:
                for system, port in ports.items():
                    runs.append(measure(system, port, *case, options.seconds))
                print("  {kind} {size} x {in_flight}: {MB/s:.0f} MB/s".format(**runs[-4]), file=sys.stderr, flush=True)
        small = [
            measure(system, ports[system], "echo", SMALL_BYTES, 1, options.seconds)["p50_ms"]
            for system in ("swarm", "raw sockets")
        ]
    rates = {size: quantiser(size, options.seconds / 2) for size in sizes}
    theirs = hivemind(options.hivemind_python, sizes, options.seconds) if options.hivemind_python else None

    def middle(system: str, case: tuple[str, int, int]) -> dict[str, Any]:
        same = [run for run in runs if (run["system"], run["kind"], run["size"], run["in_flight"]) == (system, *case)]
        return sorted(same, key=lambda run: run["MB/s"])[len(same) // 2]

    def of_theirs(case: tuple[str, int, int]) -> dict[str, Any] | None:
        rows = theirs["rows"] if theirs else []
        return next((row for row in rows if (row["kind"], row["size"], row["in_flight"]) == case), None)

    rows = [
        row_of(
            *(middle(system, case) for system in ("swarm", "raw sockets", "aiohttp")),
            of_theirs(case),
            is_compared=theirs is not None,
        )
        for case in cases
    ]
    coded_rows = [
        {
            "what": KINDS[one["kind"]],
            "MiB of fp32": one["size"] // MIB,
            "in flight": one["in_flight"],
            "MB/s": one["MB/s"],
            "bound": (most := bound(rates[one["size"]], one["kind"], one["in_flight"])),
            "of bound": one["MB/s"] / most,
            "CPU s/GB": one["CPU s/GB"],
        }
        for one in (middle("swarm 8bit", case) for case in cases)
    ]
    small_row = {"swarm p50 ms": small[0], "raw sockets p50 ms": small[1]}
    if theirs:
        small_row["hivemind p50 ms"] = theirs["small_p50_ms"]
    facts["timed"] = f"{options.seconds:g} s a figure after a warm-up, median of {options.repetitions} in turns"
    if max(run["by_others"] for run in runs) > QUIET_CORES:
        facts["warning"] = "other processes used the cores meanwhile: run it again"
    publish(
        "dataplane",
        facts=facts,
        tables={"Raw payloads": rows, "8-bit payloads": coded_rows, "1 KiB echo": [small_row]},
        details={"runs": runs, "quantiser MB/s": rates, "hivemind": theirs},
        draw=draw(rows),
    )


if __name__ == "__main__":
    main()
