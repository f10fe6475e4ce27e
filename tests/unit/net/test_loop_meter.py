"""A loop that is held up is seen, and forgotten after a while."""

from __future__ import annotations

import asyncio
import time

from swarm.net.loop_meter import EVERY_S, WINDOW_S, LoopMeter
from swarm.testing.virtual_time import run_virtual


def test_the_worst_of_the_last_while_is_told_and_then_forgotten() -> None:
    async def main() -> None:
        meter = LoopMeter()
        assert meter.worst_s == 0.0
        meter.start()
        await asyncio.sleep(5.5 * EVERY_S)
        assert meter.worst_s < 1e-6
        meter._due -= 0.7  # in virtual time nothing holds the loop up
        await asyncio.sleep(EVERY_S)
        assert 0.69 < meter.worst_s < 0.71
        await asyncio.sleep(WINDOW_S)
        assert meter.worst_s > 0.69
        await asyncio.sleep(WINDOW_S + EVERY_S)
        assert meter.worst_s < 0.01
        meter.stop()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_loop_that_is_held_up_is_late() -> None:
    async def main() -> None:
        meter = LoopMeter()
        meter.start()
        await asyncio.sleep(0.12)
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0.01)
        assert meter.worst_s >= 0.2
        meter.stop()

    asyncio.run(main())
