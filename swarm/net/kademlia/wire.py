"""Bytes of the DHT's requests and replies inside rpcudp's framing: contacts, pages of records, and their limits.

Everything from the network is checked here before anyone acts on it. Must not know sockets or state.

A datagram is a kind, a message id (the last byte counts transmissions) and msgpack. Requests (kind 0) are
`[name, token, prove, [sender's id, ...]]`, replies `[answerer's id, token, body]` (kind 1), followed by a proof of the
answerer's id if the asker wanted one (kind 2). A request shows the token that it was given at that node before, or is
padded in its place, so that no reply is over three times as long as a request that may come from somewhere else. A body
of None says: ask again with this token.

    ping()                              -> the asker's address as seen here
    find_node(target id)                -> [contact, ...], nearest first
    find_value(key, after, with_nodes)  -> [[contact, ...], [record, ...], more]: records of peers above `after`
    store(key, record)                  -> "" or the reason for refusing

A contact is id, IP (4 or 16 bytes) and port, packed; a record is `[public key, payload, signature, remaining ms]`.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import Any, NamedTuple

import umsgpack
from kademlia.node import Node

from swarm.net.kademlia.known_addresses import PROOF_BYTES, TOKEN_BYTES
from swarm.net.kademlia.routing import NODE_ID_BYTES
from swarm.wire.peer_records import MAX_KEY_BYTES, MAX_RECORD_BYTES, MAX_TTL_S, SignedRecord

#: No datagram reaches this size, whatever the reply.
MAX_DATAGRAM_BYTES = 1400
#: Type byte and message id of rpcudp.
HEADER_BYTES = 21
#: The part of a message id that all transmissions of one request share; the byte after it counts them.
CALL_ID_BYTES = 19
REQUEST, REPLY, PROVEN_REPLY = b"\x00", b"\x01", b"\x02"
#: A reply to an address that showed no token is at most so many times as long as the request.
MAX_AMPLIFICATION = 3
#: Requests without a token are padded to this, by whether their replies are long.
LONG_REQUEST_BYTES = -(-MAX_DATAGRAM_BYTES // MAX_AMPLIFICATION)
SHORT_REQUEST_BYTES = 72
#: Room for the body of a reply: header, answerer's id, token, proof and msgpack's own bytes taken off.
REPLY_BODY_BYTES = MAX_DATAGRAM_BYTES - HEADER_BYTES - NODE_ID_BYTES - TOKEN_BYTES - PROOF_BYTES - 18
#: msgpack's own bytes and the remaining life around one record.
RECORD_OVERHEAD_BYTES = 16


class Malformed(ValueError):
    """A datagram that says nothing we understand; the text is the counter's name."""


class Request(NamedTuple):
    """A request as it came; `args` is not checked yet."""

    name: str
    token: bytes
    prove: bool
    sender_id: bytes
    args: list[Any]


class ReplyContent(NamedTuple):
    """A reply as it came; `body` is not checked yet."""

    node_id: bytes
    token: bytes
    body: Any


class Page(NamedTuple):
    """A reply to `find_value`."""

    nodes: list[Node]
    records: list[tuple[SignedRecord, float]]
    #: There are records of peers above the last one here.
    more: bool


@functools.lru_cache(maxsize=4096)
def _packed_ip(ip: str) -> bytes:
    return ipaddress.ip_address(ip).packed


@functools.lru_cache(maxsize=4096)
def _ip(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed))


def pack_address(ip: str, port: int) -> bytes:
    """IP (4 or 16 bytes) and port (2 bytes)."""
    return _packed_ip(ip) + port.to_bytes(2, "big")


def unpack_address(data: Any) -> tuple[str, int]:
    """Raises Malformed."""
    if type(data) is not bytes or len(data) not in (6, 18):
        raise Malformed("malformed_address")
    port = int.from_bytes(data[-2:], "big")
    if port == 0:
        raise Malformed("malformed_address")
    return _ip(data[:-2]), port


def pack_node(node: Node) -> bytes:
    """Id, IP and port of a contact."""
    packed: bytes = node.id + pack_address(node.ip, node.port)
    return packed


def node_id(data: Any) -> bytes:
    """Raises Malformed unless `data` is an id of the right length."""
    if type(data) is not bytes or len(data) != NODE_ID_BYTES:
        raise Malformed("bad_node_id")
    return data


def unpack_nodes(data: Any) -> list[Node]:
    """Raises Malformed."""
    if type(data) is not list:
        raise Malformed("malformed_contacts")
    nodes = []
    for packed in data:
        if type(packed) is not bytes:
            raise Malformed("malformed_contacts")
        nodes.append(Node(node_id(packed[:NODE_ID_BYTES]), *unpack_address(packed[NODE_ID_BYTES:])))
    return nodes


def dht_key(data: Any) -> str:
    """Raises Malformed."""
    if type(data) is not str or not data or len(data.encode()) > MAX_KEY_BYTES:
        raise Malformed("malformed_key")
    return data


def pack_record(signed: SignedRecord, remaining_s: float) -> list[Any]:
    """The parts of a record, and its remaining life in whole milliseconds."""
    return [signed.public_key, signed.payload, signed.signature, max(0, int(remaining_s * 1000))]


def unpack_record(data: Any) -> tuple[SignedRecord, float]:
    """The record and its remaining life in seconds. Raises Malformed; does not verify the signature."""
    if type(data) is not list or len(data) != 4:
        raise Malformed("malformed_record")
    *parts, remaining_ms = data
    if any(type(part) is not bytes for part in parts) or type(remaining_ms) is not int or remaining_ms < 0:
        raise Malformed("malformed_record")
    return SignedRecord(*parts), min(remaining_ms / 1000, MAX_TTL_S)


def unpack_page(data: Any) -> Page:
    """Raises Malformed."""
    if type(data) is not list or len(data) != 3 or type(data[1]) is not list or type(data[2]) is not bool:
        raise Malformed("malformed_page")
    return Page(unpack_nodes(data[0]), [unpack_record(record) for record in data[1]], data[2])


def pack_request(name: str, token: bytes, prove: bool, sender_id: bytes, args: tuple[Any, ...], pad_to: int) -> bytes:
    """The content of a request; without a token it is padded so that the datagram has `pad_to` bytes."""
    content: bytes = umsgpack.packb([name, token, prove, [sender_id, *args]])
    if not token and (missing := pad_to - HEADER_BYTES - len(content)) > 0:
        # One byte may go into a longer length field; and a token's length would be taken for one.
        content = umsgpack.packb([name, bytes(max(missing, TOKEN_BYTES + 1)), prove, [sender_id, *args]])
    return content


def unpack_request(content: bytes) -> Request:
    """Raises Malformed."""
    data = unpack(content)
    if type(data) is not list or len(data) != 4 or type(data[3]) is not list or not data[3]:
        raise Malformed("malformed_request")
    name, token, prove, (sender, *args) = data
    if type(name) is not str or type(token) is not bytes or type(prove) is not bool:
        raise Malformed("malformed_request")
    return Request(name, token, prove, node_id(sender), args)


def pack_answer(node_id: bytes, token: bytes, body: Any) -> bytes:
    """The content of a reply, without a proof."""
    content: bytes = umsgpack.packb([node_id, token, body])
    return content


def unpack_answer(content: bytes) -> ReplyContent:
    """Raises Malformed."""
    data = unpack(content)
    if type(data) is not list or len(data) != 3 or type(data[1]) is not bytes or len(data[1]) != TOKEN_BYTES:
        raise Malformed("malformed_reply")
    return ReplyContent(node_id(data[0]), data[1], data[2])


def unpack(content: bytes) -> Any:
    """Raises Malformed."""
    try:
        return umsgpack.unpackb(content)
    except Exception:  # whatever a pure Python decoder raises on hostile bytes, a RecursionError included
        raise Malformed("malformed_msgpack") from None


assert MAX_KEY_BYTES + MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES + HEADER_BYTES + NODE_ID_BYTES + 48 < MAX_DATAGRAM_BYTES
