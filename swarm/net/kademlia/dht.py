"""The discovery interface over UDP with Kademlia: one node that shares its port number with the peer's HTTP transport.

Owns the socket and the public face. Read on, in this folder, in `server` (upkeep), `lookups` and `crawl` (reading), `rpc`
and `calls` (asking), `answers` (answering), `datagram_socket` (sending), `routing` and `known_addresses` (who is there, and
how far), `record_storage` (records). Must not know what records mean.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.base.errors import StorageError
from swarm.base.ids import Address
from swarm.net.dht import Dht
from swarm.net.identity import Identity
from swarm.net.kademlia.contact_file import ContactFile
from swarm.net.kademlia.record_storage import RecordStorage, RecordVerifier, StorageLimits
from swarm.net.kademlia.server import RecordServer, ServerTiming
from swarm.net.ports import bind_udp
from swarm.wire.peer_records import PeerRecord, RecordRefused, SignedRecord

log = logging.getLogger(__name__)


class KademliaDht(Dht):
    """A DHT node of this peer. Call everything from the loop that ran `start`.

    Args:
        identity: its peer id is the node id.
        sock: bound UDP socket; taken over, and closed by `close`. Without it `host` and `port` are bound at `start`.
        host: address to bind; `::` serves IPv4 too.
        port: 0 picks one.
        advertise_host: what `contacts` calls this node. None: the bound host, or for a wildcard what other nodes see.
        advertise_port: and its port there; 0 is the bound one.
        timing: how long requests wait, and how often the node looks after its place.
        replication: nodes that a record is stored at and asked for.
        limits: bounds of what this node stores for others.
        contacts_path: JSON file in which contacts survive a restart; None keeps none.
        clock: monotonic seconds, for the lives of records; None is the running loop's time.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        sock: socket.socket | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        advertise_port: int = 0,
        timing: ServerTiming | None = None,
        replication: int = 8,
        limits: StorageLimits | None = None,
        contacts_path: Path | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._identity = identity
        self._sock = sock
        self._bind = Address(host, port)
        self._advertise_host = advertise_host
        self._advertise_port = advertise_port
        self._timing = timing or ServerTiming()
        self._replication = replication
        self._limits = limits or StorageLimits()
        self._contact_file = ContactFile(contacts_path) if contacts_path is not None else None
        self._clock = clock
        self._counters: Counter[str] = Counter()
        self._verifier = RecordVerifier()
        self._server: RecordServer | None = None
        self._address = self._bind

    @property
    def address(self) -> Address:
        """Where this node listens, as bound; valid after `start`."""
        return self._address

    async def start(self, bootstrap: Sequence[Address]) -> None:
        """Bind, and contact `bootstrap` and the contacts of an earlier life. See `Dht.start`."""
        if self._server is not None:
            raise RuntimeError("this DHT node was started before")
        if self._sock is None:
            self._sock = bind_udp(*self._bind)
        self._address = Address(*self._sock.getsockname()[:2])
        storage = RecordStorage(
            now=self._clock or asyncio.get_running_loop().time,
            verifier=self._verifier,
            limits=self._limits,
            counters=self._counters,
        )
        self._server = RecordServer(
            self._identity.private_key,
            storage=storage,
            verifier=self._verifier,
            counters=self._counters,
            timing=self._timing,
            replication=self._replication,
            rng=random.Random(self._identity.peer_id),
            on_refresh=self._remember_contacts,
        )
        remembered = self._contact_file.load() if self._contact_file is not None else []
        await self._server.open(self._sock, bootstrap, remembered)
        self._remember_contacts()  # not only at the first refresh: a power cut may come before it

    async def publish(self, key: str, record: SignedRecord) -> int:
        """Store at the nearest nodes. See `Dht.publish`."""
        try:
            self._verifier.verify(key, record)
        except RecordRefused as error:
            raise ValueError(str(error)) from None
        return await self._running.set(key, record)

    async def lookup(self, key: str) -> list[PeerRecord]:
        """Read from the nearest nodes. See `Dht.lookup`."""
        return await self._running.get(key)

    def contacts(self) -> list[Address]:
        """This node, and those that it knows nearest to itself."""
        router = self._running.protocol.router
        nearest = router.find_neighbors(self._running.node)
        return [self._own_address(), *(Address(contact.ip, contact.port) for contact in nearest)]

    def statistics(self) -> dict[str, int]:
        """Counters by name, and the sizes held now."""
        statistics = dict(self._counters)
        if self._server is not None and self._server.protocol is not None:
            protocol, storage = self._server.protocol, self._server.storage
            statistics["records"] = storage.num_records
            statistics["keys"] = storage.num_keys
            statistics["contacts"] = len(protocol.router.contacts())
            statistics["outstanding"] = protocol.num_outstanding
            statistics["known_addresses"] = len(protocol.known)
            statistics["round_trip_us"] = round(protocol.known.typical_round_trip_s * 1e6)
        return statistics

    async def close(self) -> None:
        """Write the contacts for the next life, and close the socket."""
        if self._server is not None:
            if self._server.protocol is not None:
                self._remember_contacts()
            await self._server.close()
        if self._sock is not None:
            self._sock.close()

    def _remember_contacts(self) -> None:
        """Keep them for the next life, those that fell silent last; if the disk refuses, this one goes on all the same."""
        protocol = self._running.protocol
        contacts = sorted(protocol.router.contacts(), key=lambda contact: (contact.misses, -contact.seen_at))
        if self._contact_file is None or not contacts:
            return
        silent = reversed(protocol.lost)  # such as machines that are still off after a power cut
        try:
            self._contact_file.save([Address(*x) for x in dict.fromkeys([*((c.ip, c.port) for c in contacts), *silent])])
        except StorageError as error:
            if not self._counters["contact_file_failures"]:
                log.warning("%s", error)
            self._counters["contact_file_failures"] += 1

    @property
    def _running(self) -> RecordServer:
        if self._server is None:
            raise RuntimeError("start the DHT node first")
        return self._server

    def _own_address(self) -> Address:
        if self._advertise_host is not None:
            return Address(self._advertise_host, self._advertise_port or self._address.port)
        if not ipaddress.ip_address(self._address.host.partition("%")[0]).is_unspecified:
            return self._address
        observed = self._running.protocol.observed
        return Address(observed[0] if observed is not None else "127.0.0.1", self._address.port)
