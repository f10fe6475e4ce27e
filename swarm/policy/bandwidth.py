"""What a peer's link carries in one direction, measured on real rounds. Pure: `now` is an argument.

A link shows what it carries only while enough is in flight: in most of a round everyone goes at the slowest peer's pace,
but at its beginning each sends a window of chunks to all others as fast as it can. So the rate of a round is that of its
best window, or of its best run of windows if it has many: buffers on the way make single ones look faster than the line.
Rounds are averaged. In a round that is over in a few windows a fast link shows less than it carries. Unknown is not
zero: nothing is told before a window was long enough to mean something.

An auxiliary is sent no more than its share, so what it was measured to carry may be what it was asked to: `Reach` tells
more than that, until it turns out to be too much.
"""

from __future__ import annotations

import math
from collections import deque

#: A window of a round lasts at least this long and holds at least `MIN_BYTES`; the last one may be as short as
#: `MIN_WINDOW_S`, and shorter if it holds `LARGE_BYTES`.
WINDOW_S = 0.1
MIN_WINDOW_S = 0.05
MIN_BYTES = 2**19
LARGE_BYTES = 32 * 2**20
#: Buffers on the way take in bytes at once, so a single window of a slow line may look fast. A round of many windows is
#: therefore judged by runs of them: a run has one window for each `WINDOWS_PER_RUN` of the round, and `MAX_RUN` at most.
WINDOWS_PER_RUN, MAX_RUN = 10, 4
#: Windows that are kept of one round: the newest, where rounds overlap without end.
MAX_WINDOWS = 1024
#: Weight of the newest round in the moving average.
ALPHA = 0.5
#: An auxiliary that carried this part of what it had told did what was asked of it, and tells so many times as much.
MET = 0.75
GROWTH = 1.5
#: A limit that was learnt so many seconds ago is tried again.
FORGOTTEN_S = 600.0


class Meter:
    """One direction of one peer's link. `total` is what it has carried so far, in bytes."""

    def __init__(self) -> None:
        self._from = 0.0
        self._before = 0
        #: Seconds and bytes of each window of the round.
        self._windows: deque[tuple[float, int]] = deque(maxlen=MAX_WINDOWS)
        #: Bytes per second; None until a round was measured.
        self.rate: float | None = None

    @property
    def newest(self) -> float | None:
        """Bytes per second of the newest round so far, in its best run of windows; None if it has shown nothing."""
        windows = list(self._windows)
        num = min(max(len(windows) // WINDOWS_PER_RUN, 1), MAX_RUN)
        runs = [windows[i : i + num] for i in range(len(windows) - num + 1)]
        return max((sum(size for _, size in run) / sum(seconds for seconds, _ in run) for run in runs), default=None)

    def begin_round(self, now: float, total: int) -> None:
        """Forget what was measured for the round before."""
        self._windows.clear()
        self._from, self._before = now, total

    def sample(self, now: float, total: int) -> None:
        """Note what the link has carried by now. Call it several times within `WINDOW_S`."""
        if now - self._from >= WINDOW_S and total - self._before >= MIN_BYTES:
            self._end_window(now, total)

    def end_round(self, now: float, total: int) -> None:
        """Take the round's best window into the average."""
        elapsed_s, num_bytes = now - self._from, total - self._before
        if num_bytes >= (MIN_BYTES if elapsed_s >= MIN_WINDOW_S else LARGE_BYTES) and elapsed_s > 0:
            self._end_window(now, total)
        newest = self.newest
        if newest is not None:
            self.rate = newest if self.rate is None else (1 - ALPHA) * self.rate + ALPHA * newest

    def _end_window(self, now: float, total: int) -> None:
        self._windows.append((now - self._from, total - self._before))
        self._from, self._before = now, total


class Reach:
    """The rate, in bytes per second, that an auxiliary tells of its link. What comes in goes out again: the slower way counts."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._heard_at = 0.0
        #: The rate that was told for the newest round; whether it was too much is not known yet.
        self._told: float | None = None
        #: Too much was told: until then only what was measured counts.
        self._limited_until = -math.inf

    def heard(self, upload: Meter, download: Meter, now: float) -> None:
        """Learn from a round that has ended, in which this peer helped. After one that showed nothing a higher rate waits."""
        newest = [meter.newest for meter in (upload, download) if meter.newest is not None]
        rates = [meter.rate for meter in (upload, download) if meter.rate is not None]
        if not newest or (self._told is not None and min(newest) < MET * self._told):
            self._limited_until = now + FORGOTTEN_S
        if newest:
            self._rate = min(rates or newest) if now < self._limited_until else GROWTH * min(newest)
            self._heard_at = now

    def tell(self, now: float) -> float | None:
        """The rate to tell for the next round; None if nothing is known (any more)."""
        if now - self._heard_at > FORGOTTEN_S:
            self._rate = None
        self._told = self._rate
        return self._told

    def is_limit(self, now: float) -> bool:
        """Whether the link was seen to carry no more than is told."""
        return now < self._limited_until
