"""Nodes and records that the DHT's measurements share. Knows none of them.

Real node code on datagrams in virtual time: nodes that joined, and the run around them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.net.identity import Identity
from swarm.net.kademlia.dht import KademliaDht
from swarm.testing.memory_datagrams import DatagramLoop
from swarm.wire.peer_records import PeerRecord, SignedRecord

NUM_KEYS = 16


def key_of(index: int) -> str:
    return f"{'b' * 64}/stage/{index % NUM_KEYS}"


def signed(identity: Identity, key: str, ttl_s: float) -> SignedRecord:
    return identity.sign_record(
        key,
        PeerRecord(
            peer=identity.peer_id,
            incarnation="0" * 16,
            role="stage",
            host="127.0.0.1",
            port=4000,
            ttl_s=ttl_s,
            sequence=identity.next_sequence(),
            stage=1,
            step=1000,
            state="serving",
        ),
    )


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def on_datagrams(main: Callable[[DatagramLoop], Coroutine[Any, Any, Any]], **links: Any) -> Any:
    loop = DatagramLoop(random.Random(5), **links)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main(loop))
    assert not loop.failures, loop.failures
    return result


async def spawn(loop: DatagramLoop, num_nodes: int, **options: Any) -> list[tuple[Identity, KademliaDht]]:
    """Nodes that each joined through a random earlier one."""
    rng = random.Random(num_nodes)
    spawned: list[tuple[Identity, KademliaDht]] = []
    for _ in range(num_nodes):
        identity = Identity.ephemeral(rng)
        node = KademliaDht(identity=identity, sock=loop.bound_socket(), **options)
        await node.start([rng.choice(spawned)[1].address] if spawned else [])
        spawned.append((identity, node))
    return spawned


async def close(spawned: list[tuple[Identity, Any]]) -> None:
    for _, node in spawned:
        await node.close()
