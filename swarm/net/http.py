"""The transport over HTTP: one POST path, a body that is one frame, a chunked answer that is a stream of frames.

Owns aiohttp, its connections and their deadlines. Must not know what a message means, except `Heartbeat` and `Refusal`.
Everything that a stranger can send is bounded before memory is taken for it: HTTP headers by `header_s`, a request's
size by its `Content-Length` (there must be one), the sum of all requests by `max_inflight_bytes`, a body's pace by
`moving_s`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import yarl
from aiohttp import web

from swarm.base.errors import LinkBroken, RemoteProtocolError, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import (
    MOVING_BYTES,
    MOVING_WINDOW_S,
    Admission,
    Patience,
    answer,
    beat_until_done,
    cancel,
    chunks_of,
    one_line,
    parts_of,
    wait_while_advancing,
)
from swarm.net.ports import bind_tcp
from swarm.net.transport import Handler, Progress, Transport
from swarm.policy.bandwidth import Meter
from swarm.wire.framing import MAX_BODY_BYTES, PREFIX, Frame, decode_header, decode_prefix, split_body
from swarm.wire.messages import Heartbeat, Refusal

logger = logging.getLogger(__name__)

PATH = "/v1"
#: A client drops an idle connection long before the server does, so that a request never meets one that just closed.
CLIENT_KEEPALIVE_S = 15.0
SERVER_KEEPALIVE_S = 75.0
#: A refused upload is drained for this long, so that the refusal arrives before the reset.
_LINGER_S = 2.0
_HEADER_S = 10.0
_READ_BYTES = 512 * 2**10
_MAX_HEARTBEAT_BYTES = 4096
#: A reply below this size leaves in one packet with its headers.
_ONE_WRITE_BYTES = 64 * 2**10


class _Refused(Exception):
    """The request is refused by the transport itself; not a handler's doing."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.status = status
        self.refusal = refusal


def _bad_request(status: int, reason: str) -> _Refused:
    return _Refused(status, Refusal(code="bad_request", reason=reason[:2000]))


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
        max_body_bytes: int = MAX_BODY_BYTES,
        max_inflight_bytes: int = 2 * MAX_BODY_BYTES,
        max_open_requests: int = 1024,
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
            max_body_bytes: bound of one request, and of one reply.
            max_inflight_bytes: bound of all requests being received or served; over it callers are told `busy`.
            max_open_requests: bound of requests being received or served; over it callers are told `busy`.
            header_s: a connection that has not sent complete HTTP headers within this time is dropped.
            moving_s: a transfer that brings less than 16 KiB in this time is dropped.
        """
        self._address = Address(host, port)
        self._sock = sock
        self._connect_s = connect_s
        self._heartbeat_s = heartbeat_s
        self._max_body_bytes = max_body_bytes
        self._admission = Admission(
            max_body_bytes=max_body_bytes, max_inflight_bytes=max_inflight_bytes, max_open_requests=max_open_requests
        )
        self._max_connections = 4 * max_open_requests
        self._header_s = header_s
        self._moving_s = moving_s
        self._handler: Handler | None = None
        self._server: _Server | None = None
        self._listener: asyncio.Server | None = None
        self._session: aiohttp.ClientSession | None = None
        self._exchanges: dict[asyncio.Task[Frame], None] = {}
        self._closed = False
        super().__init__()
        self.upload = Meter(self._unsent)
        #: Sockets that requests leave by.
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def _unsent(self) -> int:
        """Bytes that were handed to the kernel and that no other end has acknowledged."""
        accepted = self._server.connections if self._server is not None else []
        sockets = [c.transport.get_extra_info("socket") for c in accepted if c.transport is not None]
        return sum(_queued(sock.fileno()) for sock in (*sockets, *self._sockets))

    @property
    def address(self) -> Address:
        return self._address

    @property
    def held_bytes(self) -> int:
        """Bytes of requests that are being received or served."""
        return self._admission.held_bytes

    async def start(self, handler: Handler) -> None:
        self._handler = handler
        if self._sock is None:
            self._sock = bind_tcp(*self._address)
        self._address = Address(self._address.host, self._sock.getsockname()[1])
        self._server = _Server(
            self._serve, header_s=self._header_s, moving_s=self._moving_s, max_connections=self._max_connections
        )
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, sock=self._sock, backlog=1024)

    async def close(self) -> None:
        self._closed = True
        for exchange in list(self._exchanges):
            exchange.cancel()
        if self._listener is not None and self._server is not None:
            self._listener.close()
            await self._server.abort()
            await self._listener.wait_closed()
        elif self._sock is not None:
            self._sock.close()
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # the transports' own close callbacks

    # -------------------------------------------------------------------------------------------- sending

    async def call(
        self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None
    ) -> Frame:
        what = f"{request.message.kind} to {address}"
        if self._closed:
            raise Unreachable(f"{what}: this peer's transport is closed")
        patience = Patience(stall_s=stall_s, window_s=self._moving_s)
        upload = _Upload(parts_of(request), patience, progress or Progress(), self.upload)
        exchange = asyncio.create_task(self._exchange(address, upload, patience, progress or Progress(), what))
        self._exchanges[exchange] = None
        try:
            return await wait_while_advancing(exchange, patience, what)
        finally:
            del self._exchanges[exchange]
            await cancel(exchange)

    async def _exchange(
        self, address: Address, upload: _Upload, patience: Patience, progress: Progress, what: str
    ) -> Frame:
        try:
            response = await self._client().post(
                yarl.URL.build(scheme="http", host=address.host, port=address.port, path=PATH),
                data=upload,
                headers={"Content-Length": str(upload.num_bytes), "Content-Type": "application/octet-stream"},
                allow_redirects=False,
            )
            reusable = False
            try:
                result = await self._result(response, patience, progress)
                reusable = upload.complete and await _ended(response.content)
                return result
            finally:
                if reusable:
                    response.release()
                else:
                    _hang_up(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise Unreachable(f"{what}: {one_line(error)}") from None
        except aiohttp.ClientResponseError as error:
            raise RemoteProtocolError(f"{what}: {one_line(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise LinkBroken(f"{what}: {one_line(error)}") from None
        except (ValueError, UnicodeError) as error:  # a host that no URL can hold
            raise Unreachable(f"{what}: {one_line(error)}") from None

    async def _result(self, response: aiohttp.ClientResponse, patience: Patience, progress: Progress) -> Frame:
        """Read frames until the first that is no heartbeat."""
        loop = asyncio.get_running_loop()
        reader = _FrameReader(
            response.content, patience, progress, max_body_bytes=self._max_body_bytes, allocate=self.allocate,
            meter=self.download,
        )  # fmt: skip
        counter = 0
        while True:
            frame = await reader.read()
            if not isinstance(frame.message, Heartbeat):
                return frame
            if frame.message.counter > counter:
                counter = frame.message.counter
                patience.advance(loop.time())
                progress.advance()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=CLIENT_KEEPALIVE_S,
                socket_factory=lambda info: self._socket(info),
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_s, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=_READ_BYTES,
            )
        return self._session

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        sock = _impatient(socket.socket(*info[:3]), self._moving_s)
        self._sockets.add(sock)
        return sock

    # -------------------------------------------------------------------------------------------- serving

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.serve(True)
        reply = _Reply(request, self._moving_s, self.upload)
        try:
            await self._answer(request, reply)
        except _Refused as refused:
            await reply.end(parts_of(Frame(refused.refusal)), status=refused.status)
        except TimeoutError:
            connection.abort()  # the caller does not read its answer
        finally:
            connection.serve(False)
        return reply.response

    async def _answer(self, request: web.BaseRequest, reply: _Reply) -> None:
        """Admit, receive and handle one request, and write its answer.

        Raises:
            _Refused: if it is not handed to the handler.
        """
        num_bytes = self._admit(request)
        try:
            progress = Progress((request.remote or "").removeprefix("::ffff:"))
            patience = Patience(stall_s=self._moving_s, window_s=self._moving_s)
            reader = _FrameReader(
                request.content, patience, progress, max_body_bytes=self._admission.max_body_bytes,
                allocate=self.allocate, meter=self.download,
            )  # fmt: skip
            received = asyncio.Event()
            loop = asyncio.get_running_loop()

            async def beat() -> None:
                if not received.is_set() and loop.time() >= patience.deadline:
                    raise _bad_request(408, patience.reason(loop.time()))
                if reader.head_valid:  # before that a refusal may still have its own status
                    await reply.beat(progress.count)

            work = asyncio.create_task(self._work(reader, num_bytes, received, progress))
            await reply.end(await beat_until_done(work, self._heartbeat_s, beat))
        finally:
            self._admission.release(num_bytes)

    def _admit(self, request: web.BaseRequest) -> int:
        """Judge a request by its HTTP headers alone, and reserve room for its body."""
        if request.path != PATH:
            raise _bad_request(404, f"there is only {PATH}")
        if request.method != "POST":
            raise _bad_request(405, "there is only POST")
        num_bytes = request.content_length
        if num_bytes is None:
            raise _bad_request(411, "a request must tell its Content-Length")
        if num_bytes < PREFIX.size:
            raise _bad_request(400, f"{num_bytes} bytes are too few for a frame")
        refusal = self._admission.admit(num_bytes)
        if refusal is not None:
            raise _Refused(429 if refusal.code == "busy" else 413, refusal)
        return num_bytes

    async def _work(
        self, reader: _FrameReader, num_bytes: int, received: asyncio.Event, progress: Progress
    ) -> list[memoryview]:
        try:
            frame = await reader.read(whole=num_bytes)
        except RemoteProtocolError as error:
            raise _bad_request(400, str(error)) from None
        except (aiohttp.ClientError, web.RequestPayloadError, OSError) as error:
            raise _bad_request(400, one_line(error)) from None
        received.set()
        assert self._handler is not None
        return await answer(self._handler, frame, progress)


class _Upload:
    """The body of one request: chunks of its parts, uncopied, counted as they leave."""

    def __init__(self, parts: Sequence[memoryview], patience: Patience, progress: Progress, meter: Meter) -> None:
        self._meter = meter
        self._parts = parts
        self._patience = patience
        self._progress = progress
        self.num_bytes = sum(len(part) for part in parts)
        self.complete = False

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        loop = asyncio.get_running_loop()
        self._patience.open(loop.time())
        self._meter.opened(loop.time())
        try:
            for chunk in chunks_of(self._parts):
                yield chunk
                self._patience.moved(loop.time(), len(chunk))
                self._progress.moved(len(chunk))
                self._meter.moved(loop.time(), len(chunk))
        finally:
            self._meter.closed(loop.time())
        self._patience.shut(loop.time())
        self.complete = True


class _FrameReader:
    """Reads frames from a stream, each into one buffer that is taken once its size is known to be right."""

    def __init__(
        self, content: aiohttp.StreamReader, patience: Patience, progress: Progress, *, max_body_bytes: int,
        allocate: Callable[[int], memoryview], meter: Meter,
    ) -> None:  # fmt: skip
        self._allocate = allocate
        self._meter = meter
        self._content = content
        self._patience = patience
        self._progress = progress
        self._max_body_bytes = max_body_bytes
        self._loop = asyncio.get_running_loop()
        #: True once a frame's header was found valid.
        self.head_valid = False

    async def read(self, *, whole: int | None = None) -> Frame:
        """The next frame; `whole` is its size if that is known.

        Raises:
            RemoteProtocolError: if the bytes are no valid frame.
        """
        if whole is not None:
            self._patience.open(self._loop.time())
        prefix = decode_prefix(await self._take(PREFIX.size), max_body_bytes=self._max_body_bytes)
        size = PREFIX.size + prefix.header_bytes + prefix.body_bytes
        if whole not in (None, size):
            raise RemoteProtocolError(f"frame of {size} bytes came with {whole}")
        if size > _MAX_HEARTBEAT_BYTES:
            self._patience.open(self._loop.time())
        message = decode_header(await self._take(prefix.header_bytes, size > _MAX_HEARTBEAT_BYTES), prefix)
        if isinstance(message, Heartbeat) and size > _MAX_HEARTBEAT_BYTES:
            raise RemoteProtocolError(f"heartbeat of {size} bytes")
        self.head_valid = True
        frame = split_body(message, await self._take(prefix.body_bytes, size > _MAX_HEARTBEAT_BYTES))
        if whole is not None or size > _MAX_HEARTBEAT_BYTES:
            self._patience.shut(self._loop.time())
        return frame

    async def _take(self, num_bytes: int, counts: bool = False) -> memoryview:
        """Exactly `num_bytes`; they count as movement unless they may belong to a heartbeat that says nothing new."""
        buffer = self._allocate(num_bytes)
        filled = 0
        if counts:
            self._meter.opened(self._loop.time())
        try:
            while filled < num_bytes:
                chunk = await self._content.read(num_bytes - filled)
                if not chunk:
                    raise RemoteProtocolError(f"a frame ended {num_bytes - filled} bytes early")
                buffer[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
                if counts:
                    now = self._loop.time()
                    self._patience.moved(now, len(chunk))
                    self._progress.moved(len(chunk))
                    self._meter.moved(now, len(chunk))
        finally:
            if counts:
                self._meter.closed(self._loop.time())
        return buffer


class _Reply:
    """The answer to one request; HTTP headers leave with the first frame."""

    def __init__(self, request: web.BaseRequest, moving_s: float, meter: Meter) -> None:
        self._request = request
        self._meter = meter
        self._moving_s = moving_s
        self.response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        self.response.enable_chunked_encoding()

    async def beat(self, counter: int) -> None:
        await self.response.prepare(self._request)
        for part in parts_of(Frame(Heartbeat(counter=counter))):
            await self._write(part)

    async def end(self, parts: Sequence[memoryview], *, status: int = 200) -> None:
        """Write the result. A `status` other than 200 also ends the connection.

        Raises:
            TimeoutError: if the caller takes less than 16 KiB in `moving_s`.
        """
        if status != 200:
            self.response.force_close()
            if not self.response.prepared:
                self.response.set_status(status)
        await self.response.prepare(self._request)
        if sum(len(part) for part in parts) <= _ONE_WRITE_BYTES:
            await self.response.write_eof(b"".join(parts))
            return
        loop = asyncio.get_running_loop()
        self._meter.opened(loop.time())
        try:
            for chunk in chunks_of(parts):
                await self._write(chunk)
                self._meter.moved(loop.time(), len(chunk))
        finally:
            self._meter.closed(loop.time())
        async with asyncio.timeout(self._moving_s):
            await self.response.write_eof()

    async def _write(self, chunk: memoryview) -> None:
        async with asyncio.timeout(self._moving_s * (1 + len(chunk) / MOVING_BYTES)):
            await self.response.write(chunk)


class _Server(web.Server):
    """Makes `_Connection`s."""

    def __init__(self, serve: Any, *, header_s: float, moving_s: float, max_connections: int) -> None:
        super().__init__(
            serve,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=SERVER_KEEPALIVE_S,
            lingering_time=_LINGER_S,
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
        )
        self.header_s = header_s
        self.moving_s = moving_s
        self.max_connections = max_connections

    def __call__(self) -> _Connection:
        return _Connection(self, **self._kwargs)

    async def abort(self) -> None:
        """Drop every connection, which cancels what is served on it, and wait for that."""
        for connection in self.connections:
            assert isinstance(connection, _Connection)
            connection.abort()
        await asyncio.sleep(0)
        await self.shutdown(1.0)


class _Connection(web.RequestHandler):
    """One accepted connection: dropped unless a request's HTTP headers are complete `header_s` after they begin."""

    def __init__(self, server: _Server, **kwargs: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **kwargs)
        self._limits = server
        self._headers_due: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._limits.connections) > self._limits.max_connections:
            self.abort()
            return
        _impatient(transport.get_extra_info("socket"), self._limits.moving_s)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_serving:
            self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def serve(self, is_serving: bool) -> None:
        """A request's headers are complete, or its answer is."""
        self._is_serving = is_serving
        self._forget_deadline()

    def abort(self) -> None:
        """Drop the connection without flushing what is buffered."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """What strangers send is no news for the log: handlers' failures are told by `answer`."""
        logger.debug(*args, **kwargs)

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = asyncio.get_running_loop().call_later(self._limits.header_s, self.abort)

    def _forget_deadline(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


def _queued(fd: int) -> int:
    """Bytes in a socket's send queue that are not acknowledged; 0 if it is closed or the system does not tell."""
    try:
        return struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0" * 4))[0]
    except (OSError, ValueError):
        return 0


def _impatient(sock: Any, moving_s: float) -> Any:
    """Have the kernel end a connection whose other end takes nothing for `moving_s` (dead, stopped or cut off)."""
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(moving_s * 1000)))
    return sock


async def _ended(content: aiohttp.StreamReader) -> bool:
    """Whether the stream ends here, so that its connection may be used again."""
    try:
        async with asyncio.timeout(1.0):
            return not await content.read(1)
    except TimeoutError:
        return False


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Close the connection at once: what is not sent yet shall not be, and the server drops the work."""
    connection = response.connection
    if connection is not None and isinstance(connection.transport, asyncio.Transport):
        connection.transport.abort()
    response.close()
