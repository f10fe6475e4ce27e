"""How long one waits and what one admits: pure decisions, judged at invented times."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import LinkBroken, Stalled
from swarm.net.exchange import CHUNK_BYTES, MOVING_BYTES, Admission, Beating, Bounds, Guard, ProgressTimeout, Waiting, chunks_of
from swarm.testing.virtual_time import run_virtual


def test_nothing_is_due_before_the_connection_stands() -> None:
    progress_timeout = ProgressTimeout(stall_s=8)
    assert progress_timeout.deadline == float("inf")
    assert progress_timeout.look_again(100) == 108, "or a deadline set meanwhile would be overslept"


def test_each_advance_of_a_counter_extends_the_wait() -> None:
    progress_timeout = ProgressTimeout(stall_s=8)
    progress_timeout.open(0)
    progress_timeout.shut(1)
    assert progress_timeout.deadline == 9
    for now in range(5, 500, 7):
        progress_timeout.advance(now)
        assert progress_timeout.deadline == now + 8
    assert progress_timeout.reason(now + 8) == "nothing advanced for 8 s"


def test_a_slow_link_that_brings_16_kib_in_30_s_moves_for_ever() -> None:
    progress_timeout = ProgressTimeout(stall_s=8)
    progress_timeout.open(0)
    for now in range(1, 1200):  # 20 minutes at 600 bytes a second
        assert now < progress_timeout.deadline
        progress_timeout.moved(now, 600)


def test_a_link_that_brings_less_is_given_up_after_30_s() -> None:
    progress_timeout = ProgressTimeout(stall_s=8)
    progress_timeout.open(0)
    now = 0
    while now < progress_timeout.deadline:
        now += 1
        progress_timeout.moved(now, 1)
    assert now == 30
    assert progress_timeout.reason(now) == "a transfer brought 30 bytes in 30 s"


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 40000)), max_size=40), st.floats(1, 60))
def test_looking_again_in_time_never_oversleeps(moves: list[tuple[float, int]], stall_s: float) -> None:
    progress_timeout = ProgressTimeout(stall_s=stall_s)
    now = 0.0
    look = progress_timeout.look_again(now)
    for wait_s, num_bytes in moves:
        now += wait_s
        while look < now:
            if progress_timeout.deadline <= look:
                return  # given up
            look = progress_timeout.look_again(look)
        if num_bytes < MOVING_BYTES // 2:
            progress_timeout.open(now)
        else:
            progress_timeout.moved(now, num_bytes)
        assert look <= progress_timeout.deadline, "an event between two looks must not set a deadline before the next look"


def test_admission_bounds_requests_and_bytes() -> None:
    admission = Admission(Bounds(max_body_bytes=100, max_inflight_bytes=150, max_open_requests=3))
    assert admission.admit(101).code == "bad_request"  # type: ignore[union-attr]
    assert admission.admit(100) is None
    assert admission.admit(51).reason == "100 bytes of requests are held, the limit is 150"  # type: ignore[union-attr]
    assert admission.admit(50) is None
    assert admission.admit(0) is None
    assert admission.admit(0).reason == "3 requests are open"  # type: ignore[union-attr]
    admission.release(100)
    assert admission.admit(100) is None


@pytest.mark.parametrize("seed", range(5))
def test_chunks_are_the_parts_in_order_and_bounded(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 100, 5000, 16384, CHUNK_BYTES, 3 * CHUNK_BYTES + 7]) for _ in range(200)]
    parts = [memoryview(rng.randbytes(size)) for size in sizes]
    chunks = [bytes(chunk) for chunk in chunks_of(parts)]
    assert b"".join(chunks) == b"".join(parts)
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert len(chunks) < len(parts) + sum(sizes) / CHUNK_BYTES


# ---------------------------------------------------------------------------------------------------- blocks that end early


def test_the_first_error_that_ends_a_block_is_its_error() -> None:
    async def main() -> None:
        async def block() -> None:
            async with Guard() as guard:
                guard.end(LinkBroken("first"))
                guard.end(LinkBroken("second"))
                await asyncio.sleep(1)

        with pytest.raises(LinkBroken, match="first"):
            await block()
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "what comes after is not cancelled"

    run_virtual(main())


def test_a_block_that_is_done_before_is_no_failure() -> None:
    async def main() -> float:
        progress_timeout = ProgressTimeout(stall_s=8)
        progress_timeout.open(asyncio.get_running_loop().time())
        async with Waiting(progress_timeout, "echo"):
            await asyncio.sleep(7)
        await asyncio.sleep(20)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 27


def test_waiting_ends_when_nothing_advances_and_not_before() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        progress_timeout = ProgressTimeout(stall_s=8)
        progress_timeout.open(loop.time())
        loop.call_later(5, lambda: progress_timeout.advance(loop.time()))
        with pytest.raises(Stalled, match="echo: nothing advanced for 8 s"):
            async with Waiting(progress_timeout, "echo"):
                await asyncio.sleep(100)
        assert loop.time() == 13

    run_virtual(main())


@pytest.mark.parametrize(("work_s", "beats"), [(0.4, 0), (1.2, 2), (1.62, 3)])
def test_a_block_beats_until_it_ends_and_the_last_beat_is_whole(work_s: float, beats: int) -> None:
    async def main() -> None:
        whole = []

        async def beat() -> None:
            await asyncio.sleep(0.05)
            whole.append(None)

        async with Beating(0.5, beat):
            await asyncio.sleep(work_s)
        assert len(whole) == beats
        await asyncio.sleep(5)
        assert len(whole) == beats, "it went on after the block"

    run_virtual(main())


def test_a_beat_that_fails_ends_the_block_and_a_block_that_fails_the_beats() -> None:
    async def main() -> None:
        async def failing() -> None:
            raise LinkBroken("nobody listens")

        with pytest.raises(LinkBroken, match="nobody listens"):
            async with Beating(0.5, failing):
                await asyncio.sleep(100)
        began = []

        async def slow() -> None:
            began.append(None)
            await asyncio.sleep(100)

        async def broken() -> None:
            await asyncio.sleep(0.6)
            raise ZeroDivisionError

        loop = asyncio.get_running_loop()
        before = loop.time()
        with pytest.raises(ZeroDivisionError):
            async with Beating(0.5, slow):
                await broken()
        assert began
        assert loop.time() - before < 1, "a beat under way held up a failure"
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
