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

from swarm.stage import executor as module
from swarm.stage.executor import Executor, InlineExecutor, Outcome, Priority, ThreadExecutor
from swarm.testing.virtual_time import run_virtual

CONTROL, BACKWARD, FORWARD, EVALUATION = Priority
WITHIN_S = 10.0


class Fault(Exception):
    """Raised by a job."""


def join(executor: ThreadExecutor) -> None:
    executor._thread.join(WITHIN_S)
    assert not executor._thread.is_alive(), "the thread must end when the executor is closed"


def on_thread(main: Callable[[ThreadExecutor], Awaitable[None]]) -> None:
    """Run `main` with an executor on a real loop; nothing in it sleeps, and nothing may hang."""

    async def bounded() -> None:
        executor = ThreadExecutor()
        try:
            async with asyncio.timeout(WITHIN_S):
                await main(executor)
        finally:
            executor.close()
            join(executor)

    asyncio.run(bounded())


def in_virtual_time(main: Callable[[InlineExecutor], Awaitable[None]], duration_s: float = 1.0) -> None:
    async def bounded() -> None:
        await main(InlineExecutor(lambda priority: duration_s))

    run_virtual(bounded())


BOTH = pytest.mark.parametrize("run_on", [on_thread, in_virtual_time])


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


@BOTH
def test_a_job_gives_its_value_and_its_times(run_on: Callable) -> None:
    async def main(executor: Executor) -> None:
        outcome = await executor.run(lambda: 7, FORWARD)
        assert outcome.value == 7
        assert outcome.queue_s >= 0.0
        assert outcome.run_s >= 0.0
        assert executor.finished == 1

    run_on(main)


@BOTH
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


@BOTH
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


@BOTH
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


def test_a_cancelled_job_that_has_not_begun_never_runs() -> None:
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

    on_thread(main)


def test_a_job_that_has_begun_ends_though_its_waiter_is_gone() -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        blocker.task.cancel()
        await asyncio.gather(blocker.task, return_exceptions=True)
        blocker.let_go()
        assert (await executor.run(lambda: "next", FORWARD)).value == "next"
        assert executor.finished == 2

    on_thread(main)


def test_close_drops_what_is_queued_and_lets_the_running_job_end() -> None:
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

    on_thread(main)


def test_a_running_job_shows_that_it_advances() -> None:
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

    on_thread(main)


def test_a_hung_job_does_not_advance_the_counter() -> None:
    async def main(executor: ThreadExecutor) -> None:
        blocker = await Blocker(executor).begun()
        waiting = asyncio.create_task(executor.run(lambda: None, CONTROL))
        await queued(waiting)
        assert executor.finished == 0
        blocker.let_go()
        await waiting

    on_thread(main)


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
            ("f1", 2.5, 1.0),
            ("e", 4.5, 4.0),
            ("f2", 3.5, 1.0),
            ("b", 0.5, 2.0),
            ("c", 0.0, 0.5),
        ]

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


def test_what_jobs_take_is_known_by_kind_and_the_running_one_is_seen() -> None:
    async def main(executor: InlineExecutor) -> None:
        assert executor.running is None
        task = asyncio.create_task(executor.run(lambda: None, BACKWARD, "recomputation"))
        await asyncio.sleep(0.4)
        assert executor.running is not None
        assert (executor.running.kind, executor.now() - executor.running.began) == ("recomputation", pytest.approx(0.4))
        await task
        assert executor.running is None
        await executor.run(lambda: None, FORWARD)
        with pytest.raises(Fault):
            await executor.run(fail, BACKWARD)
        told = {kind: pytest.approx(1.0) for kind in ("recomputation_s", "forward_s")}
        assert executor.times.told() == told, "one that failed tells nothing"

    def fail() -> None:
        raise Fault("early")

    in_virtual_time(main)


def test_a_thread_knows_what_its_jobs_take_and_when_the_running_one_advanced() -> None:
    async def main() -> None:
        began, gate, seen = threading.Event(), threading.Event(), []
        executor = ThreadExecutor()

        def job() -> None:
            began.set()
            assert gate.wait(WITHIN_S)
            executor.tick()
            seen.append(executor.running)

        async with asyncio.timeout(WITHIN_S):
            task = asyncio.ensure_future(executor.run(job, BACKWARD))
            await asyncio.to_thread(began.wait)
            assert executor.running is not None
            assert executor.running.kind == "backward"
            gate.set()
            await task
            assert seen[0].ticked > seen[0].began
            await executor.run(lambda: None, FORWARD)
        executor.close()
        join(executor)
        assert set(executor.times.told()) == {"backward_s", "forward_s"}

    asyncio.run(main())


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


def test_a_device_that_breaks_between_two_jobs_is_told_to_the_next_ones_waiter() -> None:
    """Promise 4: a thread that ended instead would leave everyone waiting."""

    async def main() -> None:
        def after_job() -> None:
            raise Fault("broken")

        executor = ThreadExecutor(after_job=after_job)
        async with asyncio.timeout(WITHIN_S):
            await executor.run(lambda: None, FORWARD)
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


def test_what_a_dropped_job_holds_is_let_go_though_no_other_job_comes() -> None:
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

    on_thread(main)


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
