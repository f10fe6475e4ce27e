"""Identifiers of the protocol. Owns their shape; must not know who uses them."""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

#: First 20 bytes of the SHA-256 of an Ed25519 public key, as 40 hex digits; also the peer's Kademlia node id.
PeerId = str
#: 16 hex digits drawn at each process start.
Incarnation = str
#: A peer in one incarnation.
MemberKey = tuple[PeerId, Incarnation]
#: 64 hex digits: names one version of the whole model.
VersionId = str
#: 64 hex digits: hash of the run's configuration bytes.
RunId = str


#: The most micro-batches of one step; messages list them.
MAX_TICKETS = 65536


class Address(NamedTuple):
    """The place where a peer listens: the same port number serves TCP (HTTP) and UDP (DHT)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Ticket(NamedTuple):
    """One micro-batch of the run's one global data order: micro-batch `index` of optimizer step `step`."""

    step: int
    index: int  # type: ignore[assignment]  # shadows tuple.index on purpose: the wire's word


class Ballot(NamedTuple):
    """Orders coordinators, never states. The zero ballot belongs to nobody."""

    counter: int
    coordinator: PeerId


ZERO_BALLOT = Ballot(0, "")


def peer_id_of(public_key: bytes) -> PeerId:
    """The id that belongs to a 32-byte Ed25519 public key."""
    return hashlib.sha256(public_key).digest()[:20].hex()


def new_incarnation(rng: random.Random) -> Incarnation:
    """A fresh incarnation; `rng` is `random.SystemRandom()` in production and seeded in simulations."""
    return f"{rng.getrandbits(64):016x}"


def parse_address(text: str, *, default_host: str = "127.0.0.1") -> Address:
    """Parse `host:port`, `[v6]:port` or `:port`.

    Raises:
        ValueError: if there is no port or it is not in 0..65535.
    """
    host, separator, port = text.rpartition(":")
    without_brackets = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not separator or without_brackets or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return Address(host.strip("[]") or default_host, int(port))
