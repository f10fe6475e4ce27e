"""Virtual time: waiting costs nothing, order is that of the clock, and a wait that nobody can end is an error."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarm.base.virtual_time import Deadlock, run_virtual


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
