"""The asking side of the HTTP transport: kept-alive connections, one request on each at a time, uploads beside answers.

Owns the client session. Must not know what a message means, except `Heartbeat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache

import aiohttp
import yarl
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter

from swarm.base.errors import LinkBroken, RemoteProtocolError, UnknownHost, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import ProgressTimeout, chunks_of, one_line
from swarm.net.http.frames import Body, FrameReader
from swarm.net.http.server import PATH, READ_BYTES
from swarm.net.http.sockets import SocketLinks
from swarm.net.transport import Progress
from swarm.wire.framing import Frame
from swarm.wire.messages import Heartbeat

#: An idle connection is dropped after this long, long before the server does.
KEEPALIVE_S = 15.0
#: The end of an answer whose frame is complete comes within this time, or its connection is dropped.
_END_S = 1.0
#: One turn of the event loop writes about this much at most: a fraction of a millisecond.
_TURN_BYTES = 2**20


def _reason(error: OSError) -> str:
    """Why there is no connection, in the system's words rather than the event loop's."""
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


@lru_cache(maxsize=1024)
def _url_of(address: Address) -> yarl.URL:
    return yarl.URL.build(scheme="http", host=address.host, port=address.port, path=PATH)


class HttpClient:
    """Connections to any number of servers."""

    def __init__(self, *, connect_s: float, moving_s: float, max_body_bytes: int, allocate: Callable[[int], memoryview]) -> None:
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._allocate = allocate
        self._links = SocketLinks(moving_s=moving_s)
        self._session: aiohttp.ClientSession | None = None

    def carried(self) -> list[tuple[int, int]]:
        """Bytes that each connection has sent and received since the last look."""
        return self._links.carried()

    async def exchange(
        self, address: Address, parts: Sequence[memoryview], progress_timeout: ProgressTimeout, progress: Progress, what: str
    ) -> Frame:
        """Send `parts` and return the result frame; advances `progress_timeout` and `progress`.

        Raises:
            Unreachable, LinkBroken, RemoteProtocolError: naming `what`.
        """
        upload = _Upload(parts, progress_timeout, progress, self._links)
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._opened().post(_url_of(address), data=upload, allow_redirects=False)
            body = Body(response.content)
            result = await self._result(body, progress_timeout, progress)
            if upload.is_complete:
                await _end_of(body)
            return result
        except aiohttp.ConnectionTimeoutError:
            raise Unreachable(f"{what}: no connection within {self._connect_s:g} s") from None
        except aiohttp.ClientConnectorDNSError as error:
            raise UnknownHost(f"{what}: the name {address.host} is not known ({_reason(error.os_error)})") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{what}: {_reason(error.os_error)}") from None
        except (aiohttp.InvalidURL, ValueError) as error:  # a host or port that cannot be one
            raise Unreachable(f"{what}: {one_line(error)}") from None
        except aiohttp.ClientResponseError as error:
            raise RemoteProtocolError(f"{what}: {one_line(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise LinkBroken(f"{what}: {one_line(error)}") from None
        finally:
            if response is None or not upload.is_complete or response.connection is not None:
                upload.hang_up()
                if response is not None:
                    response.close()

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # the transports' own callbacks

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_s, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BYTES,
            )
        return self._session

    async def _result(self, body: Body, progress_timeout: ProgressTimeout, progress: Progress) -> Frame:
        """Read frames until the first that is no heartbeat."""
        loop = asyncio.get_running_loop()
        reader = FrameReader(body, progress_timeout, progress, max_body_bytes=self._max_body_bytes, allocate=self._allocate)
        counter = 0
        while True:
            frame = await reader.read()
            if not isinstance(frame.message, Heartbeat):
                return frame
            if frame.message.counter > counter:
                counter = frame.message.counter
                progress_timeout.advance(loop.time())
                progress.advance()


class _Upload(aiohttp.Payload):
    """The body of one request: pieces of its parts, uncopied, counted as they leave."""

    def __init__(
        self, parts: Sequence[memoryview], progress_timeout: ProgressTimeout, progress: Progress, links: SocketLinks
    ) -> None:
        super().__init__(parts)
        self._size = sum(len(part) for part in parts)
        self._parts = parts
        self._progress_timeout = progress_timeout
        self._progress = progress
        self._links = links
        self._transport: asyncio.Transport | None = None
        self.is_complete = False

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a frame is no text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the whole body, as the library asks for once the connection stands."""
        assert isinstance(writer, StreamWriter)
        if writer.transport is None:
            raise ConnectionResetError("the other end closed it")
        self._transport = writer.transport
        self._links.add(writer.transport)
        loop = asyncio.get_running_loop()
        self._progress_timeout.open(loop.time())
        num_written = 0
        for chunk in chunks_of(self._parts):
            await writer.write(chunk)
            self._count(loop.time(), len(chunk))
            num_written += len(chunk)
            if num_written >= _TURN_BYTES:  # others come to their turn also if the kernel takes everything
                num_written = 0
                await asyncio.sleep(0)
        self._progress_timeout.shut(loop.time())
        self.is_complete = True

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        assert content_length == self._size
        await self.write(writer)

    def _count(self, now: float, num_bytes: int) -> None:
        self._progress_timeout.moved(now, num_bytes)
        self._progress.moved(num_bytes)

    def hang_up(self) -> None:
        """Drop the connection: what is not sent yet shall not be, and the server drops the work."""
        if self._transport is not None:
            self._transport.abort()


async def _end_of(body: Body) -> None:
    """At the end of an answer the library keeps its connection for the next request."""
    if body.has_ended:
        return
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):  # then the answer is whole, but its connection is dropped
        async with asyncio.timeout(_END_S):
            await body.ended()
