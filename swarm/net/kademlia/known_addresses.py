"""What a node knows of other addresses: who proved to live there, the token it was given there, how long a reply takes.

Owns the three cheap defences of a UDP protocol: tokens show that an address can be answered at (so that nobody is
flooded in another's name), proofs show that a node has the key of its id, and measured round trips (RFC 6298) tell a
lost datagram from a slow one. Must not know sockets, requests or records.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.base.ids import peer_id_of

TOKEN_BYTES = 8
#: Public key and signature.
PROOF_BYTES = 96

_CAPACITY = 8192
#: Half-life of a measured busy moment, in seconds.
_FADES_S = 2.0
#: Lost datagrams in a row; at 20 % loss each way one address in twenty looks so for a moment.
_SEEMS_DEAD = 3
_TOKEN_LIFE_S = 600.0


@dataclass(slots=True)
class Known:
    """One address."""

    #: The id whose key was proven here; empty until then.
    node_id: bytes = b""
    #: What the node here wants to see with a request, to believe that it comes from where it says.
    token: bytes = b""
    #: Smoothed, in seconds; None before the first answer.
    round_trip_s: float | None = None
    deviation_s: float = 0.0
    shortest_s: float = math.inf
    measured_at: float = 0.0
    #: Datagrams taken for lost since the last answer.
    num_lost: int = 0

    def take_token(self, token: bytes) -> None:
        """Show `token` to the node here with the next requests."""
        self.token = token

    def belong_to(self, node_id: bytes) -> None:
        """Note whose key was proven here; empty if it is to be proven again."""
        self.node_id = node_id

    def observe(self, seconds: float, now: float) -> None:
        """Take a measured round trip of `seconds` into the averages (RFC 6298)."""
        self.num_lost = 0
        if self.round_trip_s is None:
            self.round_trip_s, self.deviation_s = seconds, seconds / 2
        else:
            self.deviation_s += (abs(seconds - self.round_trip_s) - self.deviation_s) / 4
            self.round_trip_s += (seconds - self.round_trip_s) / 8
        self.shortest_s = min(self.shortest_s, seconds)
        self.measured_at = now

    @property
    def usual_s(self) -> float:
        """Time within which an answer is expected, after what was measured last."""
        assert self.round_trip_s is not None
        return self.round_trip_s + 4 * self.deviation_s

    def expected_s(self, now: float, anyones_s: float) -> float:
        """The same now: what a busy moment added fades while nothing is measured, unless others are slow (`anyones_s`)."""
        idle_s = min(self.usual_s, max(1.5 * self.shortest_s, anyones_s))
        return idle_s + (self.usual_s - idle_s) * 0.5 ** ((now - self.measured_at) / _FADES_S)


class KnownAddresses:
    """A bounded memory of addresses; the one unused for longest is forgotten first.

    Args:
        least_s: no datagram is taken for lost sooner, however fast the link is: processes stall.
        most_s: nor later.
        unknown_s: what is assumed before the first measurement.
        now: monotonic clock in seconds.
    """

    def __init__(self, *, least_s: float, most_s: float, unknown_s: float, now: Callable[[], float]) -> None:
        self._now = now
        self._least_s = min(least_s, most_s)
        self._most_s = most_s
        self._unknown_s = unknown_s
        self._known: OrderedDict[tuple[str, int], Known] = OrderedDict()
        #: Of all addresses together: stands in for those not measured yet.
        self._anyone = Known()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, address: tuple[str, int]) -> Known:
        """What is known of `address`, which counts as used now."""
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = Known()
            if len(self._known) > _CAPACITY:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(address)
        return known

    def observe(self, address: tuple[str, int], seconds: float) -> None:
        """A reply from `address` came `seconds` after its request."""
        now = self._now()
        self.of(address).observe(seconds, now)
        self._anyone.observe(seconds, now)

    def lost_after_s(self, address: tuple[str, int]) -> float:
        """Seconds after which an unanswered datagram to `address` is more likely lost than slow."""
        known = self._known.get(address)
        if known is None or known.round_trip_s is None:
            known = self._anyone
        if known.round_trip_s is None:
            return self._unknown_s
        return min(self._most_s, max(self._least_s, known.expected_s(self._now(), self._anyone.usual_s)))

    def lost(self, address: tuple[str, int]) -> None:
        """A datagram to `address` was not answered in time."""
        self.of(address).num_lost += 1

    def seems_dead(self, address: tuple[str, int]) -> bool:
        """Whether it has been silent more often than bad luck explains: look elsewhere first."""
        known = self._known.get(address)
        return known is not None and known.num_lost >= _SEEMS_DEAD

    @property
    def typical_round_trip_s(self) -> float:
        """Smoothed over all addresses; 0 before the first answer."""
        return self._anyone.round_trip_s or 0.0


class AddressTokens:
    """Gives each address a token that only whoever receives there can know; needs no memory of whom it gave one.

    Args:
        secret: at most 64 bytes that nobody else knows.
        now: monotonic clock in seconds.
    """

    def __init__(self, secret: bytes, now: Callable[[], float]) -> None:
        self._secret = secret
        self._now = now

    def give(self, address: tuple[str, int]) -> bytes:
        """The token of `address` for now, of `TOKEN_BYTES` bytes."""
        return self._token(address, self._epoch())

    def accepts(self, address: tuple[str, int], token: bytes) -> bool:
        """Whether `token` was given to `address` lately."""
        if len(token) != TOKEN_BYTES:
            return False
        epoch = self._epoch()
        return token in (self._token(address, epoch), self._token(address, epoch - 1))

    def _epoch(self) -> int:
        return math.floor(self._now() / _TOKEN_LIFE_S)

    def _token(self, address: tuple[str, int], epoch: int) -> bytes:
        ip, port = address
        text = f"{ip} {port} {epoch}".encode()
        return hashlib.blake2b(text, key=self._secret, digest_size=TOKEN_BYTES).digest()


def prove(private_key: Ed25519PrivateKey, message_id: bytes, asker_id: bytes, content: bytes) -> bytes:
    """`PROOF_BYTES` that show to `asker_id`, who chose `message_id`, that the key's owner answered `content`."""
    signature = private_key.sign(_proven_bytes(message_id, asker_id, content))
    return private_key.public_key().public_bytes_raw() + signature


def is_proven(proof: bytes, node_id: bytes, message_id: bytes, asker_id: bytes, content: bytes) -> bool:
    """Whether the owner of `node_id` made `proof` for this very answer."""
    public_key, signature = proof[:32], proof[32:]
    if bytes.fromhex(peer_id_of(public_key)) != node_id:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _proven_bytes(message_id, asker_id, content))
    except (InvalidSignature, ValueError):
        return False
    return True


def _proven_bytes(message_id: bytes, asker_id: bytes, content: bytes) -> bytes:
    return b"swarm dht reply\0" + message_id + asker_id + content


@functools.lru_cache(maxsize=4096)
def source_of(ip: str) -> str:
    """What one host, or one customer of a network, cannot easily have many of: an IPv4 address or an IPv6 /64."""
    address = ipaddress.ip_address(ip)
    if address.version == 4:
        return ip
    return str(ipaddress.ip_address(int(address) >> 64 << 64))
