"""How late the event loop comes to what is due: while something holds it, nothing is sent and nobody is answered.

Owns one timer and the worst that it saw; decides nothing.
"""

from __future__ import annotations

import asyncio

#: Between two looks, in seconds; each takes some microseconds.
EVERY_S = 0.05
#: The worst of the last one to two of these counts.
WINDOW_S = 30.0


class LoopMeter:
    """Measures the event loop on which it is started."""

    def __init__(self) -> None:
        self._before_s = self._worst_s = 0.0

    @property
    def worst_s(self) -> float:
        """The longest that the loop was held up lately, in seconds."""
        return max(self._before_s, self._worst_s)

    def start(self) -> None:
        """Measure from now on; call it on the loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends = self._loop.time() + WINDOW_S
        self._arm()

    def stop(self) -> None:
        """Measure no more."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._loop.time() + EVERY_S
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._window_ends:
            self._before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends = now + WINDOW_S
        self._worst_s = max(self._worst_s, now - self._due)
        self._arm()
