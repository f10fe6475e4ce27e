"""UDP in virtual time: an event loop whose datagram endpoints meet on a seeded network without sockets.

The real Kademlia code runs on it unchanged, so a thousand nodes fit one process and an hour takes seconds. Owns the
simulated links (loss, duplication, and reordering by uneven delays); must not know what the datagrams say.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterable
from typing import Any, cast

from swarm.testing.virtual_time import VirtualTimeLoop


class DatagramLoop(VirtualTimeLoop):
    """A virtual-time loop with a network of its own.

    Args:
        rng: decides losses, duplicates and delays; the same seed gives the same network.
        latency_s: one way, drawn evenly between the two: datagrams overtake each other.
        drop: probability that one datagram is lost.
        duplicate: probability that one that arrives does so twice.
    """

    def __init__(
        self, rng: random.Random, *, latency_s: tuple[float, float] = (0.001, 0.01), drop: float = 0.0, duplicate: float = 0.0
    ) -> None:
        super().__init__()
        self.rng = rng
        self.latency_s = latency_s
        self.drop = drop
        self.duplicate = duplicate
        self.endpoints: dict[tuple[str, int], MemoryDatagramTransport] = {}
        #: What reached the loop's exception handler; a test expects it empty.
        self.failures: list[dict[str, Any]] = []
        #: What names resolve to; others are not known, and one that stands for an empty string is looked up for ever.
        self.hosts: dict[str, str] = {}
        self._island: dict[tuple[str, int], int] = {}
        self._num_islands = 0
        self._next_port = 1024
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def bound_socket(self, host: str = "10.0.0.1", port: int | None = None) -> socket.socket:
        """Stands for a bound UDP socket, to be handed to whoever takes one."""
        if port is None:
            port, self._next_port = self._next_port, self._next_port + 1
        return cast(socket.socket, _MemorySocket(host, port))

    def isolate(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Cut these off from all others, but not from each other."""
        self._num_islands += 1
        self._island.update((tuple(address), self._num_islands) for address in addresses)  # type: ignore[misc]

    def heal(self) -> None:
        """Undo `isolate` for all."""
        self._island.clear()

    def connected(self, source: tuple[str, int], target: tuple[str, int]) -> bool:
        """Whether a datagram gets from `source` to `target`."""
        return self._island.get(source, 0) == self._island.get(target, 0)

    async def create_datagram_endpoint(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        """As a loop's method of this name, for a socket of this network."""
        protocol = protocol_factory()
        transport = MemoryDatagramTransport(self, sock, protocol)
        self.endpoints[sock.getsockname()] = transport
        protocol.connection_made(transport)
        return transport, protocol

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        """As a loop's method of this name; a host without an address never answers."""
        if host not in self.hosts:
            raise socket.gaierror(f"{host} is not known")
        if not self.hosts[host]:
            await asyncio.sleep(1e6)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (self.hosts[host], port))]


class _MemorySocket:
    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)
        self.family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        """As of asyncio's transport."""
        pass


class MemoryDatagramTransport(asyncio.DatagramTransport):
    """One endpoint."""

    def __init__(self, loop: DatagramLoop, sock: Any, protocol: Any) -> None:
        super().__init__()
        self._loop, self._sock, self.protocol = loop, sock, protocol
        self.closed = False
        #: Sizes of all that was sent, lost datagrams included.
        self.sent_sizes: list[int] = []

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of asyncio's transport."""
        return self._sock if name == "socket" else default

    def is_closing(self) -> bool:
        """As of asyncio's transport."""
        return self.closed

    def get_write_buffer_size(self) -> int:
        """As of asyncio's transport: nothing ever waits."""
        return 0

    def sendto(self, data: Any, addr: Any = None) -> None:
        """As of asyncio's transport."""
        loop, source = self._loop, self._sock.getsockname()
        self.sent_sizes.append(len(data))
        if loop.rng.random() < loop.drop or not loop.connected(source, addr):
            return
        for _ in range(2 if loop.duplicate and loop.rng.random() < loop.duplicate else 1):
            loop.call_later(loop.rng.uniform(*loop.latency_s), self._deliver, data, source, addr)

    def _deliver(self, data: bytes, source: tuple[str, int], address: tuple[str, int]) -> None:
        target = self._loop.endpoints.get(address)
        if target is not None and not target.closed and self._loop.connected(source, address):
            target.protocol.datagram_received(data, source)

    def abort(self) -> None:
        """As of asyncio's transport."""
        self.closed = True
        if self._loop.endpoints.get(self._sock.getsockname()) is self:
            del self._loop.endpoints[self._sock.getsockname()]

    def close(self) -> None:
        """As of asyncio's transport."""
        self.abort()
