"""One node of the DHT: finds nearest nodes, stores and merges records, and keeps its place in the network by itself.

Subclasses kademlia's `Server`. Owns the node's two tasks (upkeep and hand-over); must not know identities, what the
records say, or how the socket came to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kademlia.network import Server
from kademlia.node import Node
from kademlia.utils import digest

from swarm.base.ids import Address, PeerId
from swarm.net import kademlia_wire as wire
from swarm.net.kademlia_crawl import NearestCrawl
from swarm.net.kademlia_routing import Contact, plausible_for
from swarm.net.kademlia_rpc import RecordProtocol, RpcTiming, Stranger
from swarm.net.record_storage import RecordStorage, RecordVerifier
from swarm.wire.records import MAX_TTL_S, PeerRecord, RecordRefused, SignedRecord

log = logging.getLogger(__name__)

#: Of the holders of a record, so many of the nearest to its key hand it on to newcomers.
_NUM_CARERS = 2
#: Stores or pings in flight at once for upkeep.
_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTiming:
    """How a node keeps its place."""

    rpc: RpcTiming = field(default_factory=RpcTiming)
    #: Seconds of silence after which a crawl goes on without a node.
    slow_s: float = 0.2
    #: Seconds between refreshes; a record that nobody renewed for so long is handed on.
    refresh_s: float = 30.0
    #: Seconds between attempts to find the first contact.
    bootstrap_retry_s: float = 0.5


class _Merge:
    """Newest valid record of each peer under one key, whoever sent it."""

    def __init__(self, key: str, verifier: RecordVerifier, counters: Counter[str]) -> None:
        self.records: dict[PeerId, PeerRecord] = {}
        self._key = key
        self._verifier = verifier
        self._counters = counters

    def add(self, signed: SignedRecord, remaining_s: float) -> bool:
        """False if the record is no good: its sender needs no more attention."""
        try:
            record = self._verifier.verify(self._key, signed)
        except RecordRefused as error:
            self._counters[f"lookup_refused_{error.reason}"] += 1
            return False
        old = self.records.get(record.peer)
        if remaining_s > 0 and (old is None or record.sequence > old.sequence):
            self.records[record.peer] = record
        return True


class RecordServer(Server):
    """A Kademlia node for signed records.

    Args:
        node_id: 20 bytes.
        replication: nodes that a record is stored at and asked for.
        storage, verifier, counters: shared with the protocol.
        rng: spreads refreshes in time; no safety rests on it.
    """

    protocol: RecordProtocol
    storage: RecordStorage

    def __init__(
        self,
        node_id: bytes,
        *,
        storage: RecordStorage,
        verifier: RecordVerifier,
        counters: Counter[str],
        timing: ServerTiming,
        replication: int,
        rng: random.Random,
    ) -> None:
        super().__init__(node_id=node_id, storage=storage)
        self._verifier = verifier
        self._counters = counters
        self._timing = timing
        self._replication = replication
        self._rng = rng
        self._bootstrap_addresses: list[Address] = []
        self._newcomers: asyncio.Queue[Contact] = asyncio.Queue(maxsize=64)
        self._tasks: list[asyncio.Task[None]] = []

    def _create_protocol(self) -> RecordProtocol:
        return RecordProtocol(
            self.node, self.storage, self.ksize,
            timing=self._timing.rpc, counters=self._counters, on_contact=self._on_contact,
        )

    async def open(self, sock: socket.socket, bootstrap: Sequence[Address]) -> None:
        """Serve on `sock`, which this node closes; join through `bootstrap` now, or later if none of it answers."""
        loop = asyncio.get_running_loop()
        self._bootstrap_addresses = list(bootstrap)
        self.transport, self.protocol = await loop.create_datagram_endpoint(self._create_protocol, sock=sock)
        self._tasks = [
            loop.create_task(self._forever(self._keep_up), name="dht upkeep"),
            loop.create_task(self._forever(self._hand_over_to_newcomers), name="dht hand-over"),
        ]
        if bootstrap:
            await self.bootstrap(bootstrap)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.protocol is not None:
            self.protocol.close()
            self.transport.abort()

    async def bootstrap(self, addrs: Sequence[Address]) -> list[Node]:
        """Make contacts of those of `addrs` that answer, and of the nodes nearest to this one; returns the latter."""
        resolved = await asyncio.gather(*(self._resolve(address) for address in addrs))
        nodes = list({tuple(node): node for group in resolved for node in group}.values())
        await asyncio.gather(*(self.protocol.call_ping(node) for node in nodes))
        return await self._nearest(self.node, self.ksize)

    async def _resolve(self, address: Address) -> list[Node]:
        """Every address behind a host name that this socket can send to; none if the name is not known (yet)."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError):
            ip = str(ipaddress.ip_address(address.host))
            return [Stranger(ip, address.port)] if self.protocol.can_send_to(ip) else []
        try:
            async with asyncio.timeout(2 * self._timing.rpc.timeout_s):
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)
        except OSError:  # a TimeoutError is one
            self._counters["unresolved_hosts"] += 1
            return []
        ips = {str(info[4][0]).partition("%")[0]: None for info in found}
        return [Stranger(ip, address.port) for ip in ips if self.protocol.can_send_to(ip)]

    # Lookups

    async def _nearest(self, target: Node, width: int) -> list[Node]:
        """The nodes nearest to `target` that answer, this one not among them."""
        crawl = self._crawl(
            target, width,
            ask=lambda node: self.protocol.call_find_node(node, target),
            read=lambda node, body: self._read(node, wire.unpack_nodes, body),
        )
        return await crawl.find()

    def _crawl(self, target: Node, width: int, *, ask: Any, read: Any) -> NearestCrawl:
        def read_nodes(node: Node, body: Any) -> list[Node] | None:
            nodes = read(node, body)
            if nodes is None:
                return None
            return [
                other for other in nodes if self.protocol.can_send_to(other.ip) and plausible_for(other.ip, node.ip)
            ]

        peers = self.protocol.router.find_neighbors(target)
        return NearestCrawl(
            self.protocol, target, peers, width, self.alpha, slow_s=self._timing.slow_s, ask=ask, read=read_nodes
        )

    def _read(self, node: Node, unpack: Any, body: Any) -> Any:
        """`body` unpacked, or None if it is malformed."""
        try:
            return unpack(body)
        except wire.Malformed as error:
            self._counters[f"dropped_{error}"] += 1
            return None

    async def set(self, key: str, value: SignedRecord) -> int:
        """Store `value` here and at the nearest nodes; returns how many hold it."""
        if self.storage.put(key, value, MAX_TTL_S):
            return 0
        holders = await self._nearest(Node(digest(key)), self._replication)
        held = self.storage.find(key, value.peer)
        if held is None or held.signed != value:
            return 0  # it expired, or a newer one came, while the nodes were looked for
        left_s = self.storage.remaining_s(held)
        return 1 + await self._store([(node, key, value, left_s) for node in holders])

    async def _store(self, stores: Sequence[tuple[Node, str, SignedRecord, float]]) -> int:
        """Send each record to its node; returns how many of them are held now."""
        futures = [self.protocol.call_store(node, key, (signed, left_s)) for node, key, signed, left_s in stores]
        replies = await asyncio.gather(*futures)
        return sum(reply is not None and reply.body == "" for reply in replies)

    async def get(self, key: str) -> list[PeerRecord]:
        """The records under `key`, merged from this node and all that the crawl meets."""
        merge = _Merge(key, self._verifier, self._counters)
        for held in self.storage.get(key, ()):
            merge.add(held.signed, self.storage.remaining_s(held))
        unread: dict[bytes, bytes] = {}

        def read(node: Node, body: Any) -> list[Node] | None:
            page: wire.Page | None = self._read(node, wire.unpack_page, body)
            if page is None:
                return None
            last = self._merge_page(merge, page, b"")
            if last is not None:
                unread[node.id] = last
            return page.nodes

        crawl = self._crawl(
            Node(digest(key)), self._replication,
            ask=lambda node: self.protocol.call_find_value(node, key, b"", with_nodes=True), read=read,
        )
        nearest = await crawl.find()
        await asyncio.gather(
            *(self._read_on(node, key, unread[node.id], merge) for node in nearest if node.id in unread)
        )
        return list(merge.records.values())

    def _merge_page(self, merge: _Merge, page: wire.Page, after: bytes) -> bytes | None:
        """Merge a page; returns where to read on, None at the end or where the sender stopped making sense."""
        last = after
        for signed, remaining_s in page.records:
            peer = bytes.fromhex(signed.peer)
            if peer <= last or not merge.add(signed, remaining_s):
                return None
            last = peer
        return last if page.more else None

    async def _read_on(self, node: Node, key: str, after: bytes, merge: _Merge) -> None:
        """Read one node's further pages; each moves `after` up, so this ends."""
        last: bytes | None = after
        while last is not None:
            reply = await self.protocol.call_find_value(node, key, last, with_nodes=False)
            page = self._read(node, wire.unpack_page, reply.body) if reply is not None else None
            if page is None or not page.records:
                return
            last = self._merge_page(merge, page, last)

    # Upkeep

    async def _forever(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The top of a task: what escapes `work` is our own fault, is seen and counted, and does not end discovery."""
        while True:
            try:
                await work()
            except Exception:
                self._counters["failed_tasks"] += 1
                log.exception("the DHT's %s failed and starts again", work.__name__)
            await asyncio.sleep(self._timing.bootstrap_retry_s)

    async def _keep_up(self) -> None:
        """Look for a first contact for ever, probe those not heard of lately, and refresh now and then."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + self._refresh_delay_s()
        while True:
            lonely = not self.protocol.router.contacts()
            await asyncio.sleep(self._timing.bootstrap_retry_s if lonely else self._timing.rpc.timeout_s)
            if lonely:
                await self._rejoin()
            quiet_since = loop.time() - self._timing.refresh_s
            await self._ping([
                contact for contact in self.protocol.router.contacts()
                if contact.misses or contact.seen_at < quiet_since
            ])
            if loop.time() >= refresh_at:
                await self._refresh_table()
                refresh_at = loop.time() + self._refresh_delay_s()

    def _refresh_delay_s(self) -> float:
        return self._timing.refresh_s * self._rng.uniform(0.8, 1.2)

    async def _rejoin(self) -> None:
        """Ask the bootstrap addresses, and some that fell silent: a partition may have healed."""
        lost = list(self.protocol.lost)
        chosen = self._rng.sample(lost, min(4, len(lost)))
        known = {(contact.ip, contact.port) for contact in self.protocol.router.contacts()}
        addresses = [
            address for address in (*self._bootstrap_addresses, *(Address(*other) for other in chosen))
            if tuple(address) not in known
        ]
        if addresses:
            await self.bootstrap(addresses)

    async def _ping(self, nodes: Sequence[Node]) -> None:
        for start in range(0, len(nodes), _BATCH):
            await asyncio.gather(*(self.protocol.call_ping(node) for node in nodes[start : start + _BATCH]))

    async def _refresh_table(self) -> None:
        """Rejoin, walk to this node and to a random one, hand on what nobody renewed."""
        await self._rejoin()
        await self._nearest(self.node, self.ksize)
        await self._nearest(Node(self._rng.randbytes(wire.NODE_ID_BYTES)), self.ksize)
        await self._republish()

    async def _republish(self) -> None:
        by_key: dict[str, list[SignedRecord]] = {}
        for key, held in self.storage.iter_older_than(self._timing.refresh_s):
            by_key.setdefault(key, []).append(held.signed)
        for key, records in by_key.items():
            nearest = await self._nearest(Node(digest(key)), self._replication)
            if self._cares_for(key, nearest):
                await self._hand_over([(node, key, signed) for signed in records for node in nearest])

    def _cares_for(self, key: str, others: Sequence[Node]) -> bool:
        """Whether this node is among the first of `others` and itself to look after `key`."""
        target = Node(digest(key))
        own = self.node.distance_to(target)
        return sum(other.distance_to(target) < own for other in others) < _NUM_CARERS

    def _on_contact(self, contact: Contact) -> None:
        if self._newcomers.full():
            self._counters["hand_overs_skipped"] += 1
        else:
            self._newcomers.put_nowait(contact)

    async def _hand_over_to_newcomers(self) -> None:
        """Give each new contact the records that it should hold; this node's own go to everyone near their key."""
        while True:
            contact = await self._newcomers.get()
            router = self.protocol.router
            stores = []
            for key in {key for key, _ in self.storage}:
                target = Node(digest(key))
                nearest = router.find_neighbors(target, self._replication)
                if all(contact.id != node.id for node in nearest):
                    continue
                cares = self._cares_for(key, [node for node in nearest if node.id != contact.id])
                stores += [
                    (contact, key, held.signed) for held in self.storage.get(key, ())
                    if cares or held.record.peer == self.node.id.hex()
                ]
            await self._hand_over(stores)

    async def _hand_over(self, stores: Sequence[tuple[Node, str, SignedRecord]]) -> None:
        """Store records elsewhere with what is left of their lives, counted when each batch is sent."""
        for start in range(0, len(stores), _BATCH):
            batch = []
            for node, key, signed in stores[start : start + _BATCH]:
                if (held := self.storage.find(key, signed.peer)) is not None and held.signed == signed:
                    batch.append((node, key, signed, self.storage.remaining_s(held)))
            self._counters["handed_over"] += await self._store(batch)
