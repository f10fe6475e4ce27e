"""How many micro-batches a trainer keeps in flight: grows while throughput does, then stays at the knee. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: Windows at the knee before the next trial, at first and after many trials in vain.
_SHORTEST_REST, _LONGEST_REST = 4, 32
#: Length of a trial's step as a part of the limit, at first and at most.
_SMALLEST_STRIDE, _LARGEST_STRIDE = 1 / 8, 1.0
#: Weight of a window in the rate at the knee.
_ALPHA = 0.25
#: A window that differs by so much from those before tells that the swarm has changed.
_CHANGED = 0.15


@dataclass(slots=True)
class InFlightControl:
    """Trials around the best limit so far, on micro-batches per second over windows of completed ones.

    A trial lasts one window. More in flight are kept if they gain at least `gain`, and the next trial goes up again, by
    a step twice as large if throughput grew nearly as the number did; fewer are kept if they lose less than half of
    `gain` against the rate at which steps down began, so that small losses do not add up. Between trials the limit
    rests, longer each time that trials in both directions were in vain: a trial with too few costs throughput. Time in
    which the limit did not bind is not counted.
    Bounded by `lowest..highest`.
    """

    limit: int
    lowest: int = 1
    highest: int = 1024
    gain: float = 0.01
    window: int = 32
    reason: str = "start"
    #: Micro-batches of the window that came back while the limit was reached, and the seconds that they took.
    _count: int = 0
    _seconds: float = 0.0
    _last: float | None = None
    #: The best limit so far, its rate (None until measured), and the rate at which steps down begin (0: not known).
    _best: int = 0
    _rate: float | None = None
    _top: float = 0.0
    #: Direction and length (as a part of the limit) of the next trial, windows to rest before it, how many the next
    #: rest will have, and trials in vain in a row.
    _direction: int = 1
    _stride: float = _SMALLEST_STRIDE
    _wait: int = 0
    _rest: int = _SHORTEST_REST
    _vain: int = 0

    def completed(self, now: float, *, in_flight: int | None = None) -> int:
        """One micro-batch came back at `now`; returns the limit that holds from here on.

        Args:
            now: monotonic seconds.
            in_flight: micro-batches in flight until now, this one included; None: as many as the limit.
        """
        last, self._last = self._last, now
        if last is None or (in_flight is not None and in_flight < self.limit):
            return self.limit
        self._count += 1
        self._seconds += now - last
        if self._count < max(self.window, 2 * self.limit) or self._seconds <= 0:
            return self.limit
        rate = self._count / self._seconds
        self._count, self._seconds = 0, 0.0
        if self._rate is None:
            self._hold(rate, "first window")
            self._try()
        elif self.limit == self._best:
            self._rested(rate)
        elif self.limit > self._best:
            self._tried_more(rate, self._rate)
        else:
            self._tried_fewer(rate)
        return self.limit

    def _rested(self, rate: float) -> None:
        assert self._rate is not None
        if abs(rate / self._rate - 1) > _CHANGED:
            self._hold(rate, f"{rate:.3g}/s is far from {self._rate:.3g}/s: the swarm has changed")
        else:
            self._rate += _ALPHA * (rate - self._rate)
        self._wait -= 1
        if self._wait <= 0:
            self._try()

    def _tried_more(self, rate: float, before: float) -> None:
        if rate >= before * (1 + self.gain):
            in_proportion = rate / before - 1 >= 0.5 * (self.limit / self._best - 1)
            stride = min(2 * self._stride, _LARGEST_STRIDE) if in_proportion else _SMALLEST_STRIDE
            self._hold(rate, f"{rate:.3g}/s is more than {before:.3g}/s: on", stride)
            self._try()
        else:
            self._in_vain(f"{rate:.3g}/s is no gain on {before:.3g}/s: back")

    def _tried_fewer(self, rate: float) -> None:
        if rate >= self._top * (1 - self.gain / 2):
            self._best, self._rate, self._vain = self.limit, rate, 0
            self.reason = f"{rate:.3g}/s is as good with fewer: down"
            self._try()
        else:
            self._in_vain(f"{rate:.3g}/s is less than {self._top:.3g}/s: up again")

    def _hold(self, rate: float, reason: str, stride: float = _SMALLEST_STRIDE) -> None:
        """This limit is the best so far, and the next trial goes up."""
        self._best, self._rate, self._top, self._direction = self.limit, rate, 0.0, 1
        self._rest, self._vain, self._wait, self._stride = _SHORTEST_REST, 0, 0, stride
        self.reason = reason

    def _in_vain(self, reason: str) -> None:
        self.limit, self.reason = self._best, reason
        if self._stride > _SMALLEST_STRIDE:  # too long a step: a short one may still gain
            self._stride, self._wait = _SMALLEST_STRIDE, 1
            return
        self._direction = -self._direction
        self._vain += 1
        if self._vain > 2:
            self._rest = min(2 * self._rest, _LONGEST_REST)
        self._wait = self._rest if self._vain > 1 else 1

    def _try(self) -> None:
        """Begin a trial beside the best limit, in the other direction where a bound is reached."""
        assert self._rate is not None
        for _ in range(2):
            step = max(1, int(self._best * self._stride))
            limit = max(self.lowest, min(self.highest, self._best + self._direction * step))
            if limit != self._best:
                break
            self._direction = -self._direction
        self._top = self._top or self._rate
        self.limit = limit
