"""Requests and replies over UDP: rpcudp's framing and kademlia's vocabulary, with retransmission and checked input.

Owns the table of outstanding requests and all that arrives; what leaves goes through `datagram_socket`. No task is ever
started here: datagrams are answered where they are received, and a request is a future that its timer ends. Must not know
lookups or who publishes what.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kademlia.node import Node
from kademlia.protocol import KademliaProtocol

from swarm.net.kademlia import wire
from swarm.net.kademlia.answers import LONG_ANSWERS, NUM_ARGUMENTS, Answers
from swarm.net.kademlia.calls import Call, Reply, ReplyFuture, RpcTiming
from swarm.net.kademlia.datagram_socket import DatagramSocket, plain_address
from swarm.net.kademlia.known_addresses import PROOF_BYTES, AddressTokens, KnownAddresses, is_proven, prove
from swarm.net.kademlia.record_storage import RecordStorage
from swarm.net.kademlia.routing import Contact, LiveRoutingTable
from swarm.wire.peer_records import SignedRecord

#: Senders that are being asked whether they are who they say; more wait for their next request.
_MAX_PROBES = 256
#: Failed requests whose answers are still recognised.
_MAX_OVERDUE = 1024
#: A request fails at the earliest after so many times what a lost datagram is detected after: all may be slow.
_TIMEOUT = 3


class RecordProtocol(KademliaProtocol):
    """One node's side of every exchange.

    Args:
        source_node: this node.
        storage: records to serve and to fill.
        ksize: contacts in a bucket and in a reply.
        private_key: proves that this node's id is its own.
        timing: deadlines.
        counters: what happened, by name.
        on_contact: called with every contact that is new or has moved.
    """

    router: LiveRoutingTable
    storage: RecordStorage
    _outstanding: dict[bytes, Call]

    def __init__(
        self,
        source_node: Node,
        storage: RecordStorage,
        ksize: int,
        *,
        private_key: Ed25519PrivateKey,
        timing: RpcTiming,
        counters: Counter[str],
        on_contact: Callable[[Contact], None],
    ) -> None:
        super().__init__(source_node, storage, ksize)
        self._loop = asyncio.get_running_loop()
        self.router = LiveRoutingTable(self, ksize, source_node, now=self._loop.time, max_misses=timing.max_misses)
        self._private_key = private_key
        self._timing = timing
        self.known = KnownAddresses(
            least_s=timing.least_wait_s, most_s=timing.timeout_s, unknown_s=timing.timeout_s / 3, now=self._loop.time
        )
        self._tokens = AddressTokens(os.urandom(32), self._loop.time)
        self._counters = counters
        self._on_contact = on_contact
        self._probes: set[tuple[bytes, str, int]] = set()
        answers = Answers(self.router, storage, now=self._loop.time, counters=counters)
        self._handlers = answers.handlers()
        #: Requests that failed lately.
        self._overdue: OrderedDict[bytes, Call] = OrderedDict()
        self.socket = DatagramSocket(counters)
        self._closed = False
        #: This node's address as the last answerer of a ping saw it.
        self.observed: tuple[str, int] | None = None
        #: Addresses of contacts that fell silent, newest last.
        self.lost: dict[tuple[str, int], None] = {}

    def __getattr__(self, name: str) -> Any:
        """No name is a remote method by accident."""
        raise AttributeError(name)

    def connection_made(self, transport: Any) -> None:
        """Called by asyncio once the socket is open."""
        super().connection_made(transport)
        self.socket.open(transport)

    def error_received(self, exc: Exception) -> None:
        """Called by asyncio when the system reports an error; it is counted only."""
        self._counters["socket_errors"] += 1

    @property
    def num_outstanding(self) -> int:
        """Requests that wait for an answer."""
        return len(self._outstanding)

    def close(self) -> None:
        """End every outstanding request, and every later one at once, as unanswered."""
        self._closed = True
        for message_id, call in list(self._outstanding.items()):
            self._finish(message_id, call, None)

    # Asking

    def request(self, node: Node, name: str, *args: Any, max_transmissions: int | None = None) -> ReplyFuture:
        """Ask `node`; the future never raises, and cancelling it forgets the request."""
        future: ReplyFuture = self._loop.create_future()
        if self._closed:
            future.set_result(None)
            return future
        call_id = os.urandom(wire.CALL_ID_BYTES)
        call = Call(node, name, args, future, self._loop.time(), max_transmissions or self._timing.transmissions)
        self._outstanding[call_id] = call
        future.add_done_callback(lambda _: self._forget(call_id))
        self._counters[f"asked_{name}"] += 1
        self._write(call)
        self._transmit(call_id)
        return future

    def lost_after_s(self, node: Node) -> float:
        """Seconds after which a datagram to `node` is more likely lost than slow."""
        return self.known.lost_after_s((node.ip, node.port))

    def seems_dead(self, node: Node) -> bool:
        """Whether `node` has been silent more often than bad luck explains."""
        return self.known.seems_dead((node.ip, node.port))

    def _write(self, call: Call) -> None:
        """A proof is asked for until one was seen from this id at this address."""
        known = self.known.of((call.node.ip, call.node.port))
        wants_proof = not known.node_id or call.node.id not in (b"", known.node_id)
        pad_to = wire.LONG_REQUEST_BYTES if call.name in LONG_ANSWERS else wire.SHORT_REQUEST_BYTES
        call.write(wire.pack_request(call.name, known.token, wants_proof, self.source_node.id, call.args, pad_to))

    def _transmit(self, call_id: bytes) -> None:
        call = self._outstanding[call_id]
        if self._rearm_after_stall(call_id, call, self._transmit):
            return
        now, attempt = self._loop.time(), len(call.sent_at)
        if attempt > call.renewals:
            self._counters["retransmissions"] += 1
            self.known.lost((call.node.ip, call.node.port))
            if self.seems_dead(call.node):
                self.router.suspect(call.node)
        call.sent_at.append(now)
        lost_after_s = self.lost_after_s(call.node)
        fails_at = max(now, call.started_at + max(self._timing.timeout_s, _TIMEOUT * lost_after_s))
        again_at = now + lost_after_s * 2**attempt
        if attempt + 1 >= call.max_transmissions or again_at >= fails_at:
            call.arm(self._loop, fails_at, self._timeout, call_id)
        else:
            call.arm(self._loop, again_at, self._transmit, call_id)
        datagram = wire.REQUEST + call_id + bytes([attempt]) + call.content
        self.socket.send(datagram, (call.node.ip, call.node.port))

    def _rearm_after_stall(self, call_id: bytes, call: Call, then: Callable[[bytes], None]) -> bool:
        """Wait once more, and return True, if a timer came so late that this process stood still: an answer may lie unread."""
        now = self._loop.time()
        if not call.note_stall(now, self._timing.least_wait_s):
            return False
        self._counters["own_stalls"] += 1
        call.arm(self._loop, now + self._timing.least_wait_s, then, call_id)
        return True

    def _renew(self, call_id: bytes, call: Call) -> None:
        """Ask again at once, with what was learned of the address; a node that is never content gets no answer."""
        if not call.renew():
            self._finish(call_id, call, None)
            return
        self._counters["renewed_requests"] += 1
        self._write(call)
        self._transmit(call_id)

    def _timeout(self, msg_id: bytes) -> None:
        call = self._outstanding[msg_id]
        if self._rearm_after_stall(msg_id, call, self._timeout):
            return
        self._counters["timeouts"] += 1
        self.known.lost((call.node.ip, call.node.port))
        if call.node.id and self.router.missed(call.node, call.started_at):
            self._drop(call.node)
        self._finish(msg_id, call, None)
        self._overdue[msg_id] = call
        if len(self._overdue) > _MAX_OVERDUE:
            self._overdue.popitem(last=False)

    def _drop(self, node: Node) -> None:
        self._counters["dropped_contacts"] += 1
        self.lost[node.ip, node.port] = None
        while len(self.lost) > 64:
            del self.lost[next(iter(self.lost))]

    def _finish(self, message_id: bytes, call: Call, reply: Reply | None) -> None:
        self._forget(message_id)
        if not call.future.done():
            call.future.set_result(reply)

    def _forget(self, message_id: bytes) -> None:
        call = self._outstanding.pop(message_id, None)
        if call is not None:
            call.disarm()

    def _accept_answer(self, kind: bytes, message_id: bytes, content: bytes) -> None:
        call_id, attempt = message_id[: wire.CALL_ID_BYTES], message_id[-1]
        call = self._outstanding.get(call_id)
        if call is None or attempt >= len(call.sent_at):
            self._counters["late_replies"] += 1
            self._accept_overdue(call_id, attempt, content[:-PROOF_BYTES] if kind == wire.PROVEN_REPLY else content)
            return
        proof = b""
        if kind == wire.PROVEN_REPLY:
            content, proof = content[:-PROOF_BYTES], content[-PROOF_BYTES:]
        answer = wire.unpack_answer(content)
        home = (call.node.ip, call.node.port)
        known = self.known.of(home)
        known.take_token(answer.token)
        self.known.observe(home, self._loop.time() - call.sent_at[attempt])
        if answer.body is None:
            self._renew(call_id, call)
            return
        if known.node_id != answer.node_id:
            known.belong_to(b"")
            if not proof:
                self._renew(call_id, call)
                return
            if not is_proven(proof, answer.node_id, message_id, self.source_node.id, content):
                self._counters["refused_unproven_id"] += 1
                self._finish(call_id, call, None)
                return
            self._counters["proven_ids"] += 1
            known.belong_to(answer.node_id)
        self._accept_proven(call_id, call, answer)

    def _accept_overdue(self, call_id: bytes, attempt: int, content: bytes) -> None:
        """An answer to a request that has failed: too late to use, but a sign of life, and of how busy somebody is."""
        call = self._overdue.get(call_id)
        if call is None or attempt >= len(call.sent_at):
            return
        del self._overdue[call_id]
        answer = wire.unpack_answer(content)
        home = (call.node.ip, call.node.port)
        self.known.observe(home, self._loop.time() - call.sent_at[attempt])
        if self.known.of(home).node_id == answer.node_id:
            self._heard_from(answer.node_id, home)

    def _heard_from(self, node_id: bytes, home: tuple[str, int]) -> None:
        self.lost.pop(home, None)
        contact = self.router.heard_from(node_id, *home)
        if contact is not None:
            self._on_contact(contact)

    def _accept_proven(self, call_id: bytes, call: Call, answer: wire.ReplyContent) -> None:
        """The owner of `answer.node_id` lives at the address that was asked."""
        expected = call.node.id in (b"", answer.node_id)
        if not expected and (old := self.router.contact(call.node.id)) is not None and old.same_home_as(call.node):
            self.router.remove_contact(old)  # another node lives at its address now
            self._counters["dropped_contacts"] += 1
        self._heard_from(answer.node_id, (call.node.ip, call.node.port))
        self._finish(call_id, call, Reply(answer.node_id, answer.body) if expected else None)

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
        """Ask for the contacts nearest to `node_to_find`."""
        return self.request(node_to_ask, "find_node", node_to_find.id)

    def call_find_value(self, node_to_ask: Node, key: str, after: bytes, *, with_nodes: bool) -> ReplyFuture:
        """Ask for a page of the records under `key`: those of peers above `after`."""
        return self.request(node_to_ask, "find_value", key, after, with_nodes)

    def call_store(self, node_to_ask: Node, key: str, value: tuple[SignedRecord, float]) -> ReplyFuture:
        """Ask to hold a record, for so many seconds, under `key`."""
        return self.request(node_to_ask, "store", key, wire.pack_record(*value))

    # Answering

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """Called by asyncio with each datagram; one that is malformed is counted and dropped."""
        self._counters["datagrams_in"] += 1
        self._counters["bytes_in"] += len(data)
        try:
            if not wire.HEADER_BYTES < len(data) < wire.MAX_DATAGRAM_BYTES:
                raise wire.Malformed("malformed_frame")
            kind, message_id, content = data[:1], data[1 : wire.HEADER_BYTES], data[wire.HEADER_BYTES :]
            if kind == wire.REQUEST:
                self._accept_question(message_id, content, plain_address(addr))
            elif kind in (wire.REPLY, wire.PROVEN_REPLY):
                self._accept_answer(kind, message_id, content)
            else:
                raise wire.Malformed("malformed_frame")
        except wire.Malformed as error:
            self._counters[f"dropped_{error}"] += 1

    def _accept_question(self, message_id: bytes, content: bytes, address: tuple[str, int]) -> None:
        request = wire.unpack_request(content)
        handler = self._handlers.get(request.name)
        if handler is None or len(request.args) != NUM_ARGUMENTS[request.name]:
            raise wire.Malformed("malformed_request")
        sender = Node(request.sender_id, *address)
        trusted = self._tokens.accepts(address, request.token)
        own_token = self._tokens.give(address)
        body: Any = None
        if trusted or request.name != "store":
            body = handler(sender, *request.args)
            self._counters[f"served_{request.name}"] += 1
        reply = self._sign(message_id, request, wire.pack_answer(self.source_node.id, own_token, body))
        if body is None or not (trusted or len(reply) <= wire.MAX_AMPLIFICATION * (wire.HEADER_BYTES + len(content))):
            self._counters["tokens_demanded"] += 1
            reply = wire.REPLY + message_id + wire.pack_answer(self.source_node.id, own_token, None)
        self.socket.send(reply, address)
        self._welcome_if_new(sender, max_transmissions=None if trusted else 1)

    def _sign(self, message_id: bytes, request: wire.Request, content: bytes) -> bytes:
        if not request.prove:
            return wire.REPLY + message_id + content
        proof = prove(self._private_key, message_id, request.sender_id, content)
        return wire.PROVEN_REPLY + message_id + content + proof

    def _welcome_if_new(self, node: Node, max_transmissions: int | None) -> None:
        """Ask an unknown sender, or one at an unknown address, for a sign of life; its answer makes it a contact."""
        known = self.router.contact(node.id)
        if node.id == self.source_node.id or (known is not None and known.same_home_as(node) and not known.misses):
            return
        probe = (node.id, node.ip, node.port)
        if probe not in self._probes and len(self._probes) < _MAX_PROBES:
            self._probes.add(probe)
            future = self.request(node, "ping", max_transmissions=max_transmissions)
            future.add_done_callback(lambda _: self._probes.discard(probe))
