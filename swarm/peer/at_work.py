"""Vouches for a compute thread to those who wait for it: a job is at work for as long as such jobs may take.

A job in which nothing shows that it advances, one layer of a minute say, is told from one that hangs by what such jobs took
before; by what they took at the stage's other peers if it is this one's first. As long as nobody knows, it is waited for.
Owns the counters that heartbeats carry for it; must not know what the jobs are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarm.net.transport import Progress
from swarm.peer.link import Link, Tasks
from swarm.stage.executor import Executor, Running
from swarm.wire import messages as m

#: Peers of the stage that are asked what their jobs took, each time.
MAX_ASKED = 4


class AtWork:
    """Watches the jobs of one peer's compute thread.

    Args:
        link: asks other peers.
        tasks: owns the asking.
        executor: of the jobs.
        mates: who else serves the stage.
    """

    def __init__(self, link: Link, tasks: Tasks, executor: Executor, mates: Callable[[], Sequence[m.Member]]) -> None:
        self._link = link
        self._tasks = tasks
        self._executor = executor
        self._mates = mates
        self._stall_s = link.context.config.timing.stall_s
        self._ask_at = 0.0
        self._beside: list[Running] = []

    def follow(self, progress: Progress, *, waits_s: float) -> None:
        """Have `progress` advance with the compute thread.

        Args:
            waits_s: how long whoever follows `progress` waits once it does not advance: the end of what a job may take is
                that of the wait.
        """
        count = 0

        def look() -> int:
            nonlocal count
            under_way = list(self._under_way())
            for running in under_way:
                self._ask_if_unknown(running)
            count += any(self._executor.now() + waits_s < self._until(running) for running in under_way)
            return count

        progress.follow(lambda: self._executor.finished)
        progress.follow(look)

    @contextmanager
    def beside(self, kind: str) -> Iterator[None]:
        """Mark a job that the compute thread gave to a device: it goes on there until the block ends."""
        now = self._executor.now()
        running = Running(kind, now, now)
        self._beside.append(running)
        try:
            yield
        finally:
            self._beside.remove(running)

    def overdue(self) -> str:
        """Return what seems to hang in the compute thread, in words; "" as a rule."""
        running = self._executor.running
        if running is None or self._executor.now() < self._until(running):
            return ""
        return f"its compute thread hangs: {self._words(running)}"

    def told(self) -> dict[str, str | float]:
        """Return, for a status, what jobs took here, and which one is under way."""
        running = next(self._under_way(), None)
        return {**self._executor.times.told(), **({} if running is None else {"job": self._words(running)})}

    def _under_way(self) -> Iterator[Running]:
        if self._executor.running is not None:
            yield self._executor.running
        yield from self._beside

    def _words(self, running: Running) -> str:
        longest_s = self._executor.times.longest_s(running.kind)
        usual = "no such job has ended yet" if longest_s is None else f"such jobs took {longest_s:.3g} s"
        return f"{running.kind} for {self._executor.now() - running.began:.3g} s, {usual}"

    def _until(self, running: Running) -> float:
        """Return the time, on the executor's clock, from which on it hangs."""
        return max(running.began + self._executor.times.allowed_s(running.kind), running.ticked + self._stall_s)

    def _ask_if_unknown(self, running: Running) -> None:
        """Ask others now and then, while nobody here knows what such a job may take."""
        now = self._executor.now()
        if self._until(running) == math.inf and now >= max(self._ask_at, running.began + self._stall_s / 2):
            self._ask_at = now + self._stall_s / 2
            self._tasks.start(self._ask(), "what jobs take")

    async def _ask(self) -> None:
        """Ask other peers of the stage what such a job took."""
        for mate in list(self._mates())[:MAX_ASKED]:
            reply = await self._link.status_of(mate)
            if reply is not None and reply.member.key == mate.key:
                self._executor.times.hear(reply.detail)
