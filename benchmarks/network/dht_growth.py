"""The DHT's node code in virtual time: questions that a lookup takes as nodes grow to 1,000."""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.network.dht_nodes import close, on_datagrams, signed, spawn
from swarm.net.kademlia.server import ServerTiming
from swarm.testing.memory_datagrams import DatagramLoop


def measure_hops(num_nodes: int, num_lookups: int = 150) -> dict[str, Any]:
    """The real node code in virtual time: questions in a row until the nearest node has answered."""

    async def main(loop: DatagramLoop) -> dict[str, Any]:
        spawned = await spawn(loop, num_nodes, timing=ServerTiming(refresh_s=3600.0))
        rng = random.Random(1)
        hops, questions, milliseconds, found = [], [], [], 0
        for index in range(num_lookups):
            key = f"hops {index}"
            identity, writer = rng.choice(spawned)
            await writer.publish(key, signed(identity, key, 600.0))
            _, reader = rng.choice(spawned)
            before, started = reader.statistics(), loop.time()
            found += len(await reader.lookup(key)) == 1
            after = reader.statistics()
            milliseconds.append((loop.time() - started) * 1e3)
            hops.append(after["crawl_hops"] - before.get("crawl_hops", 0))
            questions.append(after["asked_find_value"] - before.get("asked_find_value", 0))
        contacts = [node.statistics()["contacts"] for _, node in spawned]
        await close(spawned)
        return {
            "nodes": num_nodes,
            "lookups": num_lookups,
            "success": found / num_lookups,
            "hops_mean": statistics.mean(hops),
            "hops_max": max(hops),
            "questions_mean": statistics.mean(questions),
            "lookup_p50_virtual_ms": statistics.median(milliseconds),
            "contacts_mean": statistics.mean(contacts),
        }

    return on_datagrams(main)
