"""A node's UDP socket, to which IPv4 is IPv4 though it may be dual-stack, and whose backlog is bounded.

Owns address families and what is not sent: too long, unreachable, or behind too much that waits. Must not know requests.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections import Counter
from typing import Any

from swarm.base.errors import InternalError
from swarm.net.kademlia.wire import MAX_DATAGRAM_BYTES

#: Datagrams are dropped, as a network would, while the socket's backlog is over this.
_MAX_BACKLOG_BYTES = 1 << 20


class DatagramSocket:
    """Sends nothing before `open`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._transport: Any = None
        self._is_v6 = False
        self._reaches_v4 = True

    def open(self, transport: Any) -> None:
        """Take asyncio's transport, once it stands."""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        self._is_v6 = sock.family == socket.AF_INET6
        self._reaches_v4 = not self._is_v6 or (
            sock.getsockname()[0] == "::" and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        )

    def reaches(self, ip: str) -> bool:
        """Whether the socket's address family can send to `ip`."""
        return self._is_v6 if ":" in ip else self._reaches_v4

    def send(self, datagram: bytes, address: tuple[str, int]) -> None:
        """Send one datagram, if `address` can be reached; it is dropped, and counted, where too many wait already."""
        if len(datagram) >= MAX_DATAGRAM_BYTES:
            raise InternalError(f"a datagram of {len(datagram)} bytes; pages and records must be cut smaller")
        transport = self._transport
        ip, port = address
        if transport is None or transport.is_closing() or not self.reaches(ip):
            return
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            self._counters["dropped_backlog"] += 1
            return
        self._counters["datagrams_out"] += 1
        self._counters["bytes_out"] += len(datagram)
        transport.sendto(datagram, (f"::ffff:{ip}" if self._is_v6 and ":" not in ip else ip, port))


def plain_address(address: tuple[Any, ...]) -> tuple[str, int]:
    """Host and port of a sender, as others know it."""
    return _plain_ip(address[0]), address[1]


@functools.lru_cache(maxsize=4096)
def _plain_ip(text: str) -> str:
    """IPv4 as itself, though a dual-stack socket shows it mapped into IPv6."""
    ip = ipaddress.ip_address(text.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)
