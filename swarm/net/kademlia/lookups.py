"""Reading from the DHT: nearest nodes and whole sets of records, page by page.

Owns how answers of several nodes are merged. Must not know sockets or upkeep; writes nothing anywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kademlia.node import Node
from kademlia.utils import digest

from swarm.base.ids import PeerId
from swarm.net.kademlia import wire
from swarm.net.kademlia.calls import ReplyFuture
from swarm.net.kademlia.crawl import NearestCrawl
from swarm.net.kademlia.record_storage import RecordVerifier
from swarm.net.kademlia.routing import plausible_for
from swarm.net.kademlia.rpc import RecordProtocol
from swarm.wire.peer_records import PeerRecord, RecordRefused, SignedRecord

#: A lookup reads the nearest nodes, this part of those that a record is stored at: each should hold it, some may be new.
_READ_PART = 2


class Merge:
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


class Lookups:
    """What one node asks others when somebody looks for something.

    Args:
        protocol: sends the questions; its storage is this node's own.
        verifier, counters: shared with the rest of the node.
        replication: nodes that hold a record.
        alpha: questions at once.
        slow_s: when an answer is late, if it is not so earlier by the round trips measured.
    """

    def __init__(
        self,
        protocol: RecordProtocol,
        *,
        verifier: RecordVerifier,
        counters: Counter[str],
        replication: int,
        alpha: int,
        slow_s: float,
    ) -> None:
        self._protocol = protocol
        self._storage = protocol.storage
        self._verifier = verifier
        self._counters = counters
        self._replication = replication
        self._alpha = alpha
        self._slow_s = slow_s

    async def nearest(self, target: Node, width: int) -> list[Node]:
        """The nodes nearest to `target` that answer, this one not among them."""
        return await self._crawl(
            target,
            width,
            ask=lambda node: self._protocol.call_find_node(node, target),
            read=lambda node, body: self._read(wire.unpack_nodes, body),
        )

    async def neighbours_of(self, asked: Node, target: Node) -> list[Node]:
        """The contacts of `asked` that are nearest to `target` and of use here; empty if it does not answer."""
        reply = await self._protocol.call_find_node(asked, target)
        nodes = self._read(wire.unpack_nodes, reply.body) if reply is not None else None
        return self._usable(asked, nodes or [])

    async def get(self, key: str) -> list[PeerRecord]:
        """The records under `key`, merged from this node and all that the crawl meets on its way to the nearest ones."""
        merge = self._merge_own(key)
        unread: dict[bytes, bytes] = {}

        def read(node: Node, body: Any) -> list[Node] | None:
            page: wire.Page | None = self._read(wire.unpack_page, body)
            if page is None:
                return None
            last = self._merge_page(merge, page, b"")
            if last is not None:
                unread[node.id] = last
            return page.nodes

        nearest = await self._crawl(
            Node(digest(key)),
            max(1, self._replication // _READ_PART),
            ask=lambda node: self._protocol.call_find_value(node, key, b"", with_nodes=True),
            read=read,
        )
        await asyncio.gather(*(self._read_on(node, key, unread[node.id], merge) for node in nearest if node.id in unread))
        return list(merge.records.values())

    # Parts of a lookup

    async def _crawl(
        self, target: Node, width: int, *, ask: Callable[[Node], ReplyFuture], read: Callable[[Node, Any], list[Node] | None]
    ) -> list[Node]:
        def read_usable(node: Node, body: Any) -> list[Node] | None:
            nodes = read(node, body)
            return None if nodes is None else self._usable(node, nodes)

        neighbors = self._protocol.router.find_neighbors(target)
        peers: list[Node] = [node for node in neighbors if not self._protocol.seems_dead(node)] or [*neighbors]
        crawl = NearestCrawl(self._protocol, target, peers, width, self._alpha, late_s=self._late_s, ask=ask, read=read_usable)
        nearest = await crawl.find()
        self._counters["crawls"] += 1
        self._counters["crawl_hops"] += crawl.num_hops
        return nearest

    def _late_s(self, node: Node) -> float:
        """However slow the links: asking one more costs little, and an answer that comes late still counts."""
        return min(self._slow_s, self._protocol.lost_after_s(node))

    def _usable(self, teller: Node, nodes: Sequence[Node]) -> list[Node]:
        """Those of `nodes` that can be asked and do not seem dead: others may not have noticed yet."""
        return [
            node
            for node in nodes
            if self._protocol.socket.reaches(node.ip)
            and plausible_for(node.ip, teller.ip)
            and not self._protocol.seems_dead(node)
        ]

    def _read(self, unpack: Callable[[Any], Any], body: Any) -> Any:
        """`body` unpacked, or None if it is malformed."""
        try:
            return unpack(body)
        except wire.Malformed as error:
            self._counters[f"dropped_{error}"] += 1
            return None

    def _merge_own(self, key: str) -> Merge:
        merge = Merge(key, self._verifier, self._counters)
        for held in self._storage.get(key, ()):
            merge.add(held.signed, self._storage.remaining_s(held))
        return merge

    def _merge_page(self, merge: Merge, page: wire.Page, after: bytes) -> bytes | None:
        """Merge a page; returns where to read on, None at the end or where the sender stopped making sense."""
        last = after
        for signed, remaining_s in page.records:
            peer = bytes.fromhex(signed.peer)
            if peer <= last or not merge.add(signed, remaining_s):
                return None
            last = peer
        return last if page.more else None

    async def _read_on(self, node: Node, key: str, after: bytes, merge: Merge) -> None:
        """Read one node's further pages; each moves `after` up, so this ends."""
        last: bytes | None = after
        while last is not None:
            reply = await self._protocol.call_find_value(node, key, last, with_nodes=False)
            page = self._read(wire.unpack_page, reply.body) if reply is not None else None
            if page is None or not page.records:
                return
            last = self._merge_page(merge, page, last)
