"""Requests and replies over UDP: rpcudp's framing and kademlia's vocabulary, with retransmission and checked input.

Owns the table of outstanding requests and all that arrives. No task is ever started here: datagrams are answered where
they are received, and a request is a future that its timer ends. Must not know lookups or who publishes what.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kademlia.node import Node
from kademlia.protocol import KademliaProtocol
from kademlia.utils import digest

from swarm.base.errors import InternalError
from swarm.net import kademlia_wire as wire
from swarm.net.kademlia_routing import Contact, LiveRoutingTable, plausible_for
from swarm.net.record_storage import RecordStorage
from swarm.wire.records import SignedRecord

#: Senders that are being asked whether they are who they say; more wait for their next request.
_MAX_PROBES = 256
#: Datagrams are dropped, as a network would, while the socket's backlog is over this.
_MAX_BACKLOG_BYTES = 1 << 20


class Stranger(Node):
    """A node of which only the address is known."""

    def __init__(self, ip: str, port: int) -> None:
        super().__init__(bytes(wire.NODE_ID_BYTES), ip, port)
        self.id = b""


class Reply(NamedTuple):
    """What the node at the asked address answered."""

    node_id: bytes
    body: Any


#: Ends with the reply, or with None after the last retransmission went unanswered.
ReplyFuture = asyncio.Future[Reply | None]


@dataclass(slots=True)
class _Call:
    node: Node
    name: str
    datagram: bytes
    future: ReplyFuture
    started_at: float
    transmissions: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcTiming:
    """How long a request waits."""

    #: Seconds until a request fails.
    timeout_s: float = 1.0
    #: Times that it is sent, evenly spread over `timeout_s`.
    transmissions: int = 3
    #: A contact is dropped after so many failed requests in a row.
    max_misses: int = 3


class RecordProtocol(KademliaProtocol):
    """One node's side of every exchange.

    Args:
        source_node: this node.
        storage: records to serve and to fill.
        ksize: contacts in a bucket and in a reply.
        timing: deadlines.
        counters: what happened, by name.
        on_contact: called with every contact that is new or has moved.
    """

    router: LiveRoutingTable
    storage: RecordStorage
    _outstanding: dict[bytes, _Call]

    def __init__(
        self,
        source_node: Node,
        storage: RecordStorage,
        ksize: int,
        *,
        timing: RpcTiming,
        counters: Counter[str],
        on_contact: Callable[[Contact], None],
    ) -> None:
        super().__init__(source_node, storage, ksize)
        self._loop = asyncio.get_running_loop()
        self.router = LiveRoutingTable(self, ksize, source_node, now=self._loop.time, max_misses=timing.max_misses)
        self._timing = timing
        self._counters = counters
        self._on_contact = on_contact
        self._probes: set[tuple[bytes, str, int]] = set()
        self._handlers: dict[str, Callable[..., Any]] = {
            "ping": self.rpc_ping, "find_node": self.rpc_find_node,
            "find_value": self.rpc_find_value, "store": self.rpc_store,
        }
        self._is_v6 = False
        self._reaches_v4 = True
        self._closed = False
        #: This node's address as the last answerer of a ping saw it.
        self.observed: tuple[str, int] | None = None
        #: Addresses of contacts that fell silent, newest last.
        self.lost: dict[tuple[str, int], None] = {}

    def __getattr__(self, name: str) -> Any:
        """No name is a remote method by accident."""
        raise AttributeError(name)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        self._is_v6 = sock.family == socket.AF_INET6
        self._reaches_v4 = not self._is_v6 or (
            sock.getsockname()[0] == "::" and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        )

    def error_received(self, exc: Exception) -> None:
        self._counters["socket_errors"] += 1

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    def close(self) -> None:
        """End every outstanding request, and every later one at once, as unanswered."""
        self._closed = True
        for message_id, call in list(self._outstanding.items()):
            self._finish(message_id, call, None)

    # Asking

    def request(self, node: Node, name: str, *args: Any) -> ReplyFuture:
        """Ask `node`; the future never raises, and cancelling it forgets the request."""
        message_id = os.urandom(20)
        datagram = wire.pack_datagram(b"\x00", message_id, [name, [self.source_node.id, *args]])
        future: ReplyFuture = self._loop.create_future()
        if self._closed:
            future.set_result(None)
            return future
        self._outstanding[message_id] = _Call(node, name, datagram, future, self._loop.time())
        future.add_done_callback(lambda _: self._forget(message_id))
        self._counters[f"asked_{name}"] += 1
        self._transmit(message_id)
        return future

    def _transmit(self, message_id: bytes) -> None:
        call = self._outstanding[message_id]
        if call.transmissions == self._timing.transmissions:
            self._timeout(message_id)
            return
        if call.transmissions:
            self._counters["retransmissions"] += 1
        call.transmissions += 1
        call.timer = self._loop.call_later(
            self._timing.timeout_s / self._timing.transmissions, self._transmit, message_id
        )
        self._send(call.datagram, (call.node.ip, call.node.port))

    def _timeout(self, msg_id: bytes) -> None:
        call = self._outstanding[msg_id]
        self._counters["timeouts"] += 1
        if call.node.id and self.router.missed(call.node, call.started_at):
            self._drop(call.node)
        self._finish(msg_id, call, None)

    def _drop(self, node: Node) -> None:
        self._counters["dropped_contacts"] += 1
        self.lost[node.ip, node.port] = None
        while len(self.lost) > 64:
            del self.lost[next(iter(self.lost))]

    def _finish(self, message_id: bytes, call: _Call, reply: Reply | None) -> None:
        self._forget(message_id)
        if not call.future.done():
            call.future.set_result(reply)

    def _forget(self, message_id: bytes) -> None:
        call = self._outstanding.pop(message_id, None)
        if call is not None and call.timer is not None:
            call.timer.cancel()

    def _accept_response(self, msg_id: bytes, data: Any, address: tuple[str, int]) -> None:
        call = self._outstanding.get(msg_id)
        if call is None:
            self._counters["late_replies"] += 1
            return
        if type(data) is not list or len(data) != 2:
            raise wire.Malformed("malformed_reply")
        node_id = wire.node_id(data[0])
        ip, port = call.node.ip, call.node.port
        expected = not call.node.id or call.node.id == node_id
        if not expected and (known := self.router.contact(call.node.id)) is not None and known.same_home_as(call.node):
            self.router.remove_contact(known)  # another node lives at its address now
            self._counters["dropped_contacts"] += 1
        self.lost.pop((ip, port), None)
        contact = self.router.heard_from(node_id, ip, port)
        if contact is not None:
            self._on_contact(contact)
        self._finish(msg_id, call, Reply(node_id, data[1]) if expected else None)

    async def call_ping(self, node_to_ask: Node) -> Reply | None:
        """Ask for a sign of life; notes under which address the other end sees this node."""
        reply = await self.request(node_to_ask, "ping")
        if reply is not None:
            try:
                self.observed = wire.unpack_address(reply.body)
            except wire.Malformed as error:
                self._counters[f"dropped_{error}"] += 1
        return reply

    def call_find_node(self, node_to_ask: Node, node_to_find: Node) -> ReplyFuture:
        return self.request(node_to_ask, "find_node", node_to_find.id)

    def call_find_value(self, node_to_ask: Node, key: str, after: bytes, *, with_nodes: bool) -> ReplyFuture:
        return self.request(node_to_ask, "find_value", key, after, with_nodes)

    def call_store(self, node_to_ask: Node, key: str, value: tuple[SignedRecord, float]) -> ReplyFuture:
        return self.request(node_to_ask, "store", key, wire.pack_record(*value))

    # Answering

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self._counters["datagrams_in"] += 1
        self._counters["bytes_in"] += len(data)
        try:
            if not wire.HEADER_BYTES < len(data) < wire.MAX_DATAGRAM_BYTES or data[0] > 1:
                raise wire.Malformed("malformed_frame")
            kind, message_id = data[:1], data[1 : wire.HEADER_BYTES]
            if kind == b"\x01" and message_id not in self._outstanding:
                self._counters["late_replies"] += 1
                return
            address = _plain_address(addr)
            accept = self._accept_request if kind == b"\x00" else self._accept_response
            accept(message_id, wire.unpack_content(data), address)
        except wire.Malformed as error:
            self._counters[f"dropped_{error}"] += 1

    def _accept_request(self, msg_id: bytes, data: Any, address: tuple[str, int]) -> None:
        if type(data) is not list or len(data) != 2 or type(data[0]) is not str or type(data[1]) is not list:
            raise wire.Malformed("malformed_request")
        name, args = data
        handler = self._handlers.get(name)
        if handler is None or len(args) != _NUM_ARGUMENTS[name]:
            raise wire.Malformed("malformed_request")
        sender = Node(wire.node_id(args[0]), *address)
        body = handler(sender, *args[1:])
        self._counters[f"served_{name}"] += 1
        self._send(wire.pack_datagram(b"\x01", msg_id, [self.source_node.id, body]), address)
        self.welcome_if_new(sender)

    def welcome_if_new(self, node: Node) -> None:
        """Ask an unknown sender, or one at an unknown address, for a sign of life; its answer makes it a contact."""
        known = self.router.contact(node.id)
        if node.id == self.source_node.id or (known is not None and known.same_home_as(node) and not known.misses):
            return
        probe = (node.id, node.ip, node.port)
        if probe not in self._probes and len(self._probes) < _MAX_PROBES:
            self._probes.add(probe)
            self.request(node, "ping").add_done_callback(lambda _: self._probes.discard(probe))

    def rpc_ping(self, sender: Node) -> bytes:
        return wire.pack_address(sender.ip, sender.port)

    def rpc_find_node(self, sender: Node, target: Any) -> list[bytes]:
        return self._nearest(Node(wire.node_id(target)), sender, self.router.ksize)

    def rpc_find_value(self, sender: Node, key: Any, after: Any, with_nodes: Any) -> list[Any]:
        """Contacts first, then as many records as the datagram has room for."""
        key = wire.dht_key(key)
        if type(with_nodes) is not bool:
            raise wire.Malformed("malformed_request")
        after = b"" if after == b"" else wire.node_id(after)
        nodes = self._nearest(Node(digest(key)), sender, self.router.ksize // 2) if with_nodes else []
        room = wire.REPLY_BODY_BYTES - sum(len(node) + 2 for node in nodes)
        page, more = self.storage.page(key, after.hex(), room, wire.RECORD_OVERHEAD_BYTES)
        return [nodes, [wire.pack_record(held.signed, self.storage.remaining_s(held)) for held in page], more]

    def rpc_store(self, sender: Node, key: Any, record: Any) -> str:
        return self.storage.put(wire.dht_key(key), *wire.unpack_record(record))

    def _nearest(self, target: Node, sender: Node, num_nodes: int) -> list[bytes]:
        neighbors = self.router.find_neighbors(target, num_nodes, exclude=sender)
        return [wire.pack_node(node) for node in neighbors if plausible_for(node.ip, sender.ip)]

    # The socket

    def can_send_to(self, ip: str) -> bool:
        return self._is_v6 if ":" in ip else self._reaches_v4

    def _send(self, datagram: bytes, address: tuple[str, int]) -> None:
        if len(datagram) >= wire.MAX_DATAGRAM_BYTES:
            raise InternalError(f"a datagram of {len(datagram)} bytes; pages and records must be cut smaller")
        transport = self.transport
        ip, port = address
        if transport is None or transport.is_closing() or not self.can_send_to(ip):
            return
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            self._counters["dropped_backlog"] += 1
            return
        self._counters["datagrams_out"] += 1
        self._counters["bytes_out"] += len(datagram)
        transport.sendto(datagram, (f"::ffff:{ip}" if self._is_v6 and ":" not in ip else ip, port))


#: The sender's id included.
_NUM_ARGUMENTS = {"ping": 1, "find_node": 2, "find_value": 4, "store": 3}


def _plain_address(address: tuple[Any, ...]) -> tuple[str, int]:
    """IPv4 as itself, though a dual-stack socket shows it mapped into IPv6."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]
