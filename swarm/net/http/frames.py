"""Frames in an HTTP body: read one by one, each into one buffer that is taken once its size is known to be right.

Must not know what a message means, except `Heartbeat`. The library hands a body on in pieces of what the kernel gave;
each is copied once, to where it is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import aiohttp

from swarm.base.errors import RemoteProtocolError
from swarm.net.exchange import MAX_HEARTBEAT_BYTES, ProgressTimeout
from swarm.net.transport import Progress, pageable
from swarm.wire.framing import PREFIX, Frame, Prefix, decode_header, decode_prefix, split_body
from swarm.wire.messages import Heartbeat


class Body:
    """The body of one request or answer."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        #: What is left of the last piece.
        self._piece = memoryview(b"")

    async def fill(self, view: memoryview, moved: Callable[[int], None]) -> None:
        """Receive exactly `len(view)` bytes, telling `moved` how many each time some come.

        Raises:
            RemoteProtocolError: the body ends early.
            aiohttp.ClientError, web.RequestPayloadError: the connection is lost, or what came is no HTTP.
        """
        filled = 0
        while filled < len(view):
            piece = self._piece or await self._next()
            if not piece:
                raise RemoteProtocolError(f"a frame ended {len(view) - filled} bytes early")
            num_bytes = min(len(piece), len(view) - filled)
            view[filled : filled + num_bytes] = piece[:num_bytes]
            self._piece = piece[num_bytes:]
            filled += num_bytes
            moved(num_bytes)

    @property
    def has_ended(self) -> bool:
        """Whether the body is known to end here, so that its connection may be used again."""
        return not self._piece and self._content.at_eof()

    async def ended(self) -> bool:
        """The same, once it is known."""
        return not self._piece and not await self._next()

    async def _next(self) -> memoryview:
        """The next piece as the library has it, which would join several into one for `readany`; empty at the end."""
        piece = b""
        while not piece and not self._content.at_eof():  # where an HTTP chunk ends there may be no bytes
            piece, _ = await self._content.readchunk()
        return memoryview(piece)


class FrameReader:
    """Reads frames from a body, and counts what moves."""

    def __init__(
        self,
        body: Body,
        progress_timeout: ProgressTimeout,
        progress: Progress,
        *,
        max_body_bytes: int,
        allocate: Callable[[int], memoryview],
    ) -> None:
        self._body = body
        self._progress_timeout = progress_timeout
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
            aiohttp.ClientError, web.RequestPayloadError: see `Body`.
        """
        if whole is not None:
            self._progress_timeout.open(self._loop.time())
        start = pageable(PREFIX.size)
        await self._body.fill(start, self._ignored)
        prefix = decode_prefix(start, max_body_bytes=self._max_body_bytes)
        size = PREFIX.size + prefix.header_bytes + prefix.body_bytes
        if whole not in (None, size):
            raise RemoteProtocolError(f"frame of {size} bytes came with {whole}")
        counts = size > MAX_HEARTBEAT_BYTES
        if counts:
            self._progress_timeout.open(self._loop.time())
        began = self._loop.time()
        frame = replace(await self._rest(prefix, counts), arrival_s=self._loop.time() - began)
        if whole is not None or counts:
            self._progress_timeout.shut(self._loop.time())
        return frame

    async def _rest(self, prefix: Prefix, counts: bool) -> Frame:
        moved = self._moved if counts else self._ignored
        header = pageable(prefix.header_bytes)
        await self._body.fill(header, moved)
        message = decode_header(header, prefix)
        if isinstance(message, Heartbeat) and counts:
            raise RemoteProtocolError(f"heartbeat of {prefix.header_bytes} bytes")
        self.head_valid = True
        body = self._allocate(prefix.body_bytes)
        await self._body.fill(body, moved)
        return split_body(message, body)

    def _moved(self, num_bytes: int) -> None:
        now = self._loop.time()
        self._progress_timeout.moved(now, num_bytes)
        self._progress.moved(num_bytes)

    def _ignored(self, num_bytes: int) -> None:
        """A heartbeat's bytes are no movement."""
