"""A newcomer asks for the run, and says what it waits for."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Address
from swarm.base.virtual_time import run_virtual
from swarm.net.memory import MemoryNetwork, MemoryTransport
from swarm.net.transport import Progress
from swarm.peer.joining import fetch_run
from swarm.wire.framing import Frame
from swarm.wire.messages import RunInfo

WHERE = Address("192.0.2.1", 4000)


async def ask(*, up_at: float, slow_s: float = 0.0) -> RunInfo:
    """Nobody listens before the loop's time `up_at`; then one who takes `slow_s` to answer."""
    network = MemoryNetwork(random.Random(1))
    newcomer, peer = MemoryTransport(network, Address("192.0.2.2", 1)), MemoryTransport(network, WHERE)

    async def answer(frame: Frame, progress: Progress) -> Frame:
        await asyncio.sleep(slow_s)
        return Frame(RunInfo(config=RunConfig().to_bytes().decode()))

    async def come_up() -> None:
        await asyncio.sleep(up_at)
        await peer.start(answer)

    coming = asyncio.create_task(come_up())
    try:
        return await fetch_run(newcomer, [WHERE], deadline_s=20.0)
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await peer.close()
        await newcomer.close()


@pytest.mark.parametrize(("up_at", "slow_s", "told"), [(1.0, 0.0, 0), (9.0, 0.0, 1), (0.0, 9.0, 1)])
def test_a_newcomer_says_after_two_seconds_that_nobody_answers_yet(
    up_at: float, slow_s: float, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    info = run_virtual(ask(up_at=up_at, slow_s=slow_s))
    assert info.config == RunConfig().to_bytes().decode()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["nobody answers at 192.0.2.1:4000 yet; trying for 20 s in all"] * told


def test_where_nobody_answers_in_time_it_says_so_once_more(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"nobody answers at 192\.0\.2\.1:4000 \(waited 20 s\); is a peer of the run"):
        run_virtual(ask(up_at=99.0))
    assert len(caplog.records) == 1
