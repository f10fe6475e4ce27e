"""The serving side of the HTTP transport: accepts, admits, hands frames to the handler, streams heartbeats and the result.

Everything that a stranger can send is bounded before memory is taken for it: HTTP heads by `header_s`, a request's size
by its `Content-Length` (there must be one), the sum of all requests by `Admission`, a body's pace by `moving_s`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.base.errors import RemoteProtocolError
from swarm.net.exchange import (
    MOVING_BYTES,
    Admission,
    Patience,
    answer,
    beat_until_done,
    chunks_of,
    one_line,
    parts_of,
)
from swarm.net.http_connection import Connection
from swarm.net.http_frames import FrameReader, framed
from swarm.net.http_heads import (
    HEAD_END,
    LAST_CHUNK,
    MAX_HEAD_BYTES,
    PATH,
    BadHead,
    RequestHead,
    parse_request_head,
    response_head,
)
from swarm.net.transport import Handler, Progress
from swarm.wire.framing import PREFIX, Frame
from swarm.wire.messages import Heartbeat, Refusal

logger = logging.getLogger(__name__)

#: An idle connection lives this long; a client drops it long before, so that no request meets one that just closed.
KEEPALIVE_S = 75.0
#: What comes after a refusal is taken in for this long, so that the refusal arrives before the reset.
_LINGER_S = 2.0
_BACKLOG = 1024


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
        self, handler: Handler, admission: Admission, limits: ServerLimits, *, allocate: Callable[[int], memoryview],
    ) -> None:  # fmt: skip
        self._handler = handler
        self._admission = admission
        self._limits = limits
        self._allocate = allocate
        self._listener: asyncio.Server | None = None
        self._callers: dict[_Caller, None] = {}

    def carried(self) -> list[tuple[int, int]]:
        """Bytes that each connection has sent and received since the last look."""
        return [caller.carried() for caller in self._callers]

    async def start(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Caller(self), sock=sock, backlog=_BACKLOG)

    async def close(self) -> None:
        """Drop every connection, which cancels what is served on it, and return once that has ended."""
        assert self._listener is not None
        self._listener.close()
        tasks = [caller.task for caller in self._callers if caller.task is not None]
        for caller in list(self._callers):
            caller.abort()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._listener.wait_closed()

    # ------------------------------------------------------------------------------------------------ connections

    def accepted(self, caller: _Caller) -> None:
        """A connection stands."""
        if len(self._callers) >= self._limits.max_connections:
            caller.abort()
            return
        self._callers[caller] = None
        caller.impatient(self._limits.moving_s)
        caller.task = asyncio.create_task(self._serve(caller), name="http connection")

    def left(self, caller: _Caller) -> None:
        """A connection ended: so does what is served on it."""
        self._callers.pop(caller, None)
        if caller.task is not None:
            caller.task.cancel()

    async def _serve(self, caller: _Caller) -> None:
        """Requests of one connection, one after the other."""
        try:
            is_first = True
            while await self._serve_one(caller, is_first):
                is_first = False
        except (ConnectionError, TimeoutError) as error:  # it went, sent no head in time, or does not read its answer
            logger.debug("connection from %s: %s", caller.remote, one_line(error))
        finally:
            caller.abort()

    async def _serve_one(self, caller: _Caller, is_first: bool) -> bool:
        """One request; whether another may follow."""
        reply = _Reply(caller, self._limits.moving_s)
        try:
            head = await self._head(caller, is_first)
            await self._answer(caller, head, reply)
        except BadHead as error:
            refused = _bad_request(400, str(error))
        except _Refused as error:
            refused = error
        else:
            if head.keep_alive:
                return True
            await caller.finish(_LINGER_S)
            return False
        await reply.end(parts_of(Frame(refused.refusal)), status=refused.status)
        await caller.finish(_LINGER_S)
        return False

    async def _head(self, caller: _Caller, is_first: bool) -> RequestHead:
        if not is_first and not caller.num_unread:
            async with asyncio.timeout(KEEPALIVE_S):
                await caller.more()
        async with asyncio.timeout(self._limits.header_s):
            return parse_request_head(await caller.read_until(HEAD_END, limit=MAX_HEAD_BYTES))

    # ------------------------------------------------------------------------------------------------ requests

    async def _answer(self, caller: _Caller, head: RequestHead, reply: _Reply) -> None:
        """Admit, receive and handle one request, and write its answer.

        Raises:
            _Refused: if it is not handed to the handler.
        """
        num_bytes = self._admit(head)
        try:
            progress = Progress(caller.remote)
            patience = Patience(stall_s=self._limits.moving_s, window_s=self._limits.moving_s)
            reader = FrameReader(
                caller, patience, progress, max_body_bytes=self._admission.max_body_bytes, allocate=self._allocate,
            )  # fmt: skip
            received = asyncio.Event()
            loop = asyncio.get_running_loop()

            async def beat() -> None:
                if not received.is_set() and loop.time() >= patience.deadline:
                    raise _bad_request(408, patience.reason(loop.time()))
                if reader.head_valid:  # before that a refusal may still have its own status
                    await reply.beat(progress.count)

            work = asyncio.create_task(self._work(reader, num_bytes, received, progress))
            await reply.end(await beat_until_done(work, self._limits.heartbeat_s, beat))
        finally:
            self._admission.release(num_bytes)

    def _admit(self, head: RequestHead) -> int:
        """Judge a request by its HTTP head alone, and reserve room for its body."""
        if head.path != PATH:
            raise _bad_request(404, f"there is only {PATH}")
        if head.method != "POST":
            raise _bad_request(405, "there is only POST")
        if head.num_bytes is None:
            raise _bad_request(411, "a request must tell its Content-Length")
        if head.num_bytes < PREFIX.size:
            raise _bad_request(400, f"{head.num_bytes} bytes are too few for a frame")
        refusal = self._admission.admit(head.num_bytes)
        if refusal is not None:
            raise _Refused(429 if refusal.code == "busy" else 413, refusal)
        return head.num_bytes

    async def _work(
        self, reader: FrameReader, num_bytes: int, received: asyncio.Event, progress: Progress
    ) -> list[memoryview]:
        try:
            frame = await reader.read(whole=num_bytes)
        except RemoteProtocolError as error:
            raise _bad_request(400, str(error)) from None
        received.set()
        return await answer(self._handler, frame, progress)


class _Caller(Connection):
    """One accepted connection."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__()
        self._server = server
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.accepted(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.left(self)


class _Reply:
    """The answer to one request; its HTTP head leaves with the first frame."""

    def __init__(self, caller: Connection, moving_s: float) -> None:
        self._caller = caller
        self._moving_s = moving_s
        self._has_begun = False

    async def beat(self, counter: int) -> None:
        await self._write([*self._begin(200), *framed(parts_of(Frame(Heartbeat(counter=counter))))])

    async def end(self, parts: list[memoryview], *, status: int = 200) -> None:
        """Write the result. A `status` other than 200 is told if no heartbeat has left before.

        Raises:
            TimeoutError: if the caller takes less than 16 KiB in `moving_s`.
            ConnectionError: it has gone.
        """
        await self._write([*self._begin(status), *framed(parts), memoryview(LAST_CHUNK)])

    def _begin(self, status: int) -> list[memoryview]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [memoryview(response_head(status))]

    async def _write(self, parts: Sequence[memoryview]) -> None:
        for chunk in chunks_of(parts):
            async with asyncio.timeout(self._moving_s * (1 + len(chunk) / MOVING_BYTES)):
                await self._caller.send(chunk)
