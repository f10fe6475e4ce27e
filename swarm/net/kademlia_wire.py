"""Bytes of the DHT's requests and replies inside rpcudp's framing: contacts, pages of records, and their limits.

Everything from the network is checked here before anyone acts on it. Must not know sockets or state.

Requests are `[name, [sender's id, ...]]`, replies `[answerer's id, body]`, both in msgpack:

    ping()                              -> the asker's address as seen here
    find_node(target id)                -> [contact, ...], nearest first
    find_value(key, after, with_nodes)  -> [[contact, ...], [record, ...], more]: records of peers above `after`
    store(key, record)                  -> "" or the reason for refusing

A contact is id, IP (4 or 16 bytes) and port, packed; a record is `[public key, payload, signature, remaining ms]`.
"""

from __future__ import annotations

import ipaddress
from typing import Any, NamedTuple

import umsgpack
from kademlia.node import Node

from swarm.net.kademlia_routing import NODE_ID_BYTES
from swarm.wire.records import MAX_KEY_BYTES, MAX_RECORD_BYTES, MAX_TTL_S, SignedRecord

#: No datagram reaches this size, whatever the reply.
MAX_DATAGRAM_BYTES = 1400
#: Type byte and message id of rpcudp.
HEADER_BYTES = 21
#: Room for the body of a reply: header, answerer's id and msgpack's own bytes taken off.
REPLY_BODY_BYTES = MAX_DATAGRAM_BYTES - HEADER_BYTES - NODE_ID_BYTES - 16
#: msgpack's own bytes and the remaining life around one record.
RECORD_OVERHEAD_BYTES = 16


class Malformed(ValueError):
    """A datagram that says nothing we understand; the text is the counter's name."""


class Page(NamedTuple):
    """A reply to `find_value`."""

    nodes: list[Node]
    records: list[tuple[SignedRecord, float]]
    #: There are records of peers above the last one here.
    more: bool


def pack_address(ip: str, port: int) -> bytes:
    return ipaddress.ip_address(ip).packed + port.to_bytes(2, "big")


def unpack_address(data: Any) -> tuple[str, int]:
    """Raises Malformed."""
    if type(data) is not bytes or len(data) not in (6, 18):
        raise Malformed("malformed_address")
    port = int.from_bytes(data[-2:], "big")
    if port == 0:
        raise Malformed("malformed_address")
    return str(ipaddress.ip_address(data[:-2])), port


def pack_node(node: Node) -> bytes:
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


def pack_datagram(kind: bytes, message_id: bytes, content: Any) -> bytes:
    datagram: bytes = kind + message_id + umsgpack.packb(content)
    return datagram


def unpack_content(datagram: bytes) -> Any:
    """Raises Malformed."""
    try:
        return umsgpack.unpackb(datagram[HEADER_BYTES:])
    except Exception:  # whatever a pure Python decoder raises on hostile bytes, a RecursionError included
        raise Malformed("malformed_msgpack") from None


assert MAX_KEY_BYTES + MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES + HEADER_BYTES + NODE_ID_BYTES + 32 < MAX_DATAGRAM_BYTES
