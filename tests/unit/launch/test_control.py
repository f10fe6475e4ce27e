"""What an operator reads when a run cannot do what is asked, or nobody is there."""

from __future__ import annotations

import asyncio

import pytest

from launch.control import operate
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, SwarmError
from swarm.lifecycle.order import fault_of
from swarm.net.http.transport import HttpTransport
from swarm.wire import messages as m
from swarm.wire.framing import Frame

RUN = "1" * 64


def order(action: str, at_step: int | None = None) -> m.Operate:
    return m.Operate(run=RUN, action=action, at_step=at_step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "num_commits", "fault"),
    [
        (order("stop", 26), 25, ""),
        (order("stop", 60), 25, ""),
        (order("stop"), 59, ""),
        (order("pause"), 0, ""),
        (order("stop", 25), 25, "step 25 has passed: 25 steps have committed; without --at-step the run stops as soon as it can"),
        (order("stop", 3), 25, "step 3 has passed: 25 steps have committed; without --at-step the run stops as soon as it can"),
        (order("stop", 61), 25, "step 61 never comes: the run ends after step 60 (total_steps)"),
        (order("stop"), 60, "the run is over: all 60 steps (total_steps) have committed"),
        (order("resume"), 60, "the run is over: all 60 steps (total_steps) have committed"),
    ],
)
def test_what_cannot_be_is_said(wanted: m.Operate, num_commits: int, fault: str) -> None:
    assert fault_of(wanted, num_commits, 60) == fault


@pytest.mark.parametrize(("code", "kind"), [("bad_request", ConfigError), ("not_member", SwarmError)])
def test_an_order_that_makes_no_sense_is_a_mistake_of_the_command_line(code: str, kind: type[SwarmError]) -> None:
    """Exit code 2, and 1 where the run refuses an order that is right."""

    async def coordinator(frame: Frame, progress: object) -> Frame:
        if isinstance(frame.message, m.Hello):
            return Frame(m.RunInfo(config=RunConfig().to_bytes().decode()))
        return Frame(m.Refusal(code=code, reason="step 3 has passed"))  # type: ignore[arg-type]

    async def main() -> None:
        server = HttpTransport()
        await server.start(coordinator)
        try:
            with pytest.raises(SwarmError, match="step 3 has passed") as raised:
                await operate(server.address, "stop", at_step=3)
            assert type(raised.value) is kind
        finally:
            await server.close()

    asyncio.run(main())


def test_a_refused_connection_says_where_and_what_to_do() -> None:
    async def main() -> None:
        nobody, asker = HttpTransport(), HttpTransport()
        await nobody.start(lambda frame, progress: asyncio.sleep(0))  # type: ignore[arg-type,return-value]
        await nobody.close()
        for asking in (operate(nobody.address, "stop"), ask(asker, nobody.address, timeout_s=5.0)):
            with pytest.raises(SwarmError, match=f"nobody can be reached at {nobody.address} .*: name a peer of the run"):
                await asking
        await asker.close()

    asyncio.run(main())
