"""hivemind's RemoteExpert as a data plane, for scale: an expert that returns its input, and one that returns one number.

Runs under an interpreter of its own that has hivemind, prints a JSON object a line, and is started by `dataplane.py`. A server
process and a client process, raw fp32 (`CompressionType.NONE`), no batching, as many threads as calls in flight.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time

import torch
from hivemind.dht import DHT
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.server import Server
from hivemind.utils.tensor_descr import BatchTensorDescriptor

from benchmarks.process_cpu import cpu_of_tree

SMALL_BYTES = 1024


class Expert(torch.nn.Module):
    def __init__(self, echo: bool) -> None:
        super().__init__()
        self.echo = echo

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.echo else x[:, :1].clone()


def serve(sizes: list[int], pipe: multiprocessing.connection.Connection) -> None:
    tempfile.gettempdir()  # without it the server sometimes hangs at its start
    dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    backends = {}
    for size in sizes:
        for kind in ("echo", "sink"):
            name = f"{kind}.{size}"
            backends[name] = ModuleBackend(
                name, Expert(kind == "echo"), args_schema=(BatchTensorDescriptor(size // 4),), max_batch_size=1
            )
    server = Server(dht, backends, num_connection_handlers=1, device="cpu", start=True)
    server.ready.wait()
    pipe.send(([str(address) for address in dht.get_visible_maddrs()], dht.peer_id))
    pipe.recv()
    server.shutdown()
    dht.shutdown()


def measure(expert: torch.nn.Module, size: int, in_flight: int, seconds: float) -> dict[str, float]:
    """Calls in flight from as many threads for at least `seconds`, and at least two calls each."""
    x = torch.randn(1, size // 4)
    num_done = [0] * in_flight
    failures: list[str] = []
    began = time.perf_counter()
    until = began + seconds

    def work(slot: int) -> None:
        while time.perf_counter() < until or num_done[slot] < 2:
            try:
                expert(x)
                num_done[slot] += 1
            except Exception as error:  # one reply in some hundreds comes back truncated
                failures.append(str(error)[:80])
                if len(failures) > 20:
                    return

    cpu = cpu_of_tree(os.getpid())
    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    num_bytes = size * sum(num_done)
    return {
        "MB/s": num_bytes / elapsed / 1e6,
        "CPU s/GB": (cpu_of_tree(os.getpid()) - cpu) / num_bytes * 1e9,
        "calls": sum(num_done),
        "failures": len(failures),
    }


def main() -> None:
    sizes, in_flights, seconds = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=([SMALL_BYTES, *sizes], there))
    server.start()
    addresses, peer_id = here.recv()
    dht = DHT(initial_peers=addresses, start=True, client_mode=True)

    def expert(kind: str, size: int) -> torch.nn.Module:
        return create_remote_experts([ExpertInfo(f"{kind}.{size}", peer_id)], dht)[0]

    small = expert("echo", SMALL_BYTES)
    x = torch.randn(1, SMALL_BYTES // 4)
    latencies = []
    for _ in range(300):
        began = time.perf_counter()
        small(x)
        latencies.append(time.perf_counter() - began)
    print(json.dumps({"small_p50_ms": statistics.median(latencies[50:]) * 1e3}), flush=True)
    for kind in ("echo", "sink"):
        for size in sizes:
            remote = expert(kind, size)
            remote(torch.randn(1, size // 4))
            for in_flight in in_flights:
                row = {"kind": kind, "size": size, "in_flight": in_flight, **measure(remote, size, in_flight, seconds)}
                print(json.dumps(row), flush=True)
    here.send("end")
    server.join(10)
    os._exit(0)  # its threads and daemons are not waited for


if __name__ == "__main__":
    main()
