"""The transport over HTTP/1.1: one POST path, a body that is one frame, an answer that is a stream of frames.

Puts the parts together: `server` and `client` own aiohttp's two sides, `frames` reads what they receive.
Bodies land in memory that is used again, and leave without being joined (`benchmarks/network/dataplane.py` has the figures).
"""

from __future__ import annotations

import socket

from swarm.base.buffers import Recycler
from swarm.base.errors import LinkBroken, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import MOVING_WINDOW_S, Admission, Bounds, ProgressTimeout, Waiting, parts_of
from swarm.net.http.client import HttpClient
from swarm.net.http.server import HttpServer, ServerLimits
from swarm.net.http.sockets import most_connections
from swarm.net.loop_meter import LoopMeter
from swarm.net.ports import bind_tcp
from swarm.net.transport import Handler, Progress, Transport
from swarm.wire.framing import Frame

_HEADER_S = 10.0
#: Memory of bodies that were let go, kept for the next ones.
_MAX_IDLE_BODIES = 32
_MAX_IDLE_BYTES = 256 * 2**20


class HttpTransport(Transport):
    """Serves and sends requests over HTTP/1.1 with kept-alive connections."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sock: socket.socket | None = None,
        connect_s: float = 2.0,
        heartbeat_s: float = 0.5,
        bounds: Bounds | None = None,
        header_s: float = _HEADER_S,
        moving_s: float = MOVING_WINDOW_S,
    ) -> None:
        """
        Args:
            host: where to listen, and the host in `address`.
            port: 0 picks a free one.
            sock: a listening socket to serve on instead (see `ports.bind_tcp_and_udp`); owned by the transport.
            connect_s: a connection must stand within this time.
            heartbeat_s: a served request sends its counter this often.
            bounds: what is taken in.
            header_s: a connection that has not sent complete HTTP headers within this time is dropped.
            moving_s: a transfer that brings less than 16 KiB in this time is dropped.
        """
        super().__init__()
        self._address = Address(host, port)
        self._sock = sock
        self._moving_s = moving_s
        bounds = bounds or Bounds()
        self._admission = Admission(bounds)
        self._limits = ServerLimits(
            heartbeat_s=heartbeat_s,
            header_s=header_s,
            moving_s=moving_s,
            max_connections=min(4 * bounds.max_open_requests, most_connections()),
        )
        self._client = HttpClient(
            connect_s=connect_s, moving_s=moving_s, max_body_bytes=bounds.max_body_bytes, allocate=lambda n: self.allocate(n)
        )
        self.allocate = Recycler(max_idle=_MAX_IDLE_BODIES, max_idle_bytes=_MAX_IDLE_BYTES).take
        self._server: HttpServer | None = None
        self._calls: dict[Waiting, None] = {}
        self._closed = False
        self._carried = (0, 0)
        self._loop_meter = LoopMeter()

    @property
    def loop_late_s(self) -> float | None:
        """The longest that the event loop was held up lately, in seconds."""
        return self._loop_meter.worst_s

    @property
    def address(self) -> Address:
        """Where it listens; the port is 0 before `start` if none was named."""
        return self._address

    @property
    def held_bytes(self) -> int:
        """Bytes of requests that are being received or served."""
        return self._admission.held_bytes

    def carried(self) -> tuple[int, int]:
        """Bytes sent and received over all connections so far."""
        looks = [*self._client.carried(), *(() if self._server is None else self._server.carried())]
        sent, received = self._carried
        self._carried = (sent + sum(look[0] for look in looks), received + sum(look[1] for look in looks))
        return self._carried

    async def start(self, handler: Handler) -> None:
        """Bind, unless a socket was given, and serve. See `Transport.start`."""
        if self._sock is None:
            self._sock = bind_tcp(*self._address)
        self._address = Address(self._address.host, self._sock.getsockname()[1])
        self._server = HttpServer(handler, self._admission, self._limits, allocate=lambda n: self.allocate(n), served=self.served)
        await self._server.start(self._sock)
        self._loop_meter.start()

    async def close(self) -> None:
        """End every call, stop serving and close every connection."""
        self._closed = True
        for call in list(self._calls):
            call.end(LinkBroken(f"{call.what}: this peer's transport was closed"))
        if self._server is not None:
            self._loop_meter.stop()
            await self._server.close()
        elif self._sock is not None:
            self._sock.close()
        await self._client.close()

    async def call(self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None) -> Frame:
        """Ask over a kept-alive connection. See `Transport.call`."""
        what = f"{request.message.kind} to {address}"
        if self._closed:
            raise Unreachable(f"{what}: this peer's transport is closed")
        progress_timeout = ProgressTimeout(stall_s=stall_s, window_s=self._moving_s)
        parts = parts_of(request)
        async with Waiting(progress_timeout, what) as waiting:
            self._calls[waiting] = None
            try:
                return await self._client.exchange(address, parts, progress_timeout, progress or Progress(), what)
            finally:
                del self._calls[waiting]
