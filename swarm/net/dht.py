"""The discovery interface: keys that hold many signed records, one per peer, each with a life of its own.

`kademlia_dht` (UDP) and `memory` (virtual time) implement it; one contract suite runs on both.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from swarm.base.ids import Address
from swarm.wire.records import PeerRecord, SignedRecord


class Dht(abc.ABC):
    """Publishes this peer's records and finds those of others."""

    @abc.abstractmethod
    async def start(self, bootstrap: Sequence[Address]) -> None:
        """Bind, and contact `bootstrap`; goes on trying for ever if none answers. An empty list starts a new DHT."""

    @abc.abstractmethod
    async def publish(self, key: str, record: SignedRecord) -> int:
        """Store `record` at the nodes nearest to `key`, this one included; returns how many took it (at least 1)."""

    @abc.abstractmethod
    async def lookup(self, key: str) -> list[PeerRecord]:
        """The valid, unexpired records under `key`, newest of each peer, merged from several nodes; any order."""

    @abc.abstractmethod
    def contacts(self) -> list[Address]:
        """Live nodes that a newcomer can bootstrap from, this one first."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop; records of this peer die by their time-to-live."""
