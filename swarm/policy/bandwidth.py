"""What a peer's link carries in one direction, measured on real rounds. Pure: `now` is an argument.

A link shows what it carries only while enough is in flight: in most of a round everyone goes at the slowest peer's pace,
but at its beginning each sends a window of chunks to all others as fast as it can. So the rate of a round is that of its
best window, and rounds are averaged. In a round that is over in a few windows a fast link shows less than it carries.
Unknown is not zero: nothing is told before a window was long enough to mean something.
"""

from __future__ import annotations

#: A window of a round lasts at least this long and holds at least `MIN_BYTES`; the last one may be as short as
#: `MIN_WINDOW_S`, and shorter if it holds `LARGE_BYTES`.
WINDOW_S = 0.1
MIN_WINDOW_S = 0.05
MIN_BYTES = 2**19
LARGE_BYTES = 32 * 2**20
#: Weight of the newest round in the moving average.
ALPHA = 0.5


class Meter:
    """One direction of one peer's link. `total` is what it has carried so far, in bytes."""

    def __init__(self) -> None:
        self._from = 0.0
        self._before = 0
        self._peak: float | None = None
        #: Bytes per second; None until a round was measured.
        self.rate: float | None = None

    def begin_round(self, now: float, total: int) -> None:
        self._peak = None
        self._from, self._before = now, total

    def sample(self, now: float, total: int) -> None:
        """To be called several times within `WINDOW_S`."""
        if now - self._from >= WINDOW_S and total - self._before >= MIN_BYTES:
            self._end_window(now, total)

    def end_round(self, now: float, total: int) -> None:
        """Take the round's best window into the average."""
        elapsed_s, num_bytes = now - self._from, total - self._before
        if num_bytes >= (MIN_BYTES if elapsed_s >= MIN_WINDOW_S else LARGE_BYTES) and elapsed_s > 0:
            self._end_window(now, total)
        if self._peak is not None:
            self.rate = self._peak if self.rate is None else (1 - ALPHA) * self.rate + ALPHA * self._peak

    def _end_window(self, now: float, total: int) -> None:
        self._peak = max(self._peak or 0.0, (total - self._before) / (now - self._from))
        self._from, self._before = now, total
