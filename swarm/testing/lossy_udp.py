"""A bad network between real UDP sockets of one machine: proxies that lose, repeat and delay datagrams.

For tests and `benchmarks/`. Each node gets a public address, and all that others send there reaches it through a proxy
that also makes the sender appear under its own public address; so nodes only ever learn of public addresses.
"""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

from swarm.base.ids import Address


class LossyUdp:
    """Proxies of some nodes; loopback only.

    Args:
        rng: decides what happens to each datagram.
        drop: probability that one datagram is lost, each way.
        duplicate: probability that one that arrives does so twice.
        delay_s: drawn evenly up to this; datagrams overtake each other.
    """

    def __init__(self, rng: random.Random, *, drop: float, duplicate: float, delay_s: float) -> None:
        self._rng = rng
        self._drop = drop
        self._duplicate = duplicate
        self._delay_s = delay_s
        self._proxy_of: dict[tuple[str, int], _Proxy] = {}
        self.num_dropped = 0
        self.num_passed = 0

    async def public_address_of(self, private: Address) -> Address:
        """Opens the proxy of the node that is bound to `private`."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        _, proxy = await loop.create_datagram_endpoint(lambda: _Proxy(self, private), sock=sock)
        self._proxy_of[private] = proxy
        return Address(*sock.getsockname())

    def carry(self, data: bytes, sender: tuple[str, int], receiver: tuple[str, int]) -> None:
        """Bring what `sender` (a private address) sent to a proxy to its node, in the name of the sender's proxy."""
        proxy = self._proxy_of.get(sender)
        if proxy is None:
            return
        if self._rng.random() < self._drop:
            self.num_dropped += 1
            return
        self.num_passed += 1
        loop = asyncio.get_running_loop()
        for _ in range(2 if self._rng.random() < self._duplicate else 1):
            loop.call_later(self._rng.uniform(0, self._delay_s), proxy.send, data, receiver)

    def close(self) -> None:
        """Close the socket."""
        for proxy in self._proxy_of.values():
            proxy.transport.close()


class _Proxy(asyncio.DatagramProtocol):
    transport: asyncio.DatagramTransport

    def __init__(self, network: LossyUdp, private: Address) -> None:
        self._network = network
        self._private = private

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._network.carry(data, addr[:2], self._private)

    def send(self, data: bytes, receiver: tuple[str, int]) -> None:
        if not self.transport.is_closing():
            self.transport.sendto(data, receiver)
