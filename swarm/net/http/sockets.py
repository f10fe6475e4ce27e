"""What the HTTP transport sets on its connections' sockets, and asks them. Must not know HTTP or messages."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import sys
import weakref

_TCP_INFO_BYTES, _TCP_INFO_ACKED = 136, 120


def most_connections() -> int:
    """Half of the files that this process may have open; the others are its own requests', the DHT's and on disk."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2


def prepare(transport: asyncio.Transport, *, moving_s: float) -> None:
    """Write only what the kernel takes, and have it end a connection whose other end takes nothing for `moving_s`.

    (It is dead, stopped or cut off.)
    """
    transport.set_write_buffer_limits(high=0)
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(moving_s * 1000)))


class SocketLinks:
    """A set of connections, and what the kernel counts on them; those that are closed leave it by themselves.

    Args:
        moving_s: see `prepare`.
    """

    def __init__(self, *, moving_s: float) -> None:
        self._moving_s = moving_s
        self._seen: weakref.WeakKeyDictionary[asyncio.Transport, tuple[int, int]] = weakref.WeakKeyDictionary()

    def add(self, transport: asyncio.Transport) -> None:
        """Prepare this connection and count it too, from its beginning; a second time does nothing."""
        if transport not in self._seen:
            prepare(transport, moving_s=self._moving_s)
            self._seen[transport] = (0, 0)

    def carried(self) -> list[tuple[int, int]]:
        """Bytes of each that were sent and acknowledged, and received, since the last look; none where nobody tells."""
        looks = []
        for transport, before in list(self._seen.items()):
            now = _counted(transport)
            if now is not None:
                self._seen[transport] = now
                looks.append((now[0] - before[0], now[1] - before[1]))
        return looks


def _counted(transport: asyncio.Transport) -> tuple[int, int] | None:
    """`tcpi_bytes_acked` and `tcpi_bytes_received` of Linux's `tcp_info`."""
    sock = transport.get_extra_info("socket")
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        sent, received = struct.unpack_from("QQ", info, _TCP_INFO_ACKED)
    except (OSError, AttributeError, struct.error):
        return None
    return sent, received
