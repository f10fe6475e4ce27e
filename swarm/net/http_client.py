"""The asking side of the HTTP transport: kept-alive connections, one request on each at a time, uploads beside answers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence

from swarm.base.errors import LinkBroken, RemoteProtocolError, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import Patience, cancel, chunks_of
from swarm.net.http_connection import TURN_BYTES, Connection
from swarm.net.http_frames import Body, FrameReader
from swarm.net.http_heads import HEAD_END, MAX_HEAD_BYTES, BadHead, ResponseHead, parse_response_head, request_head
from swarm.net.transport import Progress
from swarm.wire.framing import Frame
from swarm.wire.messages import Heartbeat

#: An idle connection is dropped after this long, long before the server does.
KEEPALIVE_S = 15.0
#: The end of an answer whose frame is complete comes within this time, or its connection is dropped.
_END_S = 1.0


def _reason(error: OSError | ValueError) -> str:
    """Why there is no connection, in the system's words rather than the event loop's."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


class HttpClient:
    """Connections to any number of servers."""

    def __init__(
        self, *, connect_s: float, moving_s: float, max_body_bytes: int, allocate: Callable[[int], memoryview],
    ) -> None:  # fmt: skip
        self._connect_s = connect_s
        self._moving_s = moving_s
        self._max_body_bytes = max_body_bytes
        self._allocate = allocate
        self._busy: dict[Connection, None] = {}
        #: Idle connections with the timer that drops each; the one used last is used first.
        self._idle: dict[Address, list[tuple[Connection, asyncio.TimerHandle]]] = {}

    def carried(self) -> list[tuple[int, int]]:
        """Bytes that each connection has sent and received since the last look."""
        idle = [connection for connections in self._idle.values() for connection, _ in connections]
        return [connection.carried() for connection in (*self._busy, *idle)]

    async def exchange(
        self, address: Address, parts: Sequence[memoryview], patience: Patience, progress: Progress, what: str
    ) -> Frame:
        """Send `parts` and return the result frame; advances `patience` and `progress`.

        Raises:
            Unreachable, LinkBroken, RemoteProtocolError: naming `what`.
        """
        connection = await self._connected(address, what)
        self._busy[connection] = None
        upload = _Upload(connection, address, parts, patience, progress)
        reusable = False
        try:
            upload.start()
            head = await self._head(connection)
            body = Body(connection, head.num_bytes)
            result = await self._result(body, patience, progress)
            reusable = head.keep_alive and upload.is_complete and await _has_ended(body)
            return result
        except BadHead as error:
            raise RemoteProtocolError(f"{what}: {error}") from None
        except ConnectionError as error:
            raise LinkBroken(f"{what}: {error}") from None
        finally:
            await upload.close()
            del self._busy[connection]
            if reusable and connection.lost is None:
                self._keep(address, connection)
            else:  # what is not sent yet shall not be, and the server drops the work
                connection.abort()

    async def close(self) -> None:
        for connections in self._idle.values():
            for connection, timer in connections:
                timer.cancel()
                connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports' own callbacks

    # ------------------------------------------------------------------------------------------------ connections

    async def _connected(self, address: Address, what: str) -> Connection:
        for connection, timer in self._taken_from(address):
            timer.cancel()
            if connection.lost is None and not connection.num_unread:
                return connection
            connection.abort()
        if not address.host:
            raise Unreachable(f"{what}: no host")
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(Connection, *address)
        except TimeoutError:
            raise Unreachable(f"{what}: no connection within {self._connect_s:g} s") from None
        except (OSError, ValueError) as error:  # also a host or port that cannot be one
            raise Unreachable(f"{what}: {_reason(error)}") from None
        connection.impatient(self._moving_s)
        return connection

    def _taken_from(self, address: Address) -> Iterator[tuple[Connection, asyncio.TimerHandle]]:
        while connections := self._idle.get(address):
            yield connections.pop()
        self._idle.pop(address, None)

    def _keep(self, address: Address, connection: Connection) -> None:
        timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._drop, address, connection)
        self._idle.setdefault(address, []).append((connection, timer))

    def _drop(self, address: Address, connection: Connection) -> None:
        connection.abort()
        left = [kept for kept in self._idle.get(address, ()) if kept[0] is not connection]
        if left:
            self._idle[address] = left
        else:
            self._idle.pop(address, None)

    # ------------------------------------------------------------------------------------------------ answers

    async def _head(self, connection: Connection) -> ResponseHead:
        if not connection.num_unread:
            await connection.more()
        if not connection.starts_like(b"HTTP/1."):
            raise BadHead("no answer of HTTP/1.1")
        return parse_response_head(await connection.read_until(HEAD_END, limit=MAX_HEAD_BYTES))

    async def _result(self, body: Body, patience: Patience, progress: Progress) -> Frame:
        """Read frames until the first that is no heartbeat."""
        loop = asyncio.get_running_loop()
        reader = FrameReader(
            body, patience, progress, max_body_bytes=self._max_body_bytes, allocate=self._allocate
        )
        counter = 0
        while True:
            frame = await reader.read()
            if not isinstance(frame.message, Heartbeat):
                return frame
            if frame.message.counter > counter:
                counter = frame.message.counter
                patience.advance(loop.time())
                progress.advance()


class _Upload:
    """One request on its way: pieces of its parts, uncopied, counted as they leave."""

    def __init__(
        self, connection: Connection, address: Address, parts: Sequence[memoryview], patience: Patience,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._connection = connection
        body_bytes = sum(len(part) for part in parts)
        head = request_head(str(address), body_bytes)
        self._parts = [memoryview(head), *parts]
        self._num_bytes = len(head) + body_bytes
        self._patience = patience
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.is_complete = False

    def start(self) -> None:
        """Hand to the kernel what it takes at once, within one turn's bound; the rest leaves in the background.

        Raises:
            ConnectionError: the connection is lost.
        """
        self._patience.open(self._loop.time())
        chunks, written = chunks_of(self._parts), 0
        for chunk in chunks:
            has_room = self._connection.write(chunk)
            written += len(chunk)
            if not has_room or TURN_BYTES <= written < self._num_bytes:
                self._task = self._loop.create_task(self._send(chunks, len(chunk)))
                return
            self._count(len(chunk))
        self._finished()

    async def _send(self, chunks: Iterator[memoryview], num_bytes: int) -> None:
        """The remaining chunks, once the one of `num_bytes` that was written last has left."""
        await self._connection.drain()
        self._count(num_bytes)
        for chunk in chunks:
            await self._connection.send(chunk)
            self._count(len(chunk))
        self._finished()

    def _count(self, num_bytes: int) -> None:
        now = self._loop.time()
        self._patience.moved(now, num_bytes)
        self._progress.moved(num_bytes)

    def _finished(self) -> None:
        self._patience.shut(self._loop.time())
        self.is_complete = True

    async def close(self) -> None:
        if self._task is not None:
            await cancel(self._task)


async def _has_ended(body: Body) -> bool:
    try:
        async with asyncio.timeout(_END_S):
            return await body.ended()
    except (TimeoutError, BadHead, ConnectionError):
        return False
