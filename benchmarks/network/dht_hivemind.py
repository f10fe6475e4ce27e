"""hivemind's DHT for scale: store and get among so many nodes of one process, and how long a dead node's value lives.

Runs under an interpreter of its own that has hivemind, prints one JSON object, and is started by `benchmarks/network/dht.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

from hivemind.dht.node import DHTNode
from hivemind.utils import get_dht_time


async def measure(num_nodes: int, num_operations: int) -> dict[str, float]:
    """Milliseconds of store and get, each by a random node."""
    rng = random.Random(num_nodes)
    first = await DHTNode.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    peers = await first.get_visible_maddrs()
    nodes = [first]
    while len(nodes) < num_nodes:
        # Four at a time: each starts a daemon process.
        batch = min(4, num_nodes - len(nodes))
        nodes += await asyncio.gather(
            *(DHTNode.create(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) for _ in range(batch))
        )
    store_ms, get_ms, found = [], [], 0
    for index in range(num_operations):
        key, expires = f"key {index}", get_dht_time() + 300
        started = time.perf_counter()
        await rng.choice(nodes).store(key, b"x" * 200, expiration_time=expires)
        stored = time.perf_counter()
        value = await rng.choice(nodes).get(key)
        get_ms.append((time.perf_counter() - stored) * 1e3)
        store_ms.append((stored - started) * 1e3)
        found += value is not None
    await asyncio.gather(*(node.shutdown() for node in nodes))
    return {
        "nodes": num_nodes,
        "operations": num_operations,
        "success": found / num_operations,
        "store_p50_ms": statistics.median(store_ms),
        "store_p99_ms": sorted(store_ms)[int(0.99 * len(store_ms))],
        "get_p50_ms": statistics.median(get_ms),
        "get_p99_ms": sorted(get_ms)[int(0.99 * len(get_ms))],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2])))))
