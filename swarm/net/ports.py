"""Listening sockets: one port number for TCP (HTTP) and UDP (DHT). Owns binding; must not know what is served there.

`0.0.0.0` listens on IPv4; `::` on both IPv6 and IPv4.
"""

from __future__ import annotations

import errno
import socket

from swarm.base.errors import ConfigError
from swarm.base.ids import Address

_ATTEMPTS = 64
_BACKLOG = 1024


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket, not blocking; port 0 picks one.

    Raises:
        ConfigError: naming the address, if it is taken or not ours.
    """
    family, address = _resolve(host, port)
    return _bind(host, family, socket.SOCK_STREAM, address)


def bind_udp(host: str, port: int) -> socket.socket:
    """A UDP socket, as `bind_tcp`."""
    family, address = _resolve(host, port)
    return _bind(host, family, socket.SOCK_DGRAM, address)


def bind_tcp_and_udp(host: str, port: int) -> tuple[socket.socket, socket.socket, int]:
    """A listening TCP and a UDP socket on the same port number, not blocking; port 0 picks one that is free for both.

    Raises:
        ConfigError: naming the address, if it is taken or not ours.
    """
    family, address = _resolve(host, port)
    for attempt in range(_ATTEMPTS):
        tcp = _bind(host, family, socket.SOCK_STREAM, address)
        picked = tcp.getsockname()[1]
        try:
            udp = _bind(host, family, socket.SOCK_DGRAM, (address[0], picked, *address[2:]))
        except ConfigError:
            tcp.close()
            if port or attempt == _ATTEMPTS - 1:
                raise
        else:
            return tcp, udp, picked
    raise AssertionError("unreachable")


def _resolve(host: str, port: int) -> tuple[int, tuple]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {Address(host, port)}: {error}; --host names an address of this machine") from None
    return found[0][0], found[0][4]


def _bind(host: str, family: int, kind: socket.SocketKind, address: tuple) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind == socket.SOCK_STREAM:
            # A restarted peer may take its old port at once; listening below keeps two peers from sharing it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if kind == socket.SOCK_STREAM:
            sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        protocol = "TCP" if kind == socket.SOCK_STREAM else "UDP"
        where = f"{protocol} {Address(host, address[1])}"
        hint = "choose another --port"
        if error.errno == errno.EADDRNOTAVAIL:
            hint = f"--host {host} is no address of this machine (0.0.0.0 is all that it has)"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; {hint}") from None
    return sock
