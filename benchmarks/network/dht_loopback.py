"""64 real DHT nodes in 8 processes on loopback: how long publish and lookup take, and what half of them killed leaves.

A process runs this file as a worker: it serves its nodes and does what lines of JSON on its stdin ask for.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.network.dht_nodes import NUM_KEYS, key_of, percentile, signed
from swarm.base.ids import Address
from swarm.net.identity import Identity
from swarm.net.kademlia.dht import KademliaDht

NUM_PROCESSES, NODES_PER_PROCESS = 8, 8
TTL_S = 9.0


async def work(first_seed: int) -> None:
    """A worker: its nodes renew their records and do what lines of JSON on stdin ask for; ends with stdin."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    identities = [Identity.ephemeral(random.Random(first_seed + i)) for i in range(NODES_PER_PROCESS)]
    nodes = [KademliaDht(identity=identity) for identity in identities]
    renewals: list[asyncio.Task[None]] = []

    async def renew(index: int) -> None:
        while True:
            key = key_of(first_seed + index)
            await nodes[index].publish(key, signed(identities[index], key, TTL_S))
            await asyncio.sleep(TTL_S / 3)

    async def do(request: dict[str, Any]) -> Any:
        name = request["do"]
        if name == "start":
            for node in nodes:
                first = request["port"] or (node is not nodes[0] and nodes[0].address.port)
                await node.start([Address("127.0.0.1", first)] if first else [])
            return {"port": nodes[0].address.port, "peers": [identity.peer_id for identity in identities]}
        if name == "renew":
            renewals.extend(loop.create_task(renew(index)) for index in range(NODES_PER_PROCESS))
            return {}
        if name == "statistics":
            return [node.statistics() for node in nodes]
        node, identity = nodes[request["node"]], identities[request["node"]]
        if name == "publish":
            record = signed(identity, request["key"], 60.0)
            started = time.perf_counter()
            held = await node.publish(request["key"], record)
            return {"ms": (time.perf_counter() - started) * 1e3, "held": held}
        started = time.perf_counter()
        found = await node.lookup(request["key"])
        return {"ms": (time.perf_counter() - started) * 1e3, "peers": {r.peer: r.sequence for r in found}}

    while line := await lines.readline():
        print(json.dumps(await do(json.loads(line))), flush=True)
    for task in renewals:
        task.cancel()
    await asyncio.gather(*renewals, return_exceptions=True)
    await asyncio.gather(*(node.close() for node in nodes))


class Worker:
    def __init__(self, index: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(index * NODES_PER_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure_loopback() -> dict[str, Any]:
    """Publish and lookup among 64 nodes, then half of them killed at once."""
    rng = random.Random(6)
    workers = [Worker(index) for index in range(NUM_PROCESSES)]
    try:
        port = 0
        peers: list[list[str]] = []
        for worker in workers:
            reply = worker.ask(do="start", port=port)
            port = port or reply["port"]
            peers.append(reply["peers"])
        for worker in workers:
            worker.ask(do="renew")
        time.sleep(8)  # joining 64 nodes at once is a storm, and what is measured is the weather after it
        result = {"latency": _measure_latency(workers, rng)}
        result["half_killed"] = _measure_deaths(workers, peers, rng)
        return result
    finally:
        for worker in workers:
            worker.close()


def _measure_latency(workers: list[Worker], rng: random.Random) -> dict[str, Any]:
    publish_ms, lookup_ms, found = [], [], 0
    num_operations = 500
    for index in range(num_operations):
        key = f"latency {index}"
        publisher = rng.choice(workers).ask(do="publish", node=rng.randrange(NODES_PER_PROCESS), key=key)
        reader = rng.choice(workers).ask(do="lookup", node=rng.randrange(NODES_PER_PROCESS), key=key)
        publish_ms.append(publisher["ms"])
        lookup_ms.append(reader["ms"])
        found += len(reader["peers"]) == 1 and publisher["held"] >= 8
    return {
        "nodes": NUM_PROCESSES * NODES_PER_PROCESS,
        "operations": num_operations,
        "success": found / num_operations,
        "publish_p50_ms": statistics.median(publish_ms),
        "publish_p99_ms": percentile(publish_ms, 0.99),
        "lookup_p50_ms": statistics.median(lookup_ms),
        "lookup_p99_ms": percentile(lookup_ms, 0.99),
        "lookup_ms": lookup_ms,
        "publish_ms": publish_ms,
    }


def _measure_deaths(workers: list[Worker], peers: list[list[str]], rng: random.Random) -> dict[str, Any]:
    """SIGKILL every second process, then look for 1.6 lives of a record what the survivors are told."""
    victims = workers[1::2]
    survivors = workers[::2]
    living = {peer for group in peers[::2] for peer in group}
    members: dict[str, set[str]] = {}
    for index, peer in enumerate(peer for group in peers for peer in group):
        members.setdefault(key_of(index), set()).add(peer)
    killed_at = time.monotonic()
    for victim in victims:
        victim.process.kill()
    for victim in victims:
        victim.process.wait()
    lookup_ms: list[float] = []
    complete, last_dead_s, num_dead_returned = 0, 0.0, 0
    first_lookups_ms: list[float] = []
    while (now := time.monotonic() - killed_at) < 1.6 * TTL_S:
        key = key_of(rng.randrange(NUM_KEYS))
        reply = rng.choice(survivors).ask(do="lookup", node=rng.randrange(NODES_PER_PROCESS), key=key)
        lookup_ms.append(reply["ms"])
        if now < 2:
            first_lookups_ms.append(reply["ms"])
        complete += members[key] & living <= set(reply["peers"])
        if set(reply["peers"]) - living:
            num_dead_returned += 1
            last_dead_s = time.monotonic() - killed_at
        time.sleep(0.01)
    return {
        "lookups": len(lookup_ms),
        "success": complete / len(lookup_ms),
        "lookup_p50_ms": statistics.median(lookup_ms),
        "lookup_p99_ms": percentile(lookup_ms, 0.99),
        "lookup_max_ms": max(lookup_ms),
        "first_2s_p50_ms": statistics.median(first_lookups_ms),
        "ttl_s": TTL_S,
        "dead_last_returned_s": last_dead_s,
        "lookups_with_dead": num_dead_returned,
    }


if __name__ == "__main__":
    asyncio.run(work(first_seed=int(sys.argv[1])))
