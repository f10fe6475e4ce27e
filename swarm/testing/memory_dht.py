"""The discovery interface in virtual time: nodes with their own replicas, over a seeded network that loses and delays.

Nobody is omniscient here: a node knows the contacts that it was told of and the records that reached it, and both go
stale as they would on a real network. Owns the simulated links; must not know sockets or wall time.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import umsgpack

from swarm.base.ids import Address, PeerId
from swarm.net.dht import Dht
from swarm.net.identity import Identity
from swarm.net.kademlia.record_storage import RecordStorage, RecordVerifier, StorageLimits
from swarm.wire.peer_records import MAX_TTL_S, PeerRecord, RecordRefused, SignedRecord

_MAX_MISSES = 3
_MAX_LOST = 64
_TRANSMISSIONS = 5


class MemoryDhtNetwork:
    """The links between `MemoryDht` nodes.

    Args:
        rng: decides delays and losses; the same seed gives the same run.
        latency_s: one way, drawn evenly between the two.
        drop: probability that one message is lost, each way.
        duplicate: probability that a request arrives a second time, later.
    """

    def __init__(
        self, rng: random.Random, *, latency_s: tuple[float, float] = (0.005, 0.02), drop: float = 0.0, duplicate: float = 0.0
    ) -> None:
        self.rng = rng
        self.verifier = RecordVerifier(capacity=65536)
        self._latency_s = latency_s
        self._drop = drop
        self._duplicate = duplicate
        self._nodes: dict[Address, MemoryDht] = {}
        #: Nodes reach those of the same island; island 0 is the mainland.
        self._island: dict[Address, int] = {}
        self._num_islands = 0

    def isolate(self, *addresses: Address) -> None:
        """Cut these nodes off from all others, but not from each other."""
        self._num_islands += 1
        self._island.update(dict.fromkeys(addresses, self._num_islands))

    def heal(self, addresses: Iterable[Address] | None = None) -> None:
        """Undo `isolate` for these, or for all."""
        for address in list(self._island) if addresses is None else addresses:
            self._island.pop(address, None)

    def attach(self, address: Address, node: MemoryDht) -> None:
        """Let `node` be found at `address`."""
        self._nodes[address] = node

    def detach(self, address: Address, node: MemoryDht) -> None:
        """Let `node` be found at `address` no more."""
        if self._nodes.get(address) is node:
            del self._nodes[address]

    async def exchange(self, source: Address, target: Address, request: bytes, timeout_s: float) -> bytes | None:
        """Deliver `request` and bring back the reply; None if either was lost, each time, within `timeout_s`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        for attempt in range(1, _TRANSMISSIONS + 1):
            resend_at = started + timeout_s * attempt / _TRANSMISSIONS
            if await self._route_trips(source, target) and (node := self._nodes.get(target)) is not None:
                reply = node.serve(request)
                if self._duplicate and self.rng.random() < self._duplicate:
                    loop.call_later(self.rng.uniform(*self._latency_s), node.serve, request)
                if await self._route_trips(target, source):
                    return reply
            await asyncio.sleep(max(0.0, resend_at - loop.time()))
        return None

    async def _route_trips(self, source: Address, target: Address) -> bool:
        await asyncio.sleep(self.rng.uniform(*self._latency_s))
        lost = self.rng.random() < self._drop
        return not lost and self._island.get(source, 0) == self._island.get(target, 0)


class MemoryDht(Dht):
    """A DHT node whose messages cross a `MemoryDhtNetwork`.

    Args:
        network: the links.
        identity: its peer id is the node id.
        address: where others reach this node.
        rpc_timeout_s: seconds until a request fails; it is sent five times within.
        refresh_s: seconds between exchanges of contacts with another node.
        bootstrap_retry_s: seconds between attempts to find the first contact.
        replication: nodes that a record is stored at and asked for.
        limits: bounds of what this node stores for others.
        clock: monotonic seconds, for the lives of records; None is the running loop's time.
    """

    def __init__(
        self,
        network: MemoryDhtNetwork,
        *,
        identity: Identity,
        address: Address,
        rpc_timeout_s: float = 1.0,
        refresh_s: float = 5.0,
        bootstrap_retry_s: float = 0.5,
        replication: int = 8,
        limits: StorageLimits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._network = network
        self._peer = identity.peer_id
        self.address = address
        self._rpc_timeout_s = rpc_timeout_s
        self._refresh_s = refresh_s
        self._bootstrap_retry_s = bootstrap_retry_s
        self._replication = replication
        self._limits = limits or StorageLimits()
        self._clock = clock
        self._counters: Counter[str] = Counter()
        self._bootstrap: list[Address] = []
        #: Those who answered longest ago come first.
        self._contacts: dict[PeerId, Address] = {}
        self._misses: Counter[PeerId] = Counter()
        self._lost: dict[Address, None] = {}
        self._newcomers: dict[PeerId, None] = {}
        self._storage: RecordStorage | None = None
        self._upkeep: asyncio.Task[None] | None = None

    async def start(self, bootstrap: Sequence[Address]) -> None:
        """Join through the bootstrap nodes."""
        loop = asyncio.get_running_loop()
        self._storage = RecordStorage(
            now=self._clock or loop.time, verifier=self._network.verifier, limits=self._limits, counters=self._counters
        )
        self._bootstrap = [address for address in bootstrap if address != self.address]
        self._network.attach(self.address, self)
        self._upkeep = loop.create_task(self._keep_up(), name="memory dht upkeep")
        await self._join(self._bootstrap)

    async def publish(self, key: str, record: SignedRecord) -> int:
        """Store a record at the nodes that are nearest to its key."""
        try:
            self._network.verifier.verify(key, record)
        except RecordRefused as error:
            raise ValueError(str(error)) from None
        if self._records.put(key, record, MAX_TTL_S):
            return 0
        held = await asyncio.gather(*(self._store(peer, key, record) for peer in self._nearest(key)))
        return 1 + sum(held)

    async def lookup(self, key: str) -> list[PeerRecord]:
        """The records of a key, from the nodes that are nearest to it."""
        return await self._read(key, "find", key)

    async def _read(self, key: str, kind: str, *args: Any) -> list[PeerRecord]:
        """Ask the nearest nodes and merge what they and this node hold."""
        newest: dict[PeerId, PeerRecord] = {}
        replies = await asyncio.gather(*(self._call(peer, kind, *args) for peer in self._nearest(key)))
        for reply in [*replies, self._answer(kind, args)]:
            for *parts, remaining_s in reply or ():
                try:
                    record = self._network.verifier.verify(key, SignedRecord(*parts))
                except RecordRefused as error:
                    self._counters[f"lookup_refused_{error.reason}"] += 1
                    continue
                old = newest.get(record.peer)
                if remaining_s > 0 and (old is None or record.sequence > old.sequence):
                    newest[record.peer] = record
        return list(newest.values())

    def contacts(self) -> list[Address]:
        """The addresses of the nodes that it knows."""
        return [self.address, *(address for peer, address in self._contacts.items() if not self._misses[peer])]

    def statistics(self) -> dict[str, int]:
        """Counters for the status page."""
        return {**self._counters, "records": self._records.num_records, "contacts": len(self._contacts)}

    async def close(self) -> None:
        """Leave the network."""
        self._network.detach(self.address, self)
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
            if not self._upkeep.cancelled():
                self._upkeep.result()

    @property
    def _records(self) -> RecordStorage:
        if self._storage is None:
            raise RuntimeError("start the DHT node first")
        return self._storage

    def _nearest(self, key: str) -> list[PeerId]:
        target = int.from_bytes(hashlib.sha1(key.encode()).digest(), "big")
        healthy = [peer for peer in self._contacts if not self._misses[peer]]
        return sorted(healthy or self._contacts, key=lambda peer: int(peer, 16) ^ target)[: self._replication]

    # Exchanges: `[kind, sender's id, host, port, ...]`, answered with a value; all in msgpack, as on a real wire.

    def serve(self, request: bytes) -> bytes:
        """The reply to another node's request."""
        kind, peer, host, port, *args = umsgpack.unpackb(request)
        address = Address(host, port)
        self._learn(peer, address)
        reply: Any
        if kind == "hello":
            reply = [[self._peer, *self.address], *([other, *home] for other, home in self._contacts.items())]
        elif kind == "store":
            key, *parts, remaining_s = args
            reply = self._records.put(key, SignedRecord(*parts), remaining_s, str(address))
        else:
            reply = self._answer(kind, args)
        packed: bytes = umsgpack.packb(reply)
        return packed

    def _answer(self, kind: str, args: Sequence[Any]) -> list[list[Any]]:
        """Records under a key."""
        held = self._records.get(args[0], [])
        return [[one.signed.public_key, one.signed.payload, one.signed.signature, self._records.remaining_s(one)] for one in held]

    async def _ask(self, address: Address, kind: str, *args: Any) -> Any:
        request = umsgpack.packb([kind, self._peer, *self.address, *args])
        reply = await self._network.exchange(self.address, address, request, self._rpc_timeout_s)
        return None if reply is None else umsgpack.unpackb(reply)

    async def _call(self, peer: PeerId, kind: str, *args: Any) -> Any:
        """Ask a contact; it is dropped after several misses in a row."""
        address = self._contacts.get(peer)
        if address is None:
            return None
        reply = await self._ask(address, kind, *args)
        if self._contacts.get(peer) != address:
            return reply
        if reply is not None:
            self._misses.pop(peer, None)
            self._contacts[peer] = self._contacts.pop(peer)
            return reply
        self._misses[peer] += 1
        if self._misses[peer] >= _MAX_MISSES:
            self._forget(peer)
        return None

    async def _store(self, peer: PeerId, key: str, signed: SignedRecord) -> bool:
        held = self._records.find(key, signed.peer)
        if held is None or held.signed != signed:
            return False
        parts = (signed.public_key, signed.payload, signed.signature)
        return await self._call(peer, "store", key, *parts, self._records.remaining_s(held)) == ""

    def _learn(self, peer: PeerId, address: Address) -> None:
        if peer != self._peer and self._contacts.get(peer) != address:
            self._contacts[peer] = address
            self._misses.pop(peer, None)
            self._lost.pop(address, None)
            self._newcomers[peer] = None

    def _forget(self, peer: PeerId) -> None:
        self._lost[self._contacts.pop(peer)] = None
        self._misses.pop(peer, None)
        self._newcomers.pop(peer, None)
        while len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]

    async def _join(self, addresses: Sequence[Address]) -> None:
        """Say hello to `addresses` and to everyone that they name, who thereby learn of this node."""
        replies = await asyncio.gather(*(self._ask(address, "hello") for address in addresses))
        for reply in replies:
            if reply is not None:
                self._learn(reply[0][0], Address(*reply[0][1:]))
        await self._meet(replies)

    async def _meet(self, greetings: Sequence[Any]) -> None:
        """Say hello to the unknown nodes that answers to a hello name; those that answer become contacts."""
        named = {
            peer: Address(host, port)
            for greeting in greetings
            for peer, host, port in greeting or ()
            if peer not in self._contacts and peer != self._peer and Address(host, port) not in self._lost
        }
        replies = await asyncio.gather(*(self._ask(address, "hello") for address in named.values()))
        for (peer, address), reply in zip(named.items(), replies, strict=True):
            if reply is not None and reply[0][0] == peer:
                self._learn(peer, address)

    async def _keep_up(self) -> None:
        """Look for a first contact for ever; else probe the silent, exchange contacts, hand records to newcomers."""
        while True:
            lonely = not self._contacts
            await asyncio.sleep(self._bootstrap_retry_s if lonely else self._refresh_s * self._network.rng.uniform(0.8, 1.2))
            known = set(self._contacts.values())
            tried = [address for address in self._bootstrap if address not in known]
            tried += self._sample([address for address in self._lost if address not in known], 4)
            await self._join(tried)
            probed = dict.fromkeys([*self._misses, *itertools.islice(self._contacts, 2)])
            await self._meet(await asyncio.gather(*(self._call(peer, "hello") for peer in probed)))
            await self._hand_over()

    def _sample(self, addresses: list[Address], most: int) -> list[Address]:
        return self._network.rng.sample(addresses, min(most, len(addresses)))

    async def _hand_over(self) -> None:
        newcomers, self._newcomers = self._newcomers, {}
        for key, held in self._records:
            near = self._nearest(key)
            await asyncio.gather(*(self._store(peer, key, held.signed) for peer in newcomers if peer in near))
