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

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kademlia.network import Server
from kademlia.node import Node
from kademlia.utils import digest

from swarm.base.ids import Address, peer_id_of
from swarm.net.kademlia import wire
from swarm.net.kademlia.calls import RpcTiming, UnknownNode
from swarm.net.kademlia.lookups import Lookups
from swarm.net.kademlia.record_storage import RecordStorage, RecordVerifier
from swarm.net.kademlia.routing import Contact
from swarm.net.kademlia.rpc import RecordProtocol
from swarm.wire.peer_records import MAX_TTL_S, PeerRecord, SignedRecord

log = logging.getLogger(__name__)

#: Of the holders of a record, so many of the nearest to its key hand it on to newcomers.
_NUM_CARERS = 2
_MAX_UNASKED = 256
#: New contacts asked at once: one of many that join together is as good as another.
_MAX_ASKED = 4
#: Stores in flight at once for upkeep.
_BATCH = 16
_PINGS = 64
#: While some contacts are silent, others are probed after so many time-outs without a word.
_QUIET_TIMEOUTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTiming:
    """How a node keeps its place."""

    rpc: RpcTiming = field(default_factory=RpcTiming)
    #: Most seconds between refreshes; a record that nobody renewed for so long is handed on.
    refresh_s: float = 30.0
    #: Seconds between attempts to find the first contact.
    bootstrap_retry_s: float = 0.5

    @property
    def slow_s(self) -> float:
        """Most seconds of silence after which a crawl asks another node in the place of one."""
        return min(0.2, self.rpc.timeout_s / 4)


class RecordServer(Server):
    """A Kademlia node for signed records.

    Args:
        private_key: its public half determines the node id.
        replication: nodes that a record is stored at and asked for.
        storage, verifier, counters: shared with the protocol.
        rng: spreads refreshes in time; no safety rests on it.
        on_refresh: called after every refresh of the contacts.
    """

    protocol: RecordProtocol
    storage: RecordStorage
    #: Exists from `open` on.
    lookups: Lookups

    def __init__(
        self,
        private_key: Ed25519PrivateKey,
        *,
        storage: RecordStorage,
        verifier: RecordVerifier,
        counters: Counter[str],
        timing: ServerTiming,
        replication: int,
        rng: random.Random,
        on_refresh: Callable[[], None] = lambda: None,
    ) -> None:
        node_id = bytes.fromhex(peer_id_of(private_key.public_key().public_bytes_raw()))
        super().__init__(node_id=node_id, storage=storage)
        self._private_key = private_key
        self._verifier = verifier
        self._counters = counters
        self._timing = timing
        self._replication = replication
        self._rng = rng
        self._on_refresh = on_refresh
        self._bootstrap_addresses: list[Address] = []
        self._newcomers: asyncio.Queue[Contact] = asyncio.Queue(maxsize=64)
        #: New contacts not yet asked for nodes that this one should know, and when to ask them.
        self._unasked: dict[Contact, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._greetings: set[asyncio.Task[bool]] = set()

    def _create_protocol(self) -> RecordProtocol:
        return RecordProtocol(
            self.node,
            self.storage,
            self.ksize,
            private_key=self._private_key,
            timing=self._timing.rpc,
            counters=self._counters,
            on_contact=self._on_contact,
        )

    async def open(self, sock: socket.socket, bootstrap: Sequence[Address], remembered: Sequence[Address] = ()) -> None:
        """Serve on `sock`, which this node closes; join through `bootstrap` now, or later if none of it answers.

        Args:
            remembered: contacts of an earlier life; asked too, and forgotten as others are if they stay silent.
        """
        loop = asyncio.get_running_loop()
        self._bootstrap_addresses = list(bootstrap)
        self.transport, self.protocol = await loop.create_datagram_endpoint(self._create_protocol, sock=sock)
        self.lookups = Lookups(
            self.protocol,
            verifier=self._verifier,
            counters=self._counters,
            replication=self._replication,
            alpha=self.alpha,
            slow_s=self._timing.slow_s,
        )
        self.protocol.lost.update(dict.fromkeys((host, port) for host, port in remembered))
        self._tasks = [
            loop.create_task(self._forever(self._keep_up), name="dht upkeep"),
            loop.create_task(self._forever(self._hand_over_to_newcomers), name="dht hand-over"),
        ]
        if addresses := dict.fromkeys((*bootstrap, *remembered)):
            await self.bootstrap(list(addresses))

    async def close(self) -> None:
        """End the upkeep and every request, and close the socket."""
        tasks = [*self._tasks, *self._greetings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        if self.protocol is not None:
            self.protocol.close()
            self.transport.abort()

    async def bootstrap(self, addrs: Sequence[Address]) -> list[Node]:
        """Make contacts of those of `addrs` that answer, and of the nodes nearest to this one; returns the latter.

        Goes on at the first answer; the silent ones are waited for meanwhile.
        """
        waiting = {asyncio.create_task(self._greet(address), name=f"dht greeting {address}") for address in addrs}
        self._greetings |= waiting
        for task in waiting:
            task.add_done_callback(self._greeting_ended)
        joined = False
        while waiting and not joined:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            joined = any(not task.cancelled() and task.exception() is None and task.result() for task in done)
        return await self.lookups.nearest(self.node, self.ksize)

    async def _greet(self, address: Address) -> bool:
        """Ping what is behind one address now (names are resolved each time); True if anyone answered."""
        nodes = await self._resolve(address)
        replies = await asyncio.gather(*(self.protocol.call_ping(node) for node in nodes))
        return any(reply is not None and reply.node_id != self.node.id for reply in replies)

    def _greeting_ended(self, task: asyncio.Task[bool]) -> None:
        self._greetings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._counters["failed_tasks"] += 1
            log.error("the %s failed", task.get_name(), exc_info=error)

    async def _resolve(self, address: Address) -> list[Node]:
        """Every address behind a host name that this socket can send to; none if the name is not known (yet)."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError):
            ip = str(ipaddress.ip_address(address.host))
            return [UnknownNode(ip, address.port)] if self.protocol.socket.reaches(ip) else []
        try:
            async with asyncio.timeout(2 * self._timing.rpc.timeout_s):
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)
        except OSError:  # a TimeoutError is one
            self._counters["unresolved_hosts"] += 1
            return []
        ips = {str(info[4][0]).partition("%")[0]: None for info in found}
        return [UnknownNode(ip, address.port) for ip in ips if self.protocol.socket.reaches(ip)]

    # Records

    async def set(self, key: str, value: SignedRecord) -> int:
        """Store `value` here and at the nearest nodes; returns how many hold it."""
        if self.storage.put(key, value, MAX_TTL_S):
            return 0
        holders = await self.lookups.nearest(Node(digest(key)), self._replication)
        held = self.storage.find(key, value.peer)
        if held is None or held.signed != value:
            return 0  # it expired, or a newer one came, while the nodes were looked for
        left_s = self.storage.remaining_s(held)
        return 1 + await self._store([(node, key, value, left_s) for node in holders])

    async def get(self, key: str) -> list[PeerRecord]:
        """The records under `key`, of this node and the nearest others."""
        return await self.lookups.get(key)

    async def _store(self, stores: Sequence[tuple[Node, str, SignedRecord, float]]) -> int:
        """Send each record to its node; returns how many of them are held now."""
        futures = [self.protocol.call_store(node, key, (signed, left_s)) for node, key, signed, left_s in stores]
        replies = await asyncio.gather(*futures)
        return sum(reply is not None and reply.body == "" for reply in replies)

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
        num_dropped = self._counters["dropped_contacts"]
        while True:
            lonely = not self.protocol.router.contacts()
            await asyncio.sleep(self._timing.bootstrap_retry_s if lonely else self._timing.rpc.timeout_s)
            if lonely:
                await self._rejoin()
            await self._ping(self._due_for_a_ping())
            if self._counters["dropped_contacts"] > num_dropped:
                await self._store_own()
                num_dropped = self._counters["dropped_contacts"]
            if await self._ask_newcomers():
                refresh_at = min(refresh_at, loop.time() + self._rng.random())
            if loop.time() >= refresh_at:
                await self._refresh_table()
                refresh_at = loop.time() + self._refresh_delay_s()

    def _due_for_a_ping(self) -> list[Contact]:
        """The silent, and those long not heard of; where some fell silent at once, others may have too."""
        contacts = self.protocol.router.contacts()
        silent = [contact for contact in contacts if contact.misses]
        quiet_s = self._timing.refresh_s
        if silent:
            quiet_s = min(quiet_s, _QUIET_TIMEOUTS * self._timing.rpc.timeout_s)
        quiet_since = asyncio.get_running_loop().time() - quiet_s
        quiet = [contact for contact in contacts if not contact.misses and contact.seen_at < quiet_since]
        return [*silent, *sorted(quiet, key=lambda contact: contact.seen_at)[:_PINGS]]

    async def _ask_newcomers(self) -> bool:
        """Ask new contacts for nodes near this one; True if they name some that should have been known.

        Then two DHTs have met, or a partition has healed, and a refresh must not wait its turn.
        """
        now = asyncio.get_running_loop().time()
        due = [contact for contact, ask_at in self._unasked.items() if ask_at <= now][:_MAX_ASKED]
        for contact in due:
            del self._unasked[contact]
        named = await asyncio.gather(*(self.lookups.neighbours_of(contact, self.node) for contact in due))
        router = self.protocol.router
        nearest = router.find_neighbors(self.node)
        horizon = self.node.distance_to(nearest[-1]) if len(nearest) >= self.ksize else 2**160
        lost = self.protocol.lost
        return any(
            router.contact(node.id) is None and self.node.distance_to(node) < horizon and (node.ip, node.port) not in lost
            for group in named
            for node in group
            if node.id != self.node.id
        )

    def _refresh_delay_s(self) -> float:
        return self._timing.refresh_s * self._rng.uniform(0.5, 0.9)

    async def _rejoin(self) -> None:
        """Ask the bootstrap addresses, and some that fell silent: a partition may have healed."""
        lost = list(self.protocol.lost)
        chosen = self._rng.sample(lost, min(4, len(lost)))
        known = {(contact.ip, contact.port) for contact in self.protocol.router.contacts()}
        addresses = [
            address
            for address in (*self._bootstrap_addresses, *(Address(*other) for other in chosen))
            if tuple(address) not in known
        ]
        if addresses:
            await self.bootstrap(addresses)

    async def _ping(self, nodes: Sequence[Node]) -> None:
        for start in range(0, len(nodes), _PINGS):
            await asyncio.gather(*(self.protocol.call_ping(node) for node in nodes[start : start + _PINGS]))

    async def _refresh_table(self) -> None:
        """Rejoin, walk to this node and to a random one, hand on what nobody renewed."""
        await self._rejoin()
        await self.lookups.nearest(self.node, self.ksize)
        await self.lookups.nearest(Node(self._rng.randbytes(wire.NODE_ID_BYTES)), self.ksize)
        await self._republish()
        self._on_refresh()

    async def _store_own(self) -> None:
        """Holders of this node's records may have died: see that as many live ones hold them as should."""
        own = [(key, held) for key, held in self.storage if held.record.peer == self.node.id.hex()]
        for key, held in own:
            nearest = await self.lookups.nearest(Node(digest(key)), self._replication)
            await self._hand_over([(node, key, held.signed) for node in nearest])

    async def _republish(self) -> None:
        by_key: dict[str, list[SignedRecord]] = {}
        for key, held in self.storage.iter_older_than(self._timing.refresh_s):
            by_key.setdefault(key, []).append(held.signed)
        for key, records in by_key.items():
            nearest = await self.lookups.nearest(Node(digest(key)), self._replication)
            if self._cares_for(key, nearest):
                await self._hand_over([(node, key, signed) for signed in records for node in nearest])

    def _cares_for(self, key: str, others: Sequence[Node]) -> bool:
        """Whether this node is among the first of `others` and itself to look after `key`."""
        target = Node(digest(key))
        own = self.node.distance_to(target)
        return sum(other.distance_to(target) < own for other in others) < _NUM_CARERS

    def _on_contact(self, contact: Contact) -> None:
        nearest = self.protocol.router.find_neighbors(self.node)
        if len(self._unasked) < _MAX_UNASKED and contact in nearest:
            # It may be about to meet others itself.
            self._unasked[contact] = asyncio.get_running_loop().time() + self._timing.rpc.timeout_s
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
                    (contact, key, held.signed)
                    for held in self.storage.get(key, ())
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
