"""Virtual time: waiting costs nothing, order is that of the clock, and a wait that nobody can end is an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from swarm.testing.virtual_time import Deadlock, run_virtual


def test_an_hour_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.perf_counter() - began < 1


def test_timers_fire_in_the_order_of_their_deadlines() -> None:
    fired: list[tuple[str, float]] = []

    async def sleeper(name: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        fired.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("slow", 5), sleeper("fast", 1), sleeper("middle", 3))

    run_virtual(main())
    assert fired == [("fast", 1.0), ("middle", 3.0), ("slow", 5.0)]


def test_time_stands_still_while_there_is_work() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0


def test_time_outs_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(100)


def test_a_wait_that_nobody_can_end_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="all tasks are waiting"):
        run_virtual(main())


def test_what_is_left_behind_is_cancelled() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(10**9)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        main.task = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    run_virtual(main())
    assert ended == ["cancelled"]


def _orders(program: Callable[[list[str]], None], *, late_s: float = 0.0) -> set[str]:
    """What `program` notes down, under sixty seeds; it is run twice with each."""

    async def main() -> str:
        noted: list[str] = []
        program(noted)
        await asyncio.sleep(10)
        return "".join(noted)

    found = set()
    for seed in range(60):
        first, second = (run_virtual(main(), seed=seed, late_s=late_s) for _ in range(2))
        assert first == second, "the same seed is the same order"
        found.add(first)
    return found


def test_timers_that_are_due_together_fire_in_any_order() -> None:
    def program(noted: list[str]) -> None:
        for name in "abc":
            asyncio.get_running_loop().call_at(1.0, noted.append, name)

    assert len(_orders(program)) == 6


def test_what_was_made_ready_by_different_callbacks_is_merged_in_any_order() -> None:
    def program(noted: list[str]) -> None:
        loop = asyncio.get_running_loop()

        def two(names: str) -> None:
            for name in names:
                loop.call_soon(noted.append, name)

        loop.call_soon(two, "ab")
        loop.call_soon(two, "xy")

    orders = _orders(program)
    assert len(orders) == 6, "the merges of two pairs"
    assert all(order.index("a") < order.index("b") and order.index("x") < order.index("y") for order in orders), (
        "what one callback made ready keeps its order"
    )


def test_a_loop_that_comes_late_finds_together_what_was_due_one_after_the_other() -> None:
    def program(noted: list[str]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(1.0, noted.append, "a")
        loop.call_at(1.1, noted.append, "b")

    assert _orders(program) == {"ab"}
    assert _orders(program, late_s=1.0) == {"ab", "ba"}


def test_a_lock_stays_fair_and_a_time_out_stays_exact_in_any_order() -> None:
    """What asyncio promises beyond the order of callbacks holds, since it rests on queues of its own."""

    def program(noted: list[str]) -> None:
        lock = asyncio.Lock()

        async def holder(name: str, at_s: float) -> None:
            await asyncio.sleep(at_s)
            try:
                async with asyncio.timeout(2.5), lock:
                    noted.append(name)
                    await asyncio.sleep(1)
            except TimeoutError:
                noted.append(name.upper())

        program.tasks = [asyncio.create_task(holder(name, k / 10)) for k, name in enumerate("abcd")]  # type: ignore[attr-defined]

    assert _orders(program) == {"abcCdD"}
