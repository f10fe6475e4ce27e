"""Lookups in networks that lose, double and reorder datagrams: real node code in virtual time, its twin, real sockets."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.network.dht_nodes import close, key_of, on_datagrams, percentile, signed, spawn
from swarm.base.ids import Address
from swarm.net.dht import Dht
from swarm.net.identity import Identity
from swarm.net.kademlia.dht import KademliaDht
from swarm.testing.lossy_udp import LossyUdp
from swarm.testing.memory_datagrams import DatagramLoop
from swarm.testing.memory_dht import MemoryDht, MemoryDhtNetwork
from swarm.testing.virtual_time import run_virtual

LOSS = {"drop": 0.2, "duplicate": 0.1}


async def _lookups_under_loss(
    spawned: list[tuple[Identity, Any]], num_lookups: int, at_once: int, now: Callable[[], float]
) -> dict[str, Any]:
    """A lookup succeeds if it returns every peer under its key."""
    rng = random.Random(3)
    members: dict[str, set[str]] = {}

    async def publish(index: int, identity: Identity, node: Dht) -> None:
        await node.publish(key_of(index), signed(identity, key_of(index), 3600.0))
        members.setdefault(key_of(index), set()).add(identity.peer_id)

    for index, (identity, node) in enumerate(spawned):
        await publish(index, identity, node)

    async def look(_: int) -> tuple[bool, float]:
        key, started = rng.choice(list(members)), now()
        found = await rng.choice(spawned)[1].lookup(key)
        return {record.peer for record in found} == members[key], (now() - started) * 1e3

    outcomes: list[tuple[bool, float]] = []
    while len(outcomes) < num_lookups:
        outcomes += await asyncio.gather(*(look(index) for index in range(at_once)))
    lookup_ms = [ms for _, ms in outcomes]
    return {
        "nodes": len(spawned),
        "lookups": len(outcomes),
        "success": sum(ok for ok, _ in outcomes) / len(outcomes),
        "lookup_p50_ms": statistics.median(lookup_ms),
        "lookup_p99_ms": percentile(lookup_ms, 0.99),
    }


def measure_loss_datagrams() -> dict[str, Any]:
    async def main(loop: DatagramLoop) -> dict[str, Any]:
        spawned = await spawn(loop, 32)
        result = await _lookups_under_loss(spawned, 1000, 1, loop.time)
        await close(spawned)
        return result

    return on_datagrams(main, latency_s=(0.001, 0.05), **LOSS)


def measure_loss_twin() -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        rng = random.Random(4)
        network = MemoryDhtNetwork(rng, latency_s=(0.001, 0.05), **LOSS)
        spawned = []
        for index in range(32):
            identity = Identity.ephemeral(rng)
            node = MemoryDht(network, identity=identity, address=Address("10.0.0.1", 1 + index))
            await node.start([Address("10.0.0.1", 1)] if index else [])
            spawned.append((identity, node))
        await asyncio.sleep(60)
        result = await _lookups_under_loss(spawned, 1000, 1, asyncio.get_running_loop().time)
        await close(spawned)
        return result

    return run_virtual(main())


def measure_loss_sockets() -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        network = LossyUdp(random.Random(4), delay_s=0.02, **LOSS)
        rng = random.Random(8)
        spawned = []
        public: list[Address] = []
        for _ in range(16):
            identity = Identity.ephemeral(rng)
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
            public.append(await network.public_address_of(Address(*sock.getsockname())))
            node = KademliaDht(identity=identity, sock=sock)
            await node.start(public[:1] if len(public) > 1 else [])
            spawned.append((identity, node))
        await asyncio.sleep(2)
        result = await _lookups_under_loss(spawned, 1000, 10, time.monotonic)
        result["datagrams_lost"] = network.num_dropped / (network.num_dropped + network.num_passed)
        await close(spawned)
        network.close()
        return result

    return asyncio.run(main())
