"""An asyncio loop whose time is virtual: an hour passes in milliseconds, and a wait nobody can end is an error.

Owns the order in which things happen at one moment, too: it is drawn from a seed. Which socket, timer or thread is ready first
is nobody's promise, so callbacks that are ready together run in a random order, and timers that are due together likewise. One
order is kept, since asyncio documents it (`call_soon` is first in, first out) and its own parts and those who add several
callbacks to one future build on it: what one callback made ready runs in the order in which it did so. A loop under load comes
late, and so finds together what was due one after the other: `late_s` is for that.

Used by unit tests, simulations and `benchmarks/`; production code only ever asks its running loop for `time()`.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set: this program would hang for ever."""


#: Share of the waits after which a loop with `late_s` comes late.
_LATE = 0.25


class _SkippingSelector(selectors.BaseSelector):
    """A selector that adds the timeout to the clock instead of waiting for it."""

    def __init__(self, rng: random.Random, late_s: float) -> None:
        self.now = 0.0
        self._rng = rng
        self._late_s = late_s
        self._inner = selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []  # callbacks are ready: to ask for sockets, of which there are none, costs a simulation some 5 %
        ready = self._inner.select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("all tasks are waiting and no timer is set")
        self.now += max(0.0, timeout)
        if self._late_s and timeout > 0 and self._rng.random() < _LATE:
            self.now += self._rng.uniform(0.0, self._late_s)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class _Ready:
    """What is ready to run, in place of the loop's queue: turns are merged at random from what each callback made ready."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        #: The rest of this turn, last first.
        self._turn: list[asyncio.Handle] = []
        #: Of the next turn; each list is in order.
        self._groups: list[list[asyncio.Handle]] = []
        #: That of the callback which runs now; None between turns, when timers and sockets come in.
        self._own: list[asyncio.Handle] | None = None

    def __len__(self) -> int:
        return len(self._turn) + sum(map(len, self._groups))

    def __bool__(self) -> bool:
        return bool(self._turn or self._groups)

    def append(self, handle: asyncio.Handle) -> None:
        if self._own:
            self._own.append(handle)
            return
        group = [handle]
        self._groups.append(group)
        if self._own is not None:
            self._own = group

    def popleft(self) -> asyncio.Handle:
        if not self._turn:
            groups, self._groups = self._groups, []
            if len(groups) > 1:
                order = [group for group in groups for _ in group]
                self._rng.shuffle(order)
                for group in groups:
                    group.reverse()
                self._turn = [group.pop() for group in order]
            else:
                [self._turn] = groups
            self._turn.reverse()
        self._own = []
        return self._turn.pop()

    def between_turns(self) -> None:
        self._own = None

    def clear(self) -> None:
        self._turn, self._groups = [], []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time, starting at 0 s. Threads and real sockets do not belong on it.

    Args:
        seed: of the order of what is ready together, and of how late the loop comes.
        late_s: most seconds that the loop comes late after a wait; 0 is never.
    """

    def __init__(self, seed: int = 0, *, late_s: float = 0.0) -> None:
        rng = random.Random(f"loop of {seed}")
        self._skipping = _SkippingSelector(rng, late_s)
        super().__init__(self._skipping)
        self._ready = self._shuffled = _Ready(rng)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._skipping.now

    def _run_once(self) -> None:
        self._shuffled.between_turns()
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int = 0, late_s: float = 0.0) -> T:
    """Run `main` to its end in virtual time, cancelling what it leaves behind; `seed` and `late_s` as of the loop.

    Raises:
        Deadlock: if every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed, late_s=late_s)) as runner:
        return runner.run(main)
