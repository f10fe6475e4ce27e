"""Kademlia nodes on a network in virtual time: what the tests of `test_kademlia_*.py` share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from swarm.net.identity import Identity
from swarm.net.kademlia.calls import UnknownNode
from swarm.net.kademlia.dht import KademliaDht
from swarm.net.kademlia.rpc import RecordProtocol
from swarm.testing.memory_datagrams import DatagramLoop
from swarm.wire.peer_records import PeerRecord, SignedRecord

KEY = "5" * 64 + "/stage/1"


def fabric() -> DatagramLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DatagramLoop)
    return loop


def run(main: Coroutine[Any, Any, None], **links: Any) -> None:
    """Run in virtual time; any exception that reached the loop's handler is a failure."""
    loops: list[DatagramLoop] = []

    def make() -> DatagramLoop:
        loops.append(DatagramLoop(random.Random(11), **links))
        return loops[0]

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(main)
    assert loops[0].failures == []


def make(seed: int, *, host: str = "10.0.0.1", port: int | None = None, **options: Any) -> KademliaDht:
    sock = fabric().bound_socket(host, port)
    return KademliaDht(identity=Identity.ephemeral(random.Random(seed)), sock=sock, **options)


async def spawn(num_nodes: int, *, first_seed: int = 0, **options: Any) -> list[KademliaDht]:
    nodes: list[KademliaDht] = []
    for seed in range(first_seed, first_seed + num_nodes):
        node = make(seed, **options)
        await node.start([nodes[0].address] if nodes else [])
        nodes.append(node)
    return nodes


async def close(*nodes: KademliaDht) -> None:
    for node in nodes:
        await node.close()


def protocol(node: KademliaDht) -> RecordProtocol:
    return node._running.protocol


def signed(seed: int, *, key: str = KEY, sequence: int = 1, ttl_s: float = 600.0, host: str = "h") -> SignedRecord:
    identity = Identity.ephemeral(random.Random(seed))
    return identity.sign_record(
        key,
        PeerRecord(peer=identity.peer_id, incarnation="0" * 16, role="stage", host=host, port=1, ttl_s=ttl_s, sequence=sequence),
    )


async def ask(asker: KademliaDht, asked: KademliaDht, name: str, *args: Any) -> Any:
    reply = await protocol(asker).request(UnknownNode(*asked.address), name, *args)
    return None if reply is None else reply.body
