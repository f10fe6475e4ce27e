"""An asyncio loop whose time is virtual: an hour passes in milliseconds, and a wait nobody can end is an error.

Used by unit tests, simulations and `benchmarks/`; production code only ever asks its running loop for `time()`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set: this program would hang for ever."""


class _SkippingSelector(selectors.BaseSelector):
    """A selector that adds the timeout to the clock instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._inner = selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("all tasks are waiting and no timer is set")
        self.now += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time, starting at 0 s. Threads and real sockets do not belong on it."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, cancelling what it leaves behind.

    Raises:
        Deadlock: if every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
