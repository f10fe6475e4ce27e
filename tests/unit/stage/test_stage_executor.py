"""The compute thread: backward before forward, every waiter gets an answer, and nothing dropped runs."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
import torch

from swarm.base.virtual_time import run_virtual
from swarm.stage import executor as module
from swarm.stage.executor import Executor, InlineExecutor, Outcome, Priority, ThreadExecutor

CONTROL, BACKWARD, FORWARD, EVALUATION = Priority
WITHIN_S = 10.0


class Fault(Exception):
    """Raised by a job."""


def join(executor: ThreadExecutor) -> None:
    for thread in executor._threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive(), "the threads must end when the executor is closed"


def on_thread(main: Callable[[ThreadExecutor], Awaitable[None]], *, forward_apart: bool = False) -> None:
    """Run `main` with an executor on a real loop; nothing in it sleeps, and nothing may hang."""

    async def bounded() -> None:
        executor = ThreadExecutor(forward_apart=forward_apart)
        try:
            async with asyncio.timeout(WITHIN_S):
                await main(executor)
        finally:
            executor.close()
            join(executor)

    asyncio.run(bounded())


def on_two_threads(main: Callable[[ThreadExecutor], Awaitable[None]]) -> None:
    on_thread(main, forward_apart=True)


def in_virtual_time(main: Callable[[InlineExecutor], Awaitable[None]], duration_s: float = 1.0) -> None:
    async def bounded() -> None:
        await main(InlineExecutor(lambda priority: duration_s))

    run_virtual(bounded())


ALL = pytest.mark.parametrize("run_on", [on_thread, on_two_threads, in_virtual_time])
THREADS = pytest.mark.parametrize("run_on", [on_thread, on_two_threads])


class Blocker:
    """A job that occupies the thread until it is let go."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self._begun = asyncio.Event()
        self._gate = threading.Event()
        loop = asyncio.get_running_loop()

        def job() -> str:
            loop.call_soon_threadsafe(self._begun.set)
            assert self._gate.wait(WITHIN_S)
            return "blocker"

        self.task = asyncio.create_task(executor.run(job, CONTROL))

    async def begun(self) -> Blocker:
        await self._begun.wait()
        return self

    def let_go(self) -> None:
        self._gate.set()


async def queued(*tasks: asyncio.Task[object]) -> None:
    """Let the tasks run up to their wait."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


# ---------------------------------------------------------------------------------------------------- both


@ALL
def test_a_job_gives_its_value_and_its_times(run_on: Callable) -> None:
    async def main(executor: Executor) -> None:
        outcome = await executor.run(lambda: 7, FORWARD)
        assert outcome.value == 7
        assert outcome.queue_s >= 0.0
        assert outcome.run_s >= 0.0
        assert executor.finished == 1

    run_on(main)


@ALL
@pytest.mark.parametrize("error", [Fault("mine"), KeyError("x"), MemoryError()])
def test_a_jobs_exception_goes_to_its_waiter_and_the_next_job_runs(run_on: Callable, error: Exception) -> None:
    async def main(executor: Executor) -> None:
        def job() -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            await executor.run(job, FORWARD)
        assert raised.value is error
        assert (await executor.run(lambda: "next", FORWARD)).value == "next"
        assert executor.finished == 2

    run_on(main)


@ALL
def test_a_job_that_exhausts_an_iterator_still_answers_its_waiter(run_on: Callable) -> None:
    """A future refuses to hold a StopIteration: the waiter must get some error, not wait for ever."""
    answers: list[BaseException | None] = []

    async def main(executor: Executor) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        waiter = asyncio.create_task(executor.run(lambda: next(iter(())), FORWARD))
        done, _ = await asyncio.wait({waiter}, timeout=1.5)
        answers.extend(task.exception() for task in done)

    run_on(main)
    assert answers, "the waiter waits for ever"
    assert isinstance(answers[0], Exception)


@ALL
def test_a_closed_executor_takes_no_job(run_on: Callable) -> None:
    async def main(executor: Executor) -> None:
        executor.close()
        with pytest.raises(asyncio.CancelledError):
            await executor.run(lambda: pytest.fail("ran"), CONTROL)

    run_on(main)


# ---------------------------------------------------------------------------------------------------- the thread


def test_backward_runs_before_forward_and_equals_in_order_of_arrival() -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        order: list[str] = []
        jobs = [(EVALUATION, "e"), (FORWARD, "f1"), (BACKWARD, "b1"), (FORWARD, "f2"), (CONTROL, "c"), (BACKWARD, "b2")]
        tasks = [asyncio.create_task(executor.run(lambda name=name: order.append(name), p)) for p, name in jobs]
        await queued(*tasks)
        blocker.let_go()
        outcomes = await asyncio.gather(*tasks)
        assert order == ["c", "b1", "b2", "f1", "f2", "e"]
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)

    on_thread(main)


def test_jobs_run_on_one_thread_that_is_not_the_loops() -> None:
    async def main(executor: ThreadExecutor) -> None:
        outcomes = await asyncio.gather(*(executor.run(threading.get_ident, FORWARD) for _ in range(20)))
        threads = {outcome.value for outcome in outcomes}
        assert len(threads) == 1
        assert threading.get_ident() not in threads

    on_thread(main)


@THREADS
def test_a_cancelled_job_that_has_not_begun_never_runs(run_on: Callable) -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        ran: list[str] = []
        unwanted = asyncio.create_task(executor.run(lambda: ran.append("unwanted"), BACKWARD))
        wanted = asyncio.create_task(executor.run(lambda: ran.append("wanted"), FORWARD))
        await queued(unwanted, wanted)
        unwanted.cancel()
        await asyncio.gather(unwanted, return_exceptions=True)
        blocker.let_go()
        await wanted
        assert ran == ["wanted"]

    run_on(main)


@THREADS
def test_a_job_that_has_begun_ends_though_its_waiter_is_gone(run_on: Callable) -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        blocker.task.cancel()
        await asyncio.gather(blocker.task, return_exceptions=True)
        blocker.let_go()
        assert (await executor.run(lambda: "next", FORWARD)).value == "next"
        assert executor.finished == 2

    run_on(main)


@THREADS
def test_close_drops_what_is_queued_and_lets_the_running_job_end(run_on: Callable) -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        ran: list[str] = []
        waiting = [asyncio.create_task(executor.run(lambda: ran.append("dropped"), p)) for p in (CONTROL, FORWARD)]
        await queued(*waiting)
        executor.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        blocker.let_go()
        assert (await blocker.task).value == "blocker"
        assert ran == []

    run_on(main)


@THREADS
def test_a_running_job_shows_that_it_advances(run_on: Callable) -> None:
    """A waiter sees ticks while the job runs: slowness is not death."""

    async def main(executor: ThreadExecutor) -> None:
        loop = asyncio.get_running_loop()
        seen, gate = asyncio.Event(), threading.Event()

        def job() -> None:
            executor.tick()
            executor.tick()
            loop.call_soon_threadsafe(seen.set)
            assert gate.wait(WITHIN_S)

        task = asyncio.create_task(executor.run(job, FORWARD))
        await seen.wait()
        assert executor.finished == 2
        assert not task.done()
        gate.set()
        await task
        assert executor.finished == 3

    run_on(main)


@THREADS
def test_a_hung_job_does_not_advance_the_counter(run_on: Callable) -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        waiting = asyncio.create_task(executor.run(lambda: None, CONTROL))
        await queued(waiting)
        assert executor.finished == 0
        blocker.let_go()
        await waiting

    run_on(main)


def test_time_in_the_queue_is_told_apart_from_time_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def takes(seconds: float) -> Callable[[], None]:
        def job() -> None:
            clock.now += seconds

        return job

    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        tasks = [asyncio.create_task(executor.run(takes(seconds), FORWARD)) for seconds in (5.0, 2.0)]
        await queued(*tasks)
        blocker.let_go()
        first, second = await asyncio.gather(*tasks)
        assert (first.queue_s, first.run_s) == (0.0, 5.0)
        assert (second.queue_s, second.run_s) == (5.0, 2.0)

    on_thread(main)


# ---------------------------------------------------------------------------------------------------- two threads


class Gates:
    """Jobs that tell when they begin and end when they are told to."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._gates: dict[str, threading.Event] = {}
        self._begun: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self.running: list[str] = []

    async def ask_for(self, name: str, priority: Priority) -> None:
        gate = self._gates[name] = threading.Event()
        self._begun[name] = asyncio.Event()

        def job() -> None:
            self._loop.call_soon_threadsafe(self._begin, name)
            assert gate.wait(WITHIN_S)

        self._tasks[name] = asyncio.create_task(self._executor.run(job, priority))
        await queued(self._tasks[name])

    def _begin(self, name: str) -> None:
        self.running.append(name)
        self._begun[name].set()

    async def begun(self, name: str) -> None:
        await self._begun[name].wait()

    async def end(self, name: str) -> None:
        self._gates[name].set()
        await self._tasks[name]
        self.running.remove(name)


async def a_while() -> None:
    """Long enough for a job to begin that must not: what is asserted after it holds however slow the machine is."""
    await asyncio.sleep(0.05)


def test_a_forward_runs_beside_a_backward_and_begins_only_while_few_wait() -> None:
    async def main(executor: ThreadExecutor) -> None:
        jobs = Gates(executor)
        for name, priority in (("b0", BACKWARD), ("f1", FORWARD)):
            await jobs.ask_for(name, priority)
            await jobs.begun(name)
        assert jobs.running == ["b0", "f1"]
        waiting = [f"b{number}" for number in range(1, 1 + module.WAITING_BACKWARDS)]
        for name in waiting:
            await jobs.ask_for(name, BACKWARD)
        await jobs.ask_for("f2", FORWARD)
        await jobs.end("f1")
        await a_while()
        assert jobs.running == ["b0"], "too many backwards wait"
        await jobs.end("b0")
        await jobs.begun("b1")
        await jobs.begun("f2")
        for name in ("f2", *waiting):
            await jobs.begun(name)
            await jobs.end(name)

    on_two_threads(main)


def test_a_control_job_runs_beside_nothing() -> None:
    async def main(executor: ThreadExecutor) -> None:
        jobs = Gates(executor)
        await jobs.ask_for("f1", FORWARD)
        await jobs.begun("f1")
        await jobs.ask_for("c", CONTROL)
        await jobs.ask_for("b", BACKWARD)
        await jobs.ask_for("f2", FORWARD)
        await jobs.ask_for("e", EVALUATION)
        await a_while()
        assert jobs.running == ["f1"]
        await jobs.end("f1")
        await jobs.begun("c")
        await a_while()
        assert jobs.running == ["c"]
        await jobs.end("c")
        await jobs.begun("b")
        await jobs.begun("f2")
        await a_while()
        assert sorted(jobs.running) == ["b", "f2"], "the evaluation has the forward's thread"
        for name in ("b", "f2"):
            await jobs.end(name)
        await jobs.begun("e")
        await jobs.end("e")

    on_two_threads(main)


def test_thousands_of_jobs_on_two_threads_keep_to_the_rules() -> None:
    async def main(executor: ThreadExecutor) -> None:
        lock, running = threading.Lock(), {priority: 0 for priority in Priority}
        wrong: list[dict[Priority, int]] = []

        def job(priority: Priority) -> None:
            with lock:
                running[priority] += 1
                forwards = running[FORWARD] + running[EVALUATION]
                if forwards > 1 or running[BACKWARD] > 1 or (running[CONTROL] and sum(running.values()) > 1):
                    wrong.append(dict(running))
            executor.tick()
            with lock:
                running[priority] -= 1

        priorities = [Priority(number % 7 % 4) for number in range(4000)]
        await asyncio.gather(*(executor.run(lambda p=p: job(p), p) for p in priorities))
        assert not wrong
        assert executor.finished == 2 * len(priorities), "no tick is lost"

    on_two_threads(main)


# ---------------------------------------------------------------------------------------------------- virtual time


def test_inline_jobs_take_their_modelled_time_one_after_the_other() -> None:
    async def main() -> None:
        durations = {CONTROL: 0.5, BACKWARD: 2.0, FORWARD: 1.0, EVALUATION: 4.0}
        executor = InlineExecutor(durations.__getitem__)
        loop = asyncio.get_running_loop()
        ended: list[tuple[str, float]] = []

        async def one(name: str, priority: Priority) -> Outcome[str]:
            outcome = await executor.run(lambda: name, priority)
            ended.append((name, loop.time()))
            return outcome

        outcomes = await asyncio.gather(
            one("f1", FORWARD), one("e", EVALUATION), one("f2", FORWARD), one("b", BACKWARD), one("c", CONTROL)
        )
        assert ended == [("c", 0.5), ("b", 2.5), ("f1", 3.5), ("f2", 4.5), ("e", 8.5)]
        assert [(o.value, o.queue_s, o.run_s) for o in outcomes] == [
            ("f1", 2.5, 1.0), ("e", 4.5, 4.0), ("f2", 3.5, 1.0), ("b", 0.5, 2.0), ("c", 0.0, 0.5),
        ]  # fmt: skip

    run_virtual(main())


def test_an_inline_job_that_arrives_later_overtakes_by_priority() -> None:
    async def main(executor: InlineExecutor) -> None:
        order: list[str] = []
        tasks = [asyncio.create_task(executor.run(lambda n=n: order.append(f"f{n}"), FORWARD)) for n in range(3)]
        await asyncio.sleep(0.5)
        await executor.run(lambda: order.append("b"), BACKWARD)
        await asyncio.gather(*tasks)
        assert order == ["f0", "b", "f1", "f2"]

    in_virtual_time(main)


def test_an_inline_cancelled_job_never_runs() -> None:
    async def main(executor: InlineExecutor) -> None:
        ran: list[str] = []
        first = asyncio.create_task(executor.run(lambda: ran.append("first"), FORWARD))
        unwanted = asyncio.create_task(executor.run(lambda: ran.append("unwanted"), FORWARD))
        await asyncio.sleep(0.5)
        unwanted.cancel()
        await first
        await executor.run(lambda: ran.append("last"), FORWARD)
        assert ran == ["first", "last"]
        assert asyncio.get_running_loop().time() == pytest.approx(2.0), "it must take no time either"

    in_virtual_time(main)


def test_a_hung_inline_device_ends_no_job_while_the_loop_is_lively() -> None:
    async def main(executor: InlineExecutor) -> None:
        executor.hung = True
        task = asyncio.create_task(executor.run(lambda: "done", FORWARD))
        await asyncio.sleep(3600.0)
        assert not task.done()
        assert executor.finished == 0, "a counter that advances would hide the hang"
        executor.hung = False
        assert (await task).value == "done"
        assert executor.finished == 1

    in_virtual_time(main)


def test_closing_an_inline_executor_drops_what_is_queued() -> None:
    async def main(executor: InlineExecutor) -> None:
        ran: list[str] = []
        running = asyncio.create_task(executor.run(lambda: ran.append("running"), FORWARD))
        waiting = asyncio.create_task(executor.run(lambda: ran.append("waiting"), FORWARD))
        await asyncio.sleep(0.5)
        executor.close()
        (result,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)
        assert "waiting" not in ran
        running.cancel()

    in_virtual_time(main)


@pytest.mark.parametrize("hung", [False, True])
def test_closing_an_inline_executor_leaves_nobody_waiting(hung: bool) -> None:
    """The waiter of the running job gets its value or is cancelled; promise 4."""

    async def main(executor: InlineExecutor) -> None:
        executor.hung = hung
        running = asyncio.create_task(executor.run(lambda: "value", FORWARD))
        await asyncio.sleep(0.5)
        executor.close()
        done, _ = await asyncio.wait({running}, timeout=60.0)
        assert done, "the waiter of the running job waits for ever"

    in_virtual_time(main)


def test_the_next_job_waits_for_after_job_and_the_jobs_waiter_does_not() -> None:
    """A compute thread that is too far ahead of its device is held there; what it has done is told meanwhile."""

    async def main() -> None:
        happened: list[str] = []
        gate = threading.Event()

        def after_job() -> None:
            assert gate.wait(WITHIN_S)
            happened.append("after")

        executor = ThreadExecutor(prepare=lambda: happened.append("prepared"), after_job=after_job)
        async with asyncio.timeout(WITHIN_S):
            await executor.run(lambda: happened.append("first"), FORWARD)
            second = asyncio.ensure_future(executor.run(lambda: happened.append("second"), FORWARD))
            await asyncio.sleep(0)
            assert happened == ["prepared", "first"]
            gate.set()
            await second
        executor.close()
        join(executor)
        assert happened == ["prepared", "first", "after", "second", "after"]

    asyncio.run(main())


@pytest.mark.parametrize("forward_apart", [False, True])
def test_a_device_that_breaks_between_two_jobs_is_told_to_the_next_ones_waiter(forward_apart: bool) -> None:
    """Promise 4: a thread that ended instead would leave everyone waiting."""

    async def main() -> None:
        def after_job() -> None:
            raise Fault("broken")

        executor = ThreadExecutor(forward_apart=forward_apart, after_job=after_job)
        async with asyncio.timeout(WITHIN_S):
            await executor.run(lambda: None, FORWARD)
            if forward_apart:
                await executor.run(lambda: None, BACKWARD)
            for priority in (FORWARD, BACKWARD):
                with pytest.raises(Fault, match="broken"):
                    await executor.run(lambda: pytest.fail("ran"), priority)
        executor.close()
        join(executor)

    asyncio.run(main())


def test_no_job_runs_in_a_thread_that_could_not_be_prepared() -> None:
    async def main() -> None:
        def prepare() -> None:
            raise Fault("no such device")

        executor = ThreadExecutor(prepare=prepare)
        async with asyncio.timeout(WITHIN_S):
            for _ in range(3):
                with pytest.raises(Fault, match="no such device"):
                    await executor.run(lambda: pytest.fail("ran"), FORWARD)
        executor.close()
        join(executor)

    asyncio.run(main())


@THREADS
def test_what_a_dropped_job_holds_is_let_go_though_no_other_job_comes(run_on: Callable) -> None:
    class Activation:
        pass

    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        activation = Activation()
        held, gone = weakref.ref(activation), asyncio.Event()
        weakref.finalize(activation, asyncio.get_running_loop().call_soon_threadsafe, gone.set)
        task = asyncio.create_task(executor.run(lambda kept=activation: kept, BACKWARD))
        await queued(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del activation, task
        blocker.let_go()
        await gone.wait()
        assert held() is None

    run_on(main)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core there is never a second thread")
def test_its_thread_computes_with_as_many_threads_as_torch_had() -> None:
    """A product starts no thread of its own where torch has one: several peers of a machine would wait for each other."""

    vector = torch.ones(100_000)  # not made in that thread, which would set the number in passing

    def new_threads() -> int:
        before = len(os.listdir("/proc/self/task"))
        torch.dot(vector, vector)
        return len(os.listdir("/proc/self/task")) - before

    async def main(executor: ThreadExecutor) -> None:
        assert (await executor.run(new_threads, FORWARD)).value <= 0  # one that another test left behind may end

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        on_thread(main)
    finally:
        torch.set_num_threads(before)
