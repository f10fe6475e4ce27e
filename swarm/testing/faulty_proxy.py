"""Puts a network that breaks between processes of one machine: peers listen inside, are known outside, and meet here.

Every peer binds `inside:port` and advertises `outside:port`, both loopback addresses; `FaultyNetwork` listens outside on
TCP and UDP and forwards. It can cut a peer or a pair off, delay, reset connections, and lose replies after the request
was forwarded. Owns sockets and faults; must not know what a frame or a datagram means.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from swarm.net.ports import bind_tcp

#: The server side of a connection whose reply is being lost is drained for at most this long, in seconds.
DRAIN_S = 20.0


@dataclass(frozen=True)
class Place:
    """Where one peer listens, and where others find it."""

    name: str
    inside: str
    outside: str


@dataclass(eq=False)
class Fault:
    """One fault of the network while it lasts. `others` empty: `victim` and everybody."""

    kind: str
    victim: str
    others: frozenset[str] = frozenset()
    delay_s: float = 0.0
    #: Of the requests that arrive, this part loses its reply: the caller sees a reset or, if `silent`, nothing at all.
    part: float = 0.0
    silent: bool = False

    def cuts(self, source: str, target: str) -> bool:
        """Whether this fault keeps `source` and `target` apart."""
        if self.kind != "cut" or self.victim not in (source, target):
            return False
        return not self.others or source in self.others or target in self.others


class _End(asyncio.Protocol):
    """One of a connection's two sockets. Delivers what the other end received, after the delay of that moment."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.transport: asyncio.Transport | None = None
        #: Delayed data in order; empty data closes the connection.
        self._late: deque[bytes] = deque()
        self._reasons: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._reasons:
            transport.pause_reading()
        self._connection.made(self)

    def data_received(self, data: bytes) -> None:
        self._connection.received(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._connection.lost(self, is_orderly=exc is None)

    def pause_writing(self) -> None:
        self._connection.other(self).hold("full", True)

    def resume_writing(self) -> None:
        self._connection.other(self).hold("full", False)

    def hold(self, reason: str, on: bool) -> None:
        """Read nothing while there is a reason not to."""
        before = bool(self._reasons)
        (self._reasons.add if on else self._reasons.discard)(reason)
        if self.transport is not None and not self.transport.is_closing() and before != bool(self._reasons):
            (self.transport.pause_reading if self._reasons else self.transport.resume_reading)()

    def send(self, data: bytes, delay_s: float) -> None:
        if delay_s <= 0 and not self._late:
            self._write(data)
            return
        self._late.append(data)
        asyncio.get_running_loop().call_later(delay_s, lambda: self._write(self._late.popleft()))

    def _write(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if data:
            self.transport.write(data)
        else:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Connection:
    """A caller's connection to a peer, and the one from here to where the peer really listens."""

    def __init__(self, network: FaultyNetwork, target: Place) -> None:
        self._network = network
        self.target = target
        self.client, self.server = _End(self), _End(self)
        self.client.hold("not connected", True)
        #: Who calls; found out only while a cut makes it matter.
        self.source: str | None = None
        self._losing = False

    def other(self, end: _End) -> _End:
        return self.server if end is self.client else self.client

    def made(self, end: _End) -> None:
        if end is self.client:
            self._network.opened(self)

    def received(self, end: _End, data: bytes) -> None:
        network, name = self._network, self.target.name
        if end is self.client:
            fault = None if self._losing else network.loses_reply(name)
            self.server.send(data, network.delay_s(name))
            if fault is not None:
                self._lose(fault)
        elif not self._losing:
            self.client.send(data, network.delay_s(name))

    def _lose(self, fault: Fault) -> None:
        """The request goes through; nothing of its reply does, and the connection then breaks for the caller."""
        self._losing = True
        self._network.lost_replies += 1
        loop, rng = asyncio.get_running_loop(), self._network.rng
        loop.call_later(rng.uniform(5.0, 12.0) if fault.silent else rng.uniform(0.02, 0.5), self.client.abort)
        loop.call_later(DRAIN_S, self.close)

    def lost(self, end: _End, *, is_orderly: bool) -> None:
        if end is self.client and self._losing:
            return  # the peer goes on and answers, to nobody
        if end is self.server and is_orderly and not self._losing:
            self.client.send(b"", self._network.delay_s(self.target.name))  # after what it still has to deliver
            self._network.closed(self)
            return
        self.close()

    def close(self) -> None:
        """Break it at both ends."""
        self.client.abort()
        self.server.abort()
        self._network.closed(self)

    def hold(self, on: bool) -> None:
        self.client.hold("cut", on)
        self.server.hold("cut", on)


class _Datagrams(asyncio.DatagramProtocol):
    """The outside UDP socket of one peer."""

    def __init__(self, network: FaultyNetwork, place: Place) -> None:
        self._network = network
        self._place = place
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._network.datagram(self._place, data, addr[0])


class FaultyNetwork:
    """Listens at every outside address and forwards, with the faults of the moment.

    Args:
        places: the peers.
        port: the one port number of all.
        rng: draws which replies are lost.
        pid_of: process of a peer's name, to find out who holds the other end of a connection; None if it has none.
    """

    def __init__(self, places: list[Place], port: int, rng: random.Random, pid_of: Callable[[str], int | None]) -> None:
        self._places = {place.name: place for place in places}
        self._by_inside = {place.inside: place for place in places}
        self._port = port
        self.rng = rng
        self._pid_of = pid_of
        self._faults: list[Fault] = []
        self._connections: set[_Connection] = set()
        self._listeners: dict[str, asyncio.Server] = {}
        self._datagrams: dict[str, _Datagrams] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost_replies = 0

    async def start(self) -> None:
        """Listen at every outside address."""
        loop = asyncio.get_running_loop()
        for place in self._places.values():
            _, protocol = await loop.create_datagram_endpoint(
                partial(_Datagrams, self, place), local_addr=(place.outside, self._port)
            )
            self._datagrams[place.name] = protocol

    async def close(self) -> None:
        """Break all connections and listen no more."""
        for connection in list(self._connections):
            connection.close()
        for listener in self._listeners.values():
            listener.close()
        for protocol in self._datagrams.values():
            if protocol.transport is not None:
                protocol.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(self, name: str) -> None:
        """Take connections for a peer that is about to start."""
        if name not in self._listeners:
            place = self._places[name]
            self._listeners[name] = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self, place).client, sock=bind_tcp(place.outside, self._port), backlog=1024
            )

    def refuse(self, name: str) -> None:
        """The peer's process is gone: who calls it now is refused, as by its kernel."""
        listener = self._listeners.pop(name, None)
        if listener is not None:
            listener.close()

    # ------------------------------------------------------------------------------------------------ faults

    def begin(self, fault: Fault) -> None:
        """Let a fault work from now on."""
        self._faults.append(fault)
        self._apply_cuts()

    def end(self, fault: Fault) -> None:
        """Undo a fault."""
        self._faults.remove(fault)
        self._apply_cuts()

    def reset(self, name: str) -> None:
        """Break every connection to `name`."""
        for connection in [c for c in self._connections if c.target.name == name]:
            connection.close()

    def delay_s(self, target: str) -> float:
        """Seconds by which everything for `target` is late now."""
        return max((f.delay_s for f in self._faults if f.kind == "delay" and f.victim == target), default=0.0)

    def loses_reply(self, target: str) -> Fault | None:
        """The fault by which this reply of `target` is lost; None if it arrives."""
        for fault in self._faults:
            if fault.kind == "lost_replies" and fault.victim == target and self.rng.random() < fault.part:
                return fault
        return None

    def _apply_cuts(self) -> None:
        if not any(fault.kind == "cut" for fault in self._faults):
            for connection in self._connections:
                connection.hold(False)
            return
        owners = self._socket_owners()
        inodes = _inodes()
        for connection in self._connections:
            self._find_source(connection, inodes, owners)
            connection.hold(self._is_cut(connection.source or "", connection.target.name))

    def _is_cut(self, source: str, target: str) -> bool:
        return any(fault.cuts(source, target) for fault in self._faults)

    def _find_source(self, connection: _Connection, inodes: dict[tuple[str, int], str], owners: dict[str, str]) -> None:
        transport = connection.client.transport
        if connection.source is None and transport is not None:
            peer = transport.get_extra_info("peername")
            connection.source = owners.get(inodes.get(peer[:2], "")) if peer else None

    def _socket_owners(self) -> dict[str, str]:
        """Inode of each socket that a peer's process holds -> the peer's name."""
        owners = {}
        for name in self._places:
            pid = self._pid_of(name)
            try:
                descriptors = os.listdir(f"/proc/{pid}/fd") if pid is not None else []
            except OSError:
                continue
            for descriptor in descriptors:
                try:
                    link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                except OSError:
                    continue
                if link.startswith("socket:["):
                    owners[link[8:-1]] = name
        return owners

    # ------------------------------------------------------------------------------------------------ traffic

    def opened(self, connection: _Connection) -> None:
        """Take over a connection that somebody made to an outside address."""
        self._connections.add(connection)
        if any(fault.kind == "cut" for fault in self._faults):
            self._find_source(connection, _inodes(), self._socket_owners())
            connection.hold(self._is_cut(connection.source or "", connection.target.name))
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: _Connection) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection.server, connection.target.inside, self._port)
        except OSError:
            connection.close()
            return
        connection.client.hold("not connected", False)

    def closed(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)

    def datagram(self, place: Place, data: bytes, source_host: str) -> None:
        """From outside to the peer, or from the peer to where its answer belongs: addresses change as in a router."""
        source = self._by_inside.get(source_host)
        transport = None if source is None else self._datagrams[source.name].transport
        if source is None or transport is None or self._is_cut(source.name, place.name):
            return
        delay_s = max(self.delay_s(place.name), self.delay_s(source.name))

        def send() -> None:
            if not transport.is_closing():
                transport.sendto(data, (place.inside, self._port))

        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, send)
        else:
            send()


def _inodes() -> dict[tuple[str, int], str]:
    """Local address of each TCP socket of this machine -> its inode."""
    found = {}
    with open("/proc/net/tcp") as table:
        next(table)
        for line in table:
            words = line.split()
            host, port = words[1].split(":")
            found[socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)] = words[9]
    return found
