"""Frames on an HTTP connection: read one by one, each into one buffer that is taken once its size is known to be right.

Must not know what a message means, except `Heartbeat`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from swarm.base.errors import RemoteProtocolError
from swarm.net.exchange import Patience
from swarm.net.http_connection import Connection
from swarm.net.http_heads import CHUNK_LINE_END, MAX_CHUNK_LINE_BYTES, BadHead, chunk_line, parse_chunk_line
from swarm.net.transport import Progress, pageable
from swarm.wire.framing import PREFIX, Frame, Prefix, decode_header, decode_prefix, split_body
from swarm.wire.messages import Heartbeat

MAX_HEARTBEAT_BYTES = 4096


class Source(Protocol):
    """Where a frame's bytes come from."""

    async def fill(self, view: memoryview, moved: Callable[[int], None]) -> None:
        """Receive exactly `len(view)` bytes, telling `moved` how many each time some come."""


class Body:
    """The body of an answer, in chunks or of a known length."""

    def __init__(self, connection: Connection, num_bytes: int | None) -> None:
        """
        Args:
            connection: whose next bytes are the body's.
            num_bytes: its length, or None if it comes in chunks.
        """
        self._connection = connection
        self._is_chunked = num_bytes is None
        #: Bytes left of this chunk, or of the whole.
        self._left = num_bytes or 0
        self._is_first = True
        self._has_ended = False

    async def fill(self, view: memoryview, moved: Callable[[int], None]) -> None:
        """See `Source`.

        Raises:
            RemoteProtocolError: the body ends early.
            BadHead: what should be a chunk is none.
            ConnectionError: the connection is lost.
        """
        filled = 0
        while filled < len(view):
            if not self._left:
                await self._next_chunk()
            if self._has_ended:
                raise RemoteProtocolError(f"a frame ended {len(view) - filled} bytes early")
            part = min(self._left, len(view) - filled)
            await self._connection.fill(view[filled : filled + part], moved)
            self._left -= part
            filled += part

    async def ended(self) -> bool:
        """Whether the answer ends here, so that its connection may be used again."""
        if not self._left and not self._has_ended:
            await self._next_chunk()
        return self._has_ended and not self._connection.num_unread

    async def _next_chunk(self) -> None:
        if not self._is_chunked:
            self._has_ended = True
            return
        if not self._is_first:
            await self._blank_line()
        self._is_first = False
        line = await self._connection.read_until(CHUNK_LINE_END, limit=MAX_CHUNK_LINE_BYTES)
        self._left = parse_chunk_line(line)
        if not self._left:
            await self._blank_line()
            self._has_ended = True

    async def _blank_line(self) -> None:
        if await self._connection.read_until(CHUNK_LINE_END, limit=MAX_CHUNK_LINE_BYTES) != CHUNK_LINE_END:
            raise BadHead("a chunk that does not end where it should")


class FrameReader:
    """Reads frames from a source, and counts what moves."""

    def __init__(
        self, source: Source, patience: Patience, progress: Progress, *, max_body_bytes: int,
        allocate: Callable[[int], memoryview],
    ) -> None:  # fmt: skip
        self._source = source
        self._patience = patience
        self._progress = progress
        self._max_body_bytes = max_body_bytes
        self._allocate = allocate
        self._loop = asyncio.get_running_loop()
        #: True once a frame's header was found valid.
        self.head_valid = False

    async def read(self, *, whole: int | None = None) -> Frame:
        """The next frame; `whole` is its size if that is known.

        Bytes count as movement unless they may belong to a heartbeat that says nothing new.

        Raises:
            RemoteProtocolError: if the bytes are no valid frame.
            ConnectionError: the connection is lost.
        """
        if whole is not None:
            self._patience.open(self._loop.time())
        start = pageable(PREFIX.size)
        await self._source.fill(start, self._ignored)
        prefix = decode_prefix(start, max_body_bytes=self._max_body_bytes)
        size = PREFIX.size + prefix.header_bytes + prefix.body_bytes
        if whole not in (None, size):
            raise RemoteProtocolError(f"frame of {size} bytes came with {whole}")
        counts = size > MAX_HEARTBEAT_BYTES
        if counts:
            self._patience.open(self._loop.time())
        frame = await self._rest(prefix, counts)
        if whole is not None or counts:
            self._patience.shut(self._loop.time())
        return frame

    async def _rest(self, prefix: Prefix, counts: bool) -> Frame:
        moved = self._moved if counts else self._ignored
        header = pageable(prefix.header_bytes)
        await self._source.fill(header, moved)
        message = decode_header(header, prefix)
        if isinstance(message, Heartbeat) and counts:
            raise RemoteProtocolError(f"heartbeat of {prefix.header_bytes} bytes")
        self.head_valid = True
        body = self._allocate(prefix.body_bytes)
        await self._source.fill(body, moved)
        return split_body(message, body)

    def _moved(self, num_bytes: int) -> None:
        now = self._loop.time()
        self._patience.moved(now, num_bytes)
        self._progress.moved(num_bytes)

    def _ignored(self, num_bytes: int) -> None:
        """A heartbeat's bytes are no movement."""


def framed(parts: list[memoryview]) -> list[memoryview]:
    """`parts` as one chunk."""
    return [memoryview(chunk_line(sum(len(part) for part in parts))), *parts, memoryview(CHUNK_LINE_END)]
