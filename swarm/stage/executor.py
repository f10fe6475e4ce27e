"""The compute thread of a device: jobs by priority, backward before forward (1F1B). Knows no network and no protocol.

`ThreadExecutor` is the real one; `InlineExecutor` runs jobs in virtual time, each charged a modelled duration.
"""

from __future__ import annotations

import abc
import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

#: With so many waiting no forward begins. With one a thread that has the longer jobs would now and then have none: a
#: stage whose backwards take 13 ms and forwards 10 would do one in 15.
WAITING_BACKWARDS = 2


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


class Executor(abc.ABC):
    """Runs jobs in the order of (priority, arrival), one at a time unless it says otherwise."""

    @property
    @abc.abstractmethod
    def finished(self) -> int:
        """Jobs finished so far, plus progress inside the running one: a counter for heartbeats."""

    @abc.abstractmethod
    def tick(self) -> None:
        """Called from inside a long job (once per layer) to show that it advances."""

    @abc.abstractmethod
    async def run(self, job: Callable[[], T], priority: Priority) -> Outcome[T]:
        """Run `job`; its exception is raised here. Cancelling drops it if it has not begun."""

    @abc.abstractmethod
    def close(self) -> None:
        """Take no more jobs; the running one ends, queued ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Where a stage peer's jobs run; what is in one waits for none of the others."""

    #: The device's.
    compute: Executor
    #: Averages and the digests that a step waits for.
    background: Executor
    #: Checkpoints and snapshots, which no step waits for.
    storage: Executor

    def close(self) -> None:
        self.compute.close()
        self.background.close()
        self.storage.close()


class _Lane:
    """One thread of an executor, and what waits for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self.heap: list[tuple[int, int, Callable[[], Any], asyncio.Future[Any], float]] = []
        self.wake = threading.Condition(lock)
        #: Of the job that runs now.
        self.running: int | None = None

    @property
    def first(self) -> int | None:
        """Priority of the job that is next."""
        return self.heap[0][0] if self.heap else None


class ThreadExecutor(Executor):
    """One daemon thread, or two. `run` must be called from the event loop the executor was made on.

    With `forward_apart` forward and evaluation jobs have a thread of their own, so that one of them runs beside a
    backward job. It begins only while fewer than `WAITING_BACKWARDS` of those wait, which bounds the graphs that wait
    for theirs; and a control job runs beside nothing.

    Each computes with as many threads as torch had when they were made: the OpenMP of each thread has a number of its own,
    which a product or a dot product takes to be all cores until it was set (and then waits, busily, for cores that others
    have).

    Args:
        name: of the thread.
        forward_apart: for devices where a job only starts what is computed.
        prepare: called first of all in each thread. What it raises is the outcome of all of its jobs.
        after_job: called after each job; its thread's next waits for it, the job's waiter does not. What it raises is
            the next one's outcome.
    """

    def __init__(
        self, name: str = "compute", *, forward_apart: bool = False, prepare: Callable[[], None] | None = None,
        after_job: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._num_threads = torch.get_num_threads()
        self._prepare = prepare
        self._after_job = after_job
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._closed = False
        self._finished = 0
        self._loop = asyncio.get_running_loop()
        self._first = _Lane(self._lock)
        self._forward = _Lane(self._lock) if forward_apart else self._first
        lanes = {"": self._first, **({"-forward": self._forward} if forward_apart else {})}
        self._lanes = list(lanes.values())
        self._threads = [
            threading.Thread(target=self._work, args=[lane], name=name + suffix, daemon=True) for suffix, lane in lanes.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def finished(self) -> int:
        return self._finished

    def tick(self) -> None:
        with self._lock:
            self._finished += 1

    async def run(self, job: Callable[[], T], priority: Priority) -> Outcome[T]:
        future: asyncio.Future[Outcome[T]] = self._loop.create_future()
        lane = self._forward if priority >= Priority.FORWARD else self._first
        with self._lock:
            if self._closed:
                raise asyncio.CancelledError("the executor is closed")
            heapq.heappush(lane.heap, (int(priority), next(self._order), job, future, time.monotonic()))
            lane.wake.notify()
        return await future

    def _may_begin(self, lane: _Lane) -> bool:
        """Whether the first job of `lane` is its turn."""
        if not lane.heap or self._first is self._forward:
            return bool(lane.heap)
        if lane is self._first:
            return lane.first != Priority.CONTROL or self._forward.running is None
        return Priority.CONTROL not in (self._first.running, self._first.first) and len(self._first.heap) < WAITING_BACKWARDS

    def _wake_others(self, lane: _Lane) -> None:
        """What `lane` ran has ended, or what waited there runs: it may be another's turn."""
        for other in self._lanes:
            if other is not lane and other.heap:
                other.wake.notify()

    def _next(self, lane: _Lane) -> tuple[Callable[[], Any], asyncio.Future[Any], float] | None:
        """Wait for the next job of `lane`; None once the executor is closed."""
        with self._lock:
            lane.running = None
            self._wake_others(lane)
            while not self._closed and not self._may_begin(lane):
                lane.wake.wait()
            if self._closed:
                return None
            priority, _, job, future, queued_at = heapq.heappop(lane.heap)
            lane.running = priority
            self._wake_others(lane)
            return job, future, queued_at

    def _work(self, lane: _Lane) -> None:
        torch.set_num_threads(self._num_threads)
        trouble = unprepared = _raised_by(self._prepare)
        while (taken := self._next(lane)) is not None:
            job, future, queued_at = taken
            if not future.cancelled():
                began = time.monotonic()
                try:
                    if trouble is not None:
                        raise trouble
                    value, error = job(), None
                except BaseException as raised:  # handed to the waiter, whatever it is
                    value, error = None, raised
                self.tick()
                ended = time.monotonic()
                try:
                    self._loop.call_soon_threadsafe(_settle, future, Outcome(value, began - queued_at, ended - began), error)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    return
                del value, error
                trouble = unprepared or _raised_by(self._after_job)
            del taken, job, future  # what they hold is let go before the next is waited for

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dropped = [queued for lane in self._lanes for queued in lane.heap]
            for lane in self._lanes:
                lane.heap.clear()
                lane.wake.notify_all()
        for _, _, _, future, _ in dropped:
            future.cancel()


def _raised_by(call: Callable[[], None] | None) -> BaseException | None:
    try:
        if call is not None:
            call()
    except BaseException as error:  # a device that broke
        return error
    return None


def _settle(future: asyncio.Future[Any], outcome: Outcome[Any], error: BaseException | None) -> None:
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
        self._duration = duration
        self._heap: list[tuple[int, int, Callable[[], Any], asyncio.Future[Any], float]] = []
        self._order = itertools.count()
        self._finished = 0
        self._worker: asyncio.Task[None] | None = None
        self._closed = False
        #: While set, the running job never ends though the loop is lively (a hung device).
        self.hung = False

    @property
    def finished(self) -> int:
        return self._finished

    def tick(self) -> None:
        """A job is one jump in virtual time: nothing to show inside it."""

    async def run(self, job: Callable[[], T], priority: Priority) -> Outcome[T]:
        if self._closed:
            raise asyncio.CancelledError("the executor is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome[T]] = loop.create_future()
        heapq.heappush(self._heap, (int(priority), next(self._order), job, future, loop.time()))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._heap:
            priority, _, job, future, queued_at = heapq.heappop(self._heap)
            if future.cancelled():
                continue
            began = loop.time()
            try:
                await asyncio.sleep(self._duration(Priority(priority)))
                while self.hung:  # noqa: ASYNC110 (a device that hangs sets no event when it goes on)
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                future.cancel()
                raise
            try:
                value, error = job(), None
            except Exception as raised:  # handed to the waiter
                value, error = None, raised
            self._finished += 1
            _settle(future, Outcome(value, began - queued_at, loop.time() - began), error)

    def close(self) -> None:
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
        for _, _, _, future, _ in self._heap:
            future.cancel()
        self._heap.clear()
