"""The discovery interface: keys that hold many signed records, one per peer, each with a life of its own.

`kademlia/dht` (UDP) and `swarm/testing/memory_dht` (virtual time) implement it; one contract suite runs on both.
What is found is a hint and never a decision: a record may be missing, or up to its time-to-live old. Must not know
what records are for.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from swarm.base.ids import Address
from swarm.wire.peer_records import PeerRecord, SignedRecord


class Dht(abc.ABC):
    """Publishes this peer's records and finds those of others."""

    @abc.abstractmethod
    async def start(self, bootstrap: Sequence[Address]) -> None:
        """Bind, and contact `bootstrap`; goes on trying for ever if none answers. An empty list starts a new DHT.

        Raises:
            ConfigError: if the address cannot be bound, naming it.
        """

    @abc.abstractmethod
    async def publish(self, key: str, record: SignedRecord) -> int:
        """Store `record` at the nodes nearest to `key`, this one included; returns how many hold it now.

        That is at least 1 for a new record (this node's own copy), and 0 only if a newer sequence of the same peer, or
        this very sequence already expired, is known here. Publishing the same record again renews nothing: a peer
        renews by signing a higher sequence.

        Raises:
            ValueError: the record is over-long, malformed or not validly signed for `key`.
        """

    @abc.abstractmethod
    async def lookup(self, key: str) -> list[PeerRecord]:
        """The valid, unexpired records under `key`, newest of each peer, merged from several nodes; any order.

        Never raises for the network's sake: nodes that do not answer only make the list shorter.
        """

    @abc.abstractmethod
    def contacts(self) -> list[Address]:
        """Live nodes that a newcomer can bootstrap from, this one first."""

    @abc.abstractmethod
    def statistics(self) -> dict[str, int]:
        """Counters since the start (refused records by reason, dropped datagrams, ...) and the sizes held now."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop; records of this peer die by their time-to-live."""
