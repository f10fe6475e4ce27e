"""What both transports share: how long a caller waits, what a server admits, and how a handler's failure is told.

`ProgressTimeout` and `Admission` are pure (`now` is an argument). Must not know sockets, aiohttp or any message but `Refusal`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from swarm.base.errors import RemoteRefused, Stalled
from swarm.net.transport import Handler, Progress
from swarm.wire.framing import MAX_BODY_BYTES, Frame, encode_head
from swarm.wire.messages import Refusal

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: A transfer moves if it brings at least this many bytes in any `window_s`.
MOVING_BYTES = 16 * 2**10
MOVING_WINDOW_S = 30.0
#: What is larger is no heartbeat: its bytes are movement.
MAX_HEARTBEAT_BYTES = 4096
#: Frames are written in pieces of this size; shorter runs of small tensors are joined.
CHUNK_BYTES = 512 * 2**10
_SMALL_BYTES = 16 * 2**10


class ProgressTimeout:
    """When to stop waiting: nothing advanced for `stall_s`, or an open transfer brought too little in `window_s`.

    Nothing is due before the first `open`: until then the connection's own deadline holds.
    """

    def __init__(self, *, stall_s: float, window_s: float = MOVING_WINDOW_S) -> None:
        self._stall_s = stall_s
        self._window_s = window_s
        self._advanced_at = math.inf
        self._window_from = math.inf
        self._window_bytes = 0

    def open(self, now: float) -> None:
        """A transfer begins."""
        self._advanced_at = now
        self._window_from = now
        self._window_bytes = 0

    def moved(self, now: float, num_bytes: int) -> None:
        """The open transfer brought `num_bytes`."""
        self._advanced_at = now
        self._window_bytes += num_bytes
        if self._window_bytes >= MOVING_BYTES:
            self._window_from = now
            self._window_bytes = 0

    def shut(self, now: float) -> None:
        """The transfer is complete."""
        self._advanced_at = now
        self._window_from = math.inf

    def advance(self, now: float) -> None:
        """The counter of a heartbeat rose."""
        self._advanced_at = now

    @property
    def deadline(self) -> float:
        """Loop time at which the wait ends unless something advances; infinite before the first `open`."""
        return min(self._advanced_at + self._stall_s, self._window_from + self._window_s)

    def look_again(self, now: float) -> float:
        """When to look at `deadline` next: an `open` until then cannot set an earlier one."""
        return min(self.deadline, now + min(self._stall_s, self._window_s))

    def reason(self, now: float) -> str:
        """Why the wait is over."""
        if now >= self._advanced_at + self._stall_s:
            return f"nothing advanced for {self._stall_s:g} s"
        return f"a transfer brought {self._window_bytes} bytes in {self._window_s:g} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a transport takes in."""

    #: Bytes of one request, and of one reply.
    max_body_bytes: int = MAX_BODY_BYTES
    #: Bytes of all requests being received or served; over it callers are told `busy`.
    max_inflight_bytes: int = 2 * MAX_BODY_BYTES
    #: Requests being received or served; over it callers are told `busy`.
    max_open_requests: int = 1024


class Admission:
    """Bounds on what one server holds at once: requests, and bytes of their bodies.

    Invariants: `0 <= num_open <= max_open_requests` and `0 <= held_bytes <= max_inflight_bytes`.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.max_body_bytes = min(bounds.max_body_bytes, bounds.max_inflight_bytes)
        self._bounds = bounds
        self.num_open = 0
        self.held_bytes = 0

    def admit(self, num_bytes: int) -> Refusal | None:
        """Reserve room for one request, or say why there is none. `release` the same number at its end."""
        if num_bytes > self.max_body_bytes:
            reason = f"request of {num_bytes} bytes is over this peer's limit of {self.max_body_bytes}"
            return Refusal(code="bad_request", reason=reason)
        if self.num_open >= self._bounds.max_open_requests:
            return Refusal(code="busy", reason=f"{self.num_open} requests are open")
        if self.held_bytes + num_bytes > self._bounds.max_inflight_bytes:
            reason = f"{self.held_bytes} bytes of requests are held, the limit is {self._bounds.max_inflight_bytes}"
            return Refusal(code="busy", reason=reason)
        self.num_open += 1
        self.held_bytes += num_bytes
        return None

    def release(self, num_bytes: int) -> None:
        """Give back the room that a request took."""
        self.num_open -= 1
        self.held_bytes -= num_bytes


def parts_of(frame: Frame) -> list[memoryview]:
    """The bytes of `frame` in order, uncopied: its head, then each tensor that is not empty.

    Raises:
        ValueError: if buffers and specs do not fit together.
    """
    views = [memoryview(buffer) for buffer in frame.buffers]
    return [memoryview(encode_head(frame)), *(view.cast("B") for view in views if view.nbytes)]


def chunks_of(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Cut `parts` into pieces of at most `CHUNK_BYTES`, joining runs of small ones."""
    run = bytearray()
    for part in parts:
        if len(part) < _SMALL_BYTES:
            run += part
            if len(run) < CHUNK_BYTES - _SMALL_BYTES:
                continue
            part = memoryview(b"")
        if run:
            yield memoryview(run)
            run = bytearray()
        for offset in range(0, len(part), CHUNK_BYTES):
            yield part[offset : offset + CHUNK_BYTES]
    if run:
        yield memoryview(run)


def one_line(error: BaseException) -> str:
    """Type and text of `error` as one line that any message can carry."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.encode(errors="replace").decode()[:1000]


async def answer(handler: Handler, request: Frame, progress: Progress) -> list[memoryview]:
    """Run `handler` and return its reply as bytes; its failure becomes a `Refusal`."""
    try:
        return parts_of(await handler(request, progress))
    except RemoteRefused as refused:
        reason = refused.reason.encode(errors="replace").decode()[:2000]
        return parts_of(Frame(Refusal(code=refused.code[:32], reason=reason)))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _failed(request, progress, "its work was cancelled")
    except Exception as error:
        logger.debug("traceback of a failed %s request", request.message.kind, exc_info=True)
        return _failed(request, progress, one_line(error))


def _failed(request: Frame, progress: Progress, reason: str) -> list[memoryview]:
    logger.warning("%s request from %s failed: %s", request.message.kind, progress.remote, reason)
    return parts_of(Frame(Refusal(code="failed", reason=reason)))


class Guard:
    """`async with`: the block ends with the error that `end` is called with, if that comes first.

    As `asyncio.timeout` does it, the task is cancelled and the cancellation becomes the error at the block's end. So what
    runs in the block needs no task of its own, which a short request would feel.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._timeout.__aenter__()
        return self

    def end(self, error: Exception) -> None:
        """Only inside the block; the first error counts."""
        if self._error is None:
            self._error = error
            self._timeout.reschedule(self._loop.time())

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            assert self._error is not None
            raise self._error from None


class Waiting(Guard):
    """The block ends with `Stalled`, naming `what`, once `progress_timeout` is over."""

    def __init__(self, progress_timeout: ProgressTimeout, what: str) -> None:
        super().__init__()
        self.what = what
        self._progress_timeout = progress_timeout

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._look()
        return self

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._progress_timeout.deadline:
            self.end(Stalled(f"{self.what}: {self._progress_timeout.reason(now)}"))
        else:
            self._next_look = self._loop.call_at(self._progress_timeout.look_again(now), self._look)

    async def __aexit__(self, *raised: Any) -> None:
        self._next_look.cancel()
        await super().__aexit__(*raised)


class Moving(Guard):
    """The block ends with `TimeoutError` once `count` has given the same for `still_s` seconds, however long the work takes."""

    def __init__(self, count: Callable[[], object], still_s: float) -> None:
        super().__init__()
        self._count = count
        self._still_s = still_s

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._seen, self._moved_at = self._count(), self._loop.time()
        self._next_look = self._loop.call_later(self._still_s / 8, self._look)
        return self

    def _look(self) -> None:
        seen, now = self._count(), self._loop.time()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        if now - self._moved_at >= self._still_s:
            self.end(TimeoutError(f"nothing moved for {self._still_s:g} s"))
        else:
            self._next_look = self._loop.call_later(self._still_s / 8, self._look)

    async def __aexit__(self, *raised: Any) -> None:
        self._next_look.cancel()
        await super().__aexit__(*raised)


class Beating(Guard):
    """`beat` is called every `heartbeat_s` until the block ends, never cut off halfway; its error ends the block."""

    def __init__(self, heartbeat_s: float, beat: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._heartbeat_s = heartbeat_s
        self._beat = beat
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._next_beat = self._loop.call_later(self._heartbeat_s, self._begin)
        return self

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._beat_once(), name="heartbeat")

    async def _beat_once(self) -> None:
        try:
            await self._beat()
        except Exception as error:
            if not self._is_over:
                self.end(error)
        else:
            if not self._is_over:
                self._next_beat = self._loop.call_later(self._heartbeat_s, self._begin)

    async def __aexit__(self, *raised: Any) -> None:
        self._is_over = True
        self._next_beat.cancel()
        try:
            if self._task is not None and raised[0] is None:
                await asyncio.wait({self._task})
        finally:
            if self._task is not None:
                self._task.cancel()
            await super().__aexit__(*raised)


async def cancel(task: asyncio.Future[T]) -> None:
    """Cancel `task` and wait until it has ended; its own error, if any, was told elsewhere."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
