"""A network of a given rate and delay between processes of one machine: peers listen inside, are known outside.

Every peer binds `inside:port` and advertises `outside:port`, both loopback addresses. The proxy listens outside on TCP and
UDP and forwards. Each peer has one line: what goes to it shares the rate of its way in, what comes back that of its way
out, and every byte arrives `delay_s` after it left. Runs in a process of its own (`Shaper`), so that its work is not the
measured processes'. Owns sockets and time; must not know what it carries.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

#: Seconds of data that wait in a line's buffer before its sender has to.
_BUFFER_S = 0.05
_READ_BYTES = 2**18


@dataclass(frozen=True)
class Line:
    """How one peer is connected; rates in bytes per second, None for no limit."""

    inside: str
    outside: str
    down: float | None = None
    up: float | None = None


class _Way:
    """One direction of one line: a moment until which it is taken."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self.num_bytes = 0

    def leave_at(self, num_bytes: int, now: float) -> float:
        """When the last of `num_bytes` that come now has left the sender's end."""
        self.num_bytes += num_bytes
        if self._rate is None:
            return now
        self._free_at = max(now, self._free_at) + num_bytes / self._rate
        return self._free_at


class _End(asyncio.BufferedProtocol):
    """One of a connection's two sockets; `other` gets what arrives here, over `way`."""

    def __init__(self, network: _Network, way: _Way) -> None:
        self._network = network
        self._way = way
        self._buffer = bytearray(_READ_BYTES)
        self.other: _End
        self.transport: asyncio.Transport | None = None
        #: (arrives at, data) in order; no data closes the connection.
        self._coming: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_full = self._is_late = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=2**21)
        self._pace()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        leaves_at = self._way.leave_at(nbytes, now)
        self.other.deliver(leaves_at + self._network.delay_s, bytes(memoryview(self._buffer)[:nbytes]))
        if leaves_at > now + _BUFFER_S and not self._is_late:
            self._is_late = True
            self._pace()
            loop.call_at(leaves_at - _BUFFER_S, self._in_time)

    def _in_time(self) -> None:
        self._is_late = False
        self._pace()

    def pause_writing(self) -> None:
        self.other.set_full(True)

    def resume_writing(self) -> None:
        self.other.set_full(False)

    def set_full(self, is_full: bool) -> None:
        """The other end cannot write for now."""
        self._is_full = is_full
        self._pace()

    def _pace(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            (self.transport.pause_reading if self._is_full or self._is_late else self.transport.resume_reading)()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.other.deliver(asyncio.get_running_loop().time() + self._network.delay_s, b"")

    def deliver(self, at: float, data: bytes) -> None:
        self._coming.append((max(at, self._coming[-1][0]) if self._coming else at, data))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._coming[0][0], self._arrive)

    def _arrive(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time() + 1e-4
        while self._coming and self._coming[0][0] <= now:
            _, data = self._coming.popleft()
            if self.transport is None or self.transport.is_closing():
                continue
            if data:
                self.transport.write(data)
            else:
                self.transport.close()
        self._timer = loop.call_at(self._coming[0][0], self._arrive) if self._coming else None


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, network: _Network, line: Line) -> None:
        self._network = network
        self._line = line
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._network.datagram(self._line, data, addr[0])


class _Network:
    def __init__(self, lines: Sequence[Line], port: int) -> None:
        self._lines = lines
        self._port = port
        self.delay_s = 0.0
        self.ways = {line.outside: (_Way(line.down), _Way(line.up)) for line in lines}
        self._datagrams: dict[str, _Datagrams] = {}

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for line in self._lines:
            _, protocol = await loop.create_datagram_endpoint(
                partial(_Datagrams, self, line), local_addr=(line.outside, self._port)
            )
            self._datagrams[line.inside] = protocol
            await loop.create_server(partial(self._accept, line), line.outside, self._port, backlog=1024)

    def _accept(self, line: Line) -> _End:
        down, up = self.ways[line.outside]
        client, server = _End(self, down), _End(self, up)
        client.other, server.other = server, client
        client.set_full(True)
        asyncio.get_running_loop().create_task(self._connect(line, client, server))
        return client

    async def _connect(self, line: Line, client: _End, server: _End) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: server, line.inside, self._port)
        except OSError:
            if client.transport is not None:
                client.transport.abort()
            return
        client.set_full(False)

    def datagram(self, line: Line, data: bytes, source: str) -> None:
        """From outside to the peer, with the sender's outside address as in a router."""
        sender = self._datagrams.get(source)
        transport = sender.transport if sender is not None else None
        if transport is None:
            return

        def deliver() -> None:
            if not transport.is_closing():
                transport.sendto(data, (line.inside, self._port))

        asyncio.get_running_loop().call_later(self.delay_s, deliver)


async def _serve(lines: Sequence[Line], port: int) -> None:
    network = _Network(lines, port)
    await network.start()
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print(json.dumps("ready"), flush=True)
    while order := await orders.readline():
        network.delay_s = float(json.loads(order))
        carried = {outside: (down.num_bytes, up.num_bytes) for outside, (down, up) in network.ways.items()}
        print(json.dumps(carried), flush=True)


class Shaper:
    """The proxy as a process. Use as a context manager."""

    def __init__(self, lines: Sequence[Line], port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, json.dumps([asdict(line) for line in lines]), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def set_delay(self, delay_s: float) -> dict[str, tuple[int, int]]:
        """Delay each way from now on; returns bytes carried so far to and from each outside address."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(delay_s) + "\n")
        self._process.stdin.flush()
        return {outside: (down, up) for outside, (down, up) in self._read().items()}

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the shaping proxy did not start")
        return json.loads(line)

    def __enter__(self) -> Shaper:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


if __name__ == "__main__":
    asyncio.run(_serve([Line(**line) for line in json.loads(sys.argv[1])], int(sys.argv[2])))
