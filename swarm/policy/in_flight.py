"""How many micro-batches a trainer keeps in flight: grows while throughput does, then stays at the knee. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class InFlightControl:
    """Hill climbing on samples per second over windows of completed micro-batches.

    Each window compares the rate with the one before: a step up that gained at least `gain` is repeated, one that did
    not is taken back. Steps down go on while the rate is about that at their beginning, so that small losses do not add
    up. Bounded by `lowest..highest`.
    """

    limit: int
    lowest: int = 1
    highest: int = 1024
    gain: float = 0.02
    window: int = 32
    _count: int = 0
    _start: float | None = None
    _last_rate: float | None = None
    _direction: int = 1
    #: Rate at which steps down began.
    _top: float = 0.0
    reason: str = "start"

    def completed(self, now: float) -> int:
        """One micro-batch came back at `now`; returns the limit that holds from here on."""
        if self._start is None:
            self._start = now
            return self.limit
        self._count += 1
        if self._count < max(self.window, 2 * self.limit) or now <= self._start:
            return self.limit
        rate = self._count / (now - self._start)
        if self._last_rate is None:
            self.reason = "first window"
        elif rate >= self._last_rate * (1 + self.gain):
            self.reason = f"{rate:.3g}/s is more than {self._last_rate:.3g}/s: on"
        elif self._direction > 0:
            self._direction, self._top = -1, max(rate, self._last_rate)
            self.reason = f"{rate:.3g}/s is no gain on {self._last_rate:.3g}/s: back"
        elif rate <= self._top * (1 - self.gain / 2):
            self._direction = 1
            self.reason = f"{rate:.3g}/s is less than {self._top:.3g}/s: up again"
        else:
            self.reason = f"{rate:.3g}/s is as good with fewer: down"
        step = max(1, self.limit // 8)
        self.limit = max(self.lowest, min(self.highest, self.limit + self._direction * step))
        if self.limit == self.lowest:
            self._direction = 1
        self._last_rate, self._count, self._start = rate, 0, now
        return self.limit
