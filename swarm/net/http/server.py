"""The serving side of the HTTP transport: accepts, admits, hands frames to the handler, streams heartbeats and the result.

Everything that a stranger can send is bounded before memory is taken for it. A head must be complete within `header_s`, and
aiohttp bounds its size. A request says its size in `Content-Length`, at most `max_body_bytes` (`transport.py`). All requests
together are bounded by `Admission` (`net/exchange.py`). A body that moves too slowly ends by `ProgressTimeout`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, web

from swarm.base.errors import RemoteProtocolError
from swarm.net.exchange import (
    MAX_HEARTBEAT_BYTES,
    MOVING_BYTES,
    Admission,
    Beating,
    ProgressTimeout,
    answer,
    chunks_of,
    one_line,
    parts_of,
)
from swarm.net.http.frames import Body, FrameReader
from swarm.net.http.sockets import SocketLinks
from swarm.net.transport import Handler, Progress
from swarm.wire.framing import PREFIX, Frame
from swarm.wire.messages import Heartbeat, Refusal

logger = logging.getLogger(__name__)

PATH = "/v1"
#: The library holds about twice this much of a body that nobody takes.
READ_BYTES = 2**20
#: An idle connection lives this long; a client drops it long before, so that no request meets one that just closed.
KEEPALIVE_S = 75.0
#: What comes after a refusal is taken in for this long, so that the refusal arrives before the reset.
_LINGER_S = 2.0
#: Connections that wait at the kernel.
_BACKLOG = 1024
#: Accepted in one turn of the event loop; what is too many is dropped some turns later.
_ACCEPTED_AT_ONCE = 4
#: Characters of what is answered to bytes that are no HTTP.
_MAX_REASON = 200
_SHUTDOWN_S = 1.0


class _Refused(Exception):
    """The request is refused by the transport itself; not a handler's doing."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.status = status
        self.refusal = refusal


def _bad_request(status: int, reason: str) -> _Refused:
    return _Refused(status, Refusal(code="bad_request", reason=reason[:2000]))


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Deadlines and bounds of a server, see `HttpTransport`."""

    heartbeat_s: float
    header_s: float
    moving_s: float
    max_connections: int


class HttpServer:
    """Serves one listening socket."""

    def __init__(
        self,
        handler: Handler,
        admission: Admission,
        limits: ServerLimits,
        *,
        allocate: Callable[[int], memoryview],
        served: Progress,
    ) -> None:
        self._handler = handler
        self._admission = admission
        self._limits = limits
        self._allocate = allocate
        self._served = served
        self._listener: asyncio.Server | None = None
        self._callers = _Callers(self._serve, limits)
        self._serving: dict[asyncio.Task[Any], None] = {}

    def carried(self) -> list[tuple[int, int]]:
        """Bytes that each connection has sent and received since the last look."""
        return self._callers.links.carried()

    async def start(self, sock: socket.socket) -> None:
        """Serve on `sock`, which listens already."""
        loop = asyncio.get_running_loop()
        # The loop accepts as many at once as this says, each a file, and if there are none left it logs that so many times.
        self._listener = await loop.create_server(self._callers, sock=sock, backlog=_ACCEPTED_AT_ONCE)
        sock.listen(_BACKLOG)

    async def close(self) -> None:
        """Drop every connection, which cancels what is served on it, and return once that has ended."""
        assert self._listener is not None
        self._listener.close()
        for transport in self._callers.transports():
            transport.abort()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)
        await self._callers.shutdown(_SHUTDOWN_S)
        await self._listener.wait_closed()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        task, caller = asyncio.current_task(), request.protocol
        assert task is not None
        assert isinstance(caller, _Caller)
        self._serving[task] = None
        caller.serve(True)
        reply = _Reply(request, self._limits.moving_s)
        try:
            await self._answer(request, reply)
        except _Refused as refused:
            await reply.end(parts_of(Frame(refused.refusal)), status=refused.status)
        except TimeoutError:
            caller.abort()  # it does not read its answer
        finally:
            caller.serve(False)
            del self._serving[task]
        return reply.response

    async def _answer(self, request: web.BaseRequest, reply: _Reply) -> None:
        """Admit, receive and handle one request, and write its answer.

        Raises:
            _Refused: if it is not handed to the handler.
            TimeoutError: if the caller does not read its answer.
        """
        num_bytes = self._admit(request)
        try:
            progress = Progress((request.remote or "").removeprefix("::ffff:"), among=self._served)
            progress_timeout = ProgressTimeout(stall_s=self._limits.moving_s, window_s=self._limits.moving_s)
            reader = FrameReader(
                Body(request.content),
                progress_timeout,
                progress,
                max_body_bytes=self._admission.max_body_bytes,
                allocate=self._allocate,
            )
            received = asyncio.Event()
            loop = asyncio.get_running_loop()

            async def beat() -> None:
                if not received.is_set() and loop.time() >= progress_timeout.deadline:
                    raise _bad_request(408, progress_timeout.reason(loop.time()))
                if reader.head_valid:  # before that a refusal may still have its own status
                    await reply.beat(progress.count)

            async with Beating(self._limits.heartbeat_s, beat):
                parts = await self._work(reader, num_bytes, received, progress)
            await reply.end(parts, moved=progress.moved)
        finally:
            self._admission.release(num_bytes)

    def _admit(self, request: web.BaseRequest) -> int:
        """Judge a request by its HTTP head alone, and reserve room for its body."""
        if request.version != HttpVersion11:
            raise _bad_request(505, "there is only HTTP/1.1")
        if request.path != PATH:
            raise _bad_request(404, f"there is only {PATH}")
        if request.method != "POST":
            raise _bad_request(405, "there is only POST")
        if "Origin" in request.headers:  # a browser adds it: any page open on this machine could operate the run
            raise _bad_request(403, "web pages are not served")
        num_bytes = request.content_length
        if num_bytes is None:
            raise _bad_request(411, "a request must tell its Content-Length")
        if num_bytes < PREFIX.size:
            raise _bad_request(400, f"{num_bytes} bytes are too few for a frame")
        refusal = self._admission.admit(num_bytes)
        if refusal is not None:
            raise _Refused(429 if refusal.code == "busy" else 413, refusal)
        return num_bytes

    async def _work(self, reader: FrameReader, num_bytes: int, received: asyncio.Event, progress: Progress) -> list[memoryview]:
        try:
            frame = await reader.read(whole=num_bytes)
        except RemoteProtocolError as error:
            raise _bad_request(400, str(error)) from None
        except (web.RequestPayloadError, OSError) as error:
            raise _bad_request(400, one_line(error)) from None
        received.set()
        return await answer(self._handler, frame, progress)


class _Callers(web.Server):
    """The accepted connections."""

    def __init__(self, serve: Any, limits: ServerLimits) -> None:
        super().__init__(
            serve,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=_LINGER_S,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
        )
        self.limits = limits
        self.links = SocketLinks(moving_s=limits.moving_s)

    def __call__(self) -> _Caller:
        return _Caller(self, **self._kwargs)

    def transports(self) -> list[asyncio.Transport]:
        return [caller.transport for caller in self.connections if isinstance(caller.transport, asyncio.Transport)]


class _Caller(web.RequestHandler):
    """One accepted connection: dropped unless a request's HTTP head is complete `header_s` after it begins."""

    def __init__(self, callers: _Callers, **kwargs: Any) -> None:
        super().__init__(callers, loop=asyncio.get_running_loop(), **kwargs)
        self._callers = callers
        self._head_due: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        if len(self._callers.connections) > self._callers.limits.max_connections:
            transport.abort()
            return
        self._callers.links.add(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_serving:
            self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def serve(self, is_serving: bool) -> None:
        """A request's head is complete, or its answer is."""
        self._is_serving = is_serving
        self._forget_deadline()

    def abort(self) -> None:
        """Drop the connection without flushing what is buffered."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None) -> Any:
        """The library's answer to what is no HTTP, without the words sent, all of which it gives back."""
        return super().handle_error(request, status, exc, message and message[:_MAX_REASON])

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """What strangers send is no news for the log: handlers' failures are told by `answer`."""
        logger.debug(*args, **kwargs)

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = asyncio.get_running_loop().call_later(self._callers.limits.header_s, self.abort)

    def _forget_deadline(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class _Response(web.StreamResponse):
    #: The head leaves together with the first bytes of the body, which is one packet less to send and to wake up for.
    _send_headers_immediately = False


class _Reply:
    """The answer to one request; its HTTP head leaves with the first frame."""

    def __init__(self, request: web.BaseRequest, moving_s: float) -> None:
        self._request = request
        self._moving_s = moving_s
        self.response = _Response(headers={"Content-Type": "application/octet-stream"})

    async def beat(self, counter: int) -> None:
        """Write a heartbeat: from now on the answer comes in HTTP chunks, its length is not known."""
        await self.response.prepare(self._request)
        await self._write(parts_of(Frame(Heartbeat(counter=counter))))

    async def end(
        self, parts: Sequence[memoryview], *, status: int = 200, moved: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Write the result. A `status` other than 200 is told if no heartbeat has left before, and ends the connection.

        `moved` is told of the bytes that have left, if there are more than a heartbeat's.

        Raises:
            TimeoutError: if the caller takes less than 16 KiB in `moving_s`.
            ConnectionError: it has gone.
        """
        if status != 200:
            self.response.force_close()
        if not self.response.prepared:
            self.response.set_status(status)
            # The library joins each chunk with its frame, but not plain bytes.
            self.response.content_length = sum(len(part) for part in parts)
        await self.response.prepare(self._request)
        await self._write(parts, moved if sum(len(part) for part in parts) > MAX_HEARTBEAT_BYTES else None)
        async with asyncio.timeout(self._moving_s):
            await self.response.write_eof()
        if status != 200 and self._request.transport is not None and self._request.transport.can_write_eof():
            self._request.transport.write_eof()

    async def _write(self, parts: Sequence[memoryview], moved: Callable[[int], None] | None = None) -> None:
        for chunk in chunks_of(parts):
            async with asyncio.timeout(self._moving_s * (1 + len(chunk) / MOVING_BYTES)):
                await self.response.write(chunk)
            if moved is not None:
                moved(len(chunk))
