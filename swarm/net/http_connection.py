"""One TCP connection: bytes are received into the memory where they are wanted, and written without being copied.

Owns flow control in both directions. Must not know HTTP or messages. A body goes from the kernel straight into its buffer
(`asyncio.BufferedProtocol`); only heads, and what came with them, pass through a small one of the connection's own.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from swarm.net.http_heads import BadHead
from swarm.wire.framing import Buffer

#: Heads, chunk lines and small messages pass through a buffer of this size.
INPUT_BYTES = 16 * 2**10
#: One turn of the event loop writes about this much at most: a fraction of a millisecond.
TURN_BYTES = 2**20
_TCP_INFO_BYTES, _TCP_INFO_ACKED = 136, 120


def _ignore(num_bytes: int) -> None:
    """Nobody counts these bytes."""


class Connection(asyncio.BufferedProtocol):
    """One reader and one writer at a time may wait on it.

    Invariant: `0 <= _begin <= _end <= INPUT_BYTES`; the unread input is what lies between. While a reader waits with a
    target, there is no unread input.
    """

    def __init__(self) -> None:
        self._input = bytearray(INPUT_BYTES)
        self._begin = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._moved: Callable[[int], None] = _ignore
        self._discards = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self._written = 0
        self._carried = (0, 0)
        self._reading_paused = False
        self._loop = asyncio.get_running_loop()
        #: Why there is nothing more to come; None while the connection stands.
        self.lost: ConnectionError | None = None

    # ------------------------------------------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self._filled :]
        if self._discards or self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == INPUT_BYTES:
            unread = self._input[self._begin : self._end]
            self._begin, self._end = 0, len(unread)
            self._input[: self._end] = unread
        return memoryview(self._input)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._filled += nbytes
            self._moved(nbytes)
            if self._filled == len(self._target):
                self._target = None
                _wake(self._reader)
        elif not self._discards:
            self._end += nbytes
            if self._end - self._begin == INPUT_BYTES:
                self._pause_reading(True)
            _wake(self._reader)

    def eof_received(self) -> bool:
        return False  # a caller that has no more to say has gone

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        _wake(self._writer)

    def connection_lost(self, exc: Exception | None) -> None:
        why = "the other end closed it" if exc is None else str(exc)
        self.lost = exc if isinstance(exc, ConnectionError) else ConnectionResetError(why)
        _wake(self._reader)
        _wake(self._writer)

    def _pause_reading(self, pause: bool) -> None:
        if self._transport is not None and pause != self._reading_paused and not self._transport.is_closing():
            self._reading_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def num_unread(self) -> int:
        """Bytes that came and that nobody asked for yet."""
        return self._end - self._begin

    def starts_like(self, prefix: bytes) -> bool:
        """Whether the unread input may be the beginning of something that starts with `prefix`."""
        begun = bytes(self._input[self._begin : min(self._end, self._begin + len(prefix))])
        return prefix.startswith(begun)

    async def read_until(self, end: bytes, *, limit: int) -> bytes:
        """Everything up to and with `end`.

        Raises:
            BadHead: if `end` is not among the first `limit` bytes.
            ConnectionError: the connection is lost.
        """
        while True:
            at = self._input.find(end, self._begin, self._end)
            if at >= 0:
                return bytes(self._taken(at + len(end) - self._begin))
            if self.num_unread >= limit:
                raise BadHead(f"more than {limit} bytes without an end")
            await self.more()

    async def more(self) -> None:
        """Return once there is more unread input than now.

        Raises:
            ConnectionError: the connection is lost.
        """
        had = self._end - self._begin
        while self._end - self._begin <= had:
            await self._wait_to_read()

    async def fill(self, view: memoryview, moved: Callable[[int], None] = _ignore) -> None:
        """Receive exactly `len(view)` bytes into `view`, telling `moved` how many each time some come.

        Raises:
            ConnectionError: the connection is lost.
        """
        unread = min(len(view), self.num_unread)
        if unread:
            view[:unread] = self._taken(unread)
            moved(unread)
        if unread == len(view):
            return
        self._target, self._filled, self._moved = view, unread, moved
        try:
            while self._filled < len(view):
                await self._wait_to_read()
        finally:
            self._target, self._moved = None, _ignore

    def _taken(self, num_bytes: int) -> memoryview:
        begin, self._begin = self._begin, self._begin + num_bytes
        self._pause_reading(False)
        return memoryview(self._input)[begin : self._begin]

    async def _wait_to_read(self) -> None:
        if self.lost is not None:
            raise self.lost
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    # ------------------------------------------------------------------------------------------------ writing

    def write(self, data: Buffer) -> bool:
        """Hand `data` to the kernel; False if it did not take all of it: then `drain` before the next.

        Raises:
            ConnectionError: the connection is lost.
        """
        if self.lost is not None or self._transport is None:
            raise self.lost or ConnectionResetError("not connected")
        self._transport.write(data)
        return not self._is_full

    async def send(self, data: Buffer) -> None:
        """`write` and `drain`, leaving the loop to others now and then also where the kernel takes everything.

        Raises:
            ConnectionError: the connection is lost.
        """
        if not self.write(data):
            await self.drain()
            return
        self._written += len(data)
        if self._written >= TURN_BYTES:
            self._written = 0
            await asyncio.sleep(0)

    async def drain(self) -> None:
        """Return once the kernel has taken everything.

        Raises:
            ConnectionError: the connection is lost.
        """
        while self._is_full:
            if self.lost is not None:
                raise self.lost
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    # ------------------------------------------------------------------------------------------------ the end

    async def finish(self, linger_s: float) -> None:
        """Say that nothing more comes, and take in what still does for a while: else it would reset the connection,
        and the last words with it."""
        if self.lost is None and self._transport is not None and not self._transport.is_closing():
            self._discards = True
            self._pause_reading(False)
            if self._transport.can_write_eof():
                self._transport.write_eof()
            try:
                async with asyncio.timeout(linger_s):
                    while self.lost is None:
                        await self._wait_to_read()
            except (TimeoutError, ConnectionError):
                pass
        self.abort()

    def abort(self) -> None:
        """Drop the connection without flushing what is buffered."""
        if self._transport is not None:
            self._transport.abort()

    def carried(self) -> tuple[int, int]:
        """Bytes that were sent and acknowledged, and received, since the last look; none if the system does not tell."""
        if self.lost is not None or self._transport is None:
            return 0, 0
        sock, before = self._transport.get_extra_info("socket"), self._carried
        try:  # tcpi_bytes_acked and tcpi_bytes_received of Linux's tcp_info
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            self._carried = struct.unpack_from("QQ", info, _TCP_INFO_ACKED)
        except (OSError, AttributeError, struct.error):
            return 0, 0
        return self._carried[0] - before[0], self._carried[1] - before[1]

    def impatient(self, moving_s: float) -> None:
        """Have the kernel end a connection whose other end takes nothing for `moving_s` (dead, stopped or cut off)."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(moving_s * 1000)))

    @property
    def remote(self) -> str:
        """Host at the other end."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]).removeprefix("::ffff:") if name else ""


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
