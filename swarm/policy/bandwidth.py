"""What a peer's link carries in one direction, measured on real transfers. Pure: `now` is an argument.

A link shows what it carries only while enough is in flight, and in most of a round a fast peer waits for slow ones. So
the rate of a round is that of its best window, and rounds are averaged. Unknown is not zero: nothing is told before a
window was long enough to mean something.
"""

from __future__ import annotations

from collections.abc import Callable

#: A window is at least this long and holds several of the pieces that transports count; if its transfers end before, it
#: counts unless it is short and small.
WINDOW_S = 0.25
MIN_WINDOW_S = 0.02
MIN_BYTES = 2 * 2**20
LARGE_BYTES = 32 * 2**20
#: Weight of the newest round in the moving average.
ALPHA = 0.3


class Meter:
    """One direction of one peer's link.

    Args:
        backlog: bytes that were counted by `moved` but have not left yet (they lie in a socket's buffer).
    """

    def __init__(self, backlog: Callable[[], int] = lambda: 0) -> None:
        self._backlog = backlog
        self._num_open = 0
        self._from = 0.0
        self._bytes = 0
        self._backlog_before = 0
        self._peak: float | None = None
        #: Bytes per second; None until a round was measured.
        self.rate: float | None = None

    def opened(self, now: float) -> None:
        """A transfer begins."""
        if self._num_open == 0:
            self._begin(now)
        self._num_open += 1

    def moved(self, now: float, num_bytes: int) -> None:
        """Bytes of an open transfer moved."""
        self._bytes += num_bytes
        if now - self._from >= WINDOW_S and self._bytes >= MIN_BYTES:
            self._end(now)
            self._begin(now)

    def closed(self, now: float) -> None:
        """A transfer has ended, whole or not."""
        self._num_open -= 1
        if self._num_open == 0:
            self._end(now)

    def _begin(self, now: float) -> None:
        self._from, self._bytes, self._backlog_before = now, 0, self._backlog()

    def _end(self, now: float) -> None:
        elapsed_s = now - self._from
        num_bytes = self._bytes - (self._backlog() - self._backlog_before)
        if elapsed_s <= 0 or num_bytes < MIN_BYTES or (elapsed_s < MIN_WINDOW_S and num_bytes < LARGE_BYTES):
            return
        self._peak = max(self._peak or 0.0, num_bytes / elapsed_s)

    def end_round(self) -> None:
        """Take the best window since the last round into the average."""
        if self._peak is not None:
            self.rate = self._peak if self.rate is None else (1 - ALPHA) * self.rate + ALPHA * self._peak
        self._peak = None
