"""The compute thread: one per device, jobs by priority, backward before forward (1F1B).

Owns the order of jobs, and measures them, so that whoever waits can tell a long one from one that hangs; must not know what
they compute, nor a network. `ThreadExecutor` is the real one; `InlineExecutor` runs jobs in virtual time, each charged a
modelled duration.
"""

from __future__ import annotations

import abc
import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch

from swarm.policy.job_times import CONTROL, JobTimes

T = TypeVar("T")


class Priority(IntEnum):
    """Lower runs first."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    EVALUATION = 3


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A job's value, with the seconds it waited and ran."""

    value: T
    queue_s: float
    run_s: float


#: What a job of each priority is, unless its owner says.
_KINDS = {
    Priority.CONTROL: CONTROL,
    Priority.BACKWARD: "backward",
    Priority.FORWARD: "forward",
    Priority.EVALUATION: "evaluation",
}


@dataclass(slots=True)
class Running:
    """The job under way; times as of `Executor.now`."""

    kind: str
    began: float
    #: When it last showed that it advances.
    ticked: float


class Executor(abc.ABC):
    """Runs jobs one at a time in the order of (priority, arrival)."""

    def __init__(self) -> None:
        #: What jobs took here, by kind.
        self.times = JobTimes()
        #: None while there is nothing to do.
        self.running: Running | None = None

    @staticmethod
    @abc.abstractmethod
    def now() -> float:
        """The clock of `running`, in seconds."""

    @property
    @abc.abstractmethod
    def finished(self) -> int:
        """Jobs finished so far, plus progress inside the running one: a counter for heartbeats."""

    @abc.abstractmethod
    def tick(self) -> None:
        """Called from inside a long job (once per layer) to show that it advances."""

    @abc.abstractmethod
    async def run(self, job: Callable[[], T], priority: Priority, kind: str | None = None) -> Outcome[T]:
        """Run `job`; its exception is raised here. Cancelling drops it if it has not begun.

        Args:
            kind: of `job_times.KINDS`, if the priority does not tell.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Take no more jobs; the running one ends, queued ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The threads of a stage peer; what is in one waits for none of the others."""

    #: The device's compute thread.
    compute: Executor
    #: Averages and the digests that a step waits for.
    background: Executor
    #: Checkpoints and snapshots, which no step waits for.
    storage: Executor

    def close(self) -> None:
        """Close all three."""
        self.compute.close()
        self.background.close()
        self.storage.close()


@dataclass(order=True, slots=True)
class _Queued:
    priority: int
    number: int
    job: Callable[[], Any] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)
    queued_at: float = field(compare=False)
    kind: str = field(compare=False)


class ThreadExecutor(Executor):
    """One daemon thread. `run` must be called from the event loop the executor was made on.

    It computes with as many threads as torch had when it was made: the OpenMP of each thread has a number of its own, which
    a product or a dot product takes to be all cores until it was set (and then waits, busily, for cores that others have).

    Args:
        name: of the thread.
        prepare: called first of all in the thread. What it raises is the outcome of all jobs.
        after_job: called after each job; the next waits for it, the job's waiter does not. What it raises is the next
            one's outcome.
    """

    def __init__(
        self, name: str = "compute", *, prepare: Callable[[], None] | None = None, after_job: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._num_threads = torch.get_num_threads()
        self._prepare = prepare
        self._after_job = after_job
        self._heap: list[_Queued] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._finished = 0
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    @property
    def finished(self) -> int:
        """Jobs that ended so far, and ticks of those that run."""
        return self._finished

    def tick(self) -> None:
        """Count something that a running job has done."""
        self._finished += 1
        if (running := self.running) is not None:
            running.ticked = self.now()

    async def run(self, job: Callable[[], T], priority: Priority, kind: str | None = None) -> Outcome[T]:
        """Run `job` on the thread when its turn has come."""
        future: asyncio.Future[Outcome[T]] = self._loop.create_future()
        with self._wake:
            if self._closed:
                raise asyncio.CancelledError("the executor is closed")
            queued = _Queued(int(priority), next(self._order), job, future, self.now(), kind or _KINDS[priority])
            heapq.heappush(self._heap, queued)
            self._wake.notify()
        return await future

    def _next(self) -> _Queued | None:
        """Wait for the next job; None once the executor is closed."""
        with self._wake:
            while not self._heap and not self._closed:
                self._wake.wait()
            return None if self._closed else heapq.heappop(self._heap)

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        trouble = unprepared = _raised_by(self._prepare)
        while (taken := self._next()) is not None:
            if not taken.future.cancelled():
                began = self.now()
                self.running = Running(taken.kind, began, began)
                try:
                    if trouble is not None:
                        raise trouble
                    value, error = taken.job(), None
                except BaseException as raised:  # handed to the waiter, whatever it is
                    value, error = None, raised
                self._finished += 1
                ended = self.now()
                outcome = Outcome(value, began - taken.queued_at, ended - began)
                try:
                    self._loop.call_soon_threadsafe(_finish, taken.future, outcome, error)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    return
                trouble = unprepared or _raised_by(self._after_job)
                if error is None:
                    self.times.note(taken.kind, self.now() - began)
                self.running = None
                del value, error, outcome
            del taken  # what it holds is let go before the next is waited for

    def close(self) -> None:
        """Take no more jobs; the running one ends, queued ones are dropped."""
        with self._wake:
            self._closed = True
            dropped, self._heap = self._heap, []
            self._wake.notify()
        for queued in dropped:
            queued.future.cancel()


def _raised_by(call: Callable[[], None] | None) -> BaseException | None:
    try:
        if call is not None:
            call()
    except BaseException as error:  # a device that broke
        return error
    return None


def _finish(future: asyncio.Future[Any], outcome: Outcome[Any], error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future refuses to hold one
        error = RuntimeError(f"the job raised StopIteration: {error}")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class InlineExecutor(Executor):
    """Runs jobs on the event loop, one at a time, each taking `duration(priority)` seconds of the loop's time."""

    def __init__(self, duration: Callable[[Priority], float]) -> None:
        super().__init__()
        self._duration = duration
        self._heap: list[_Queued] = []
        self._order = itertools.count()
        self._finished = 0
        self._worker: asyncio.Task[None] | None = None
        self._closed = False
        #: While set, the running job never ends though the loop is lively (a hung device).
        self.hung = False

    @property
    def finished(self) -> int:
        """Jobs that ended so far."""
        return self._finished

    def tick(self) -> None:
        """A job is one jump in virtual time: nothing to show inside it."""

    @staticmethod
    def now() -> float:
        """Seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def run(self, job: Callable[[], T], priority: Priority, kind: str | None = None) -> Outcome[T]:
        """Run `job` on the event loop once the time that it takes has passed."""
        if self._closed:
            raise asyncio.CancelledError("the executor is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome[T]] = loop.create_future()
        queued = _Queued(int(priority), next(self._order), job, future, self.now(), kind or _KINDS[priority])
        heapq.heappush(self._heap, queued)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._heap:
            taken = heapq.heappop(self._heap)
            if taken.future.cancelled():
                continue
            began = self.now()
            self.running = Running(taken.kind, began, began)
            try:
                await asyncio.sleep(self._duration(Priority(taken.priority)))
                while self.hung:  # noqa: ASYNC110 (a device that hangs sets no event when it goes on)
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                taken.future.cancel()
                raise
            try:
                value, error = taken.job(), None
            except Exception as raised:  # handed to the waiter
                value, error = None, raised
            self._finished += 1
            self.running = None
            if error is None:
                self.times.note(taken.kind, self.now() - began)
            _finish(taken.future, Outcome(value, began - taken.queued_at, self.now() - began), error)

    def close(self) -> None:
        """Give up all jobs."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
        for queued in self._heap:
            queued.future.cancel()
        self._heap.clear()
