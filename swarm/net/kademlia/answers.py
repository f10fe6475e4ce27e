"""What one node answers: three questions and one demand, from what it holds and whom it knows.

Owns the checking of arguments and how much work a sender may cause. Must not know sockets or outstanding requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from kademlia.node import Node
from kademlia.utils import digest

from swarm.net.kademlia import wire
from swarm.net.kademlia.known_addresses import source_of
from swarm.net.kademlia.record_storage import RecordStorage
from swarm.net.kademlia.routing import LiveRoutingTable, plausible_for

#: Bad records in a row that an address may have verified, and how many a second from then on.
_MAX_OFFENCES = 64.0
_FORGIVEN_PER_S = 4.0
_MAX_OFFENDERS = 4096
#: Refusals that no honest sender ever gets.
_OFFENCES = frozenset({"forged", "malformed", "oversize"})

#: Arguments besides the sender's id.
NUM_ARGUMENTS = {"ping": 0, "find_node": 1, "find_value": 3, "store": 2}
#: Questions whose replies are long.
LONG_ANSWERS = frozenset({"find_node", "find_value"})


class Offenders:
    """Who sent bad records lately: a leaky bucket per address, bounded in number."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._level: OrderedDict[tuple[str, int], tuple[float, float]] = OrderedDict()

    def over_limit(self, address: tuple[str, int]) -> bool:
        """Whether `address` sent so many bad records that it is not served for now."""
        return self._current(address) >= _MAX_OFFENCES

    def note(self, address: tuple[str, int]) -> None:
        """Count a bad record against `address`."""
        self._level[address] = (self._current(address) + 1, self._now())
        self._level.move_to_end(address)
        if len(self._level) > _MAX_OFFENDERS:
            self._level.popitem(last=False)

    def _current(self, address: tuple[str, int]) -> float:
        level, since = self._level.get(address, (0.0, 0.0))
        return max(0.0, level - (self._now() - since) * _FORGIVEN_PER_S)


class Answers:
    """The handlers of one node, by the name of the question. Each takes the sender and arguments of any type.

    Raises (each handler):
        wire.Malformed: the arguments are no good; there is no reply then.
    """

    def __init__(
        self, router: LiveRoutingTable, storage: RecordStorage, *, now: Callable[[], float], counters: Counter[str]
    ) -> None:
        self._router = router
        self._storage = storage
        self._counters = counters
        self._offenders = Offenders(now)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The handlers by the name of the question."""
        return {"ping": self.ping, "find_node": self.find_node, "find_value": self.find_value, "store": self.store}

    def ping(self, sender: Node) -> bytes:
        """The address that the question came from."""
        return wire.pack_address(sender.ip, sender.port)

    def find_node(self, sender: Node, target: Any) -> list[bytes]:
        """The contacts nearest to an id, packed."""
        return self._nearest(Node(wire.node_id(target)), sender, self._router.ksize)

    def find_value(self, sender: Node, key: Any, after: Any, with_nodes: Any) -> list[Any]:
        """Contacts first, then as many records as the datagram has room for."""
        key = wire.dht_key(key)
        after = b"" if after == b"" else wire.node_id(after)
        nodes, room = self._near_key(key, sender, with_nodes)
        page, more = self._storage.page(key, after.hex(), room, wire.RECORD_OVERHEAD_BYTES)
        return [nodes, self._pack(page), more]

    def store(self, sender: Node, key: Any, record: Any) -> str:
        """Only a sender whose address is known to be its own gets this far."""
        key, (signed, remaining_s) = wire.dht_key(key), wire.unpack_record(record)
        address = (sender.ip, sender.port)
        if self._offenders.over_limit(address):
            self._counters["refused_rate_limited"] += 1
            return "rate_limited"
        reason = self._storage.put(key, signed, remaining_s, source_of(sender.ip))
        if reason in _OFFENCES:
            self._offenders.note(address)
        return reason

    def _near_key(self, key: str, sender: Node, with_nodes: Any) -> tuple[list[bytes], int]:
        """Contacts near `key`, if they are wanted, and the bytes that are left for records."""
        if type(with_nodes) is not bool:
            raise wire.Malformed("malformed_request")
        nodes = self._nearest(Node(digest(key)), sender, self._router.ksize // 2) if with_nodes else []
        return nodes, wire.REPLY_BODY_BYTES - sum(len(node) + 2 for node in nodes)

    def _nearest(self, target: Node, sender: Node, num_nodes: int) -> list[bytes]:
        neighbors = self._router.find_neighbors(target, num_nodes, exclude=sender)
        return [wire.pack_node(node) for node in neighbors if plausible_for(node.ip, sender.ip)]

    def _pack(self, held: list[Any]) -> list[Any]:
        return [wire.pack_record(one.signed, self._storage.remaining_s(one)) for one in held]
