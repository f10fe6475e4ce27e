"""Children come fast, end as they are told, and never outlive their creator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.processes.children import Child, Children
from swarm.base.errors import SwarmError
from swarm.testing.processes import alive, environment, pids_of, wait_until


class Started:
    """A server with the children that a test asks for."""

    def __init__(self, log_dir: Path, preload: str = "tests.integration.stand_ins:nothing") -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self._reported = asyncio.Event()
        self.children = Children(log_dir, self._note, preload=preload)

    def _note(self, name: str, report: dict[str, Any]) -> None:
        self.reports.append((name, report))
        self._reported.set()

    async def __aenter__(self) -> Started:
        await self.children.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.children.close(grace_s=0.5)

    async def spawn(self, name: str, entry: str, *argv: str) -> Child:
        return await self.children.spawn(
            name, f"tests.integration.stand_ins:{entry}", argv, title=f"stand_in {name} {' '.join(argv)}"
        )

    async def serving(self, name: str) -> None:
        async with asyncio.timeout(5.0):
            while not any(who == name and report["event"] == "serving" for who, report in self.reports):
                self._reported.clear()
                await self._reported.wait()


def test_a_child_runs_reports_and_logs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Started(tmp_path) as started:
            assert await started.children.ready() == 0
            child = await started.spawn("one", "obedient", "--x", "1")
            await started.serving("one")
            assert started.reports == [("one", {"event": "serving", "argv": ["--x", "1"]})]
            assert child.last_words() == ["obedient child --x 1"]
            assert pids_of("^stand_in one --x 1") == [child.pid]
        assert child.ended.result() == -signal.SIGTERM
        assert not alive(child.pid)

    asyncio.run(scenario())


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Started(tmp_path) as started:
            child = await started.spawn("deaf", "stubborn")
            await started.serving("deaf")
        assert child.ended.result() == -signal.SIGKILL

    asyncio.run(scenario())


def test_a_child_that_writes_is_waited_for_as_long_as_what_it_writes_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.processes.children.WRITING_S", 0.5)

    async def scenario() -> float:
        async with Started(tmp_path) as started:
            await started.spawn("deaf", "stubborn")
            await started.serving("deaf")
            clock = asyncio.get_running_loop().time
            began = clock()

            def written(child: Child) -> int:
                return int(min(clock() - began, 2.0) * 1000)

            assert await started.children.stop(grace_s=0.1, among="nobody", written=written) == []
            assert await started.children.stop(grace_s=0.1, among="de", written=written) == ["deaf"]
            return clock() - began

    assert asyncio.run(scenario()) > 2.4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_whole_group_leaves_it_to_the_creator_to_end_the_children(number: signal.Signals, tmp_path: Path) -> None:
    """`timeout`, a terminal that closes and service managers signal every process of a group; the creator handles it."""

    async def scenario() -> None:
        async with Started(tmp_path) as started:
            child = await started.spawn("one", "obedient")
            await started.serving("one")
            started.children._process.send_signal(number)
            async with asyncio.timeout(5.0):
                other = await started.spawn("two", "obedient")  # by then the server has lived through the signal
            assert child.alive
        assert {child.ended.result(), other.ended.result()} == {-signal.SIGTERM}

    asyncio.run(scenario())


def test_a_server_that_is_gone_is_told_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Started(tmp_path) as started:
            child = await started.spawn("one", "obedient")
            process = started.children._process
            process.kill()
            process.wait()
            for _ in range(10):  # as many as there may be children to end, before its end is read
                child.signal(signal.SIGTERM)
            async with asyncio.timeout(5.0):
                assert await child.ended == -signal.SIGKILL

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == []


def test_a_failure_comes_back_with_code_and_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Started(tmp_path) as started:
            child = await started.spawn("bad", "failing")
            assert await child.ended == 3
            assert child.last_words() == ["what went wrong"]
        assert ("bad", {"event": "failed", "message": "what went wrong"}) in started.reports

    asyncio.run(scenario())


def test_a_killed_child_does_not_disturb_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Started(tmp_path) as started:
            victim, other = await started.spawn("victim", "obedient"), await started.spawn("other", "obedient")
            await started.serving("other")
            victim.signal(signal.SIGKILL)
            assert await victim.ended == -signal.SIGKILL
            assert other.alive

    asyncio.run(scenario())


def test_an_import_that_fails_in_the_server_is_loud(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Started(tmp_path, "tests.integration.stand_ins:broken") as started:
            with pytest.raises(SwarmError, match="nonsense"):
                await started.children.ready()

    asyncio.run(scenario())


def test_children_end_with_a_killed_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Started(tmp_path) as started:
            child = await started.spawn("orphan", "stubborn")
            await started.serving("orphan")
            [server] = pids_of(f"swarm fork server of {os.getpid()}$")
            os.kill(server, signal.SIGKILL)
            assert await child.ended == -signal.SIGKILL
            wait_until(lambda: not alive(child.pid), timeout_s=5.0, what="the child is gone")

    asyncio.run(scenario())


def test_children_end_with_a_killed_creator(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from launch.processes.children import Children
async def main():
    children = Children(pathlib.Path({str(tmp_path)!r}), lambda name, report: print(name, flush=True),
                        preload="tests.integration.stand_ins:nothing")
    await children.start()
    for name, entry in (("a", "obedient"), ("b", "stubborn")):
        child = await children.spawn(name, "tests.integration.stand_ins:" + entry, [], title="stand_in")
        print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment()) as creator:
        assert creator.stdout is not None
        words = {creator.stdout.readline().strip() for _ in range(4)}  # two pids, two reports
        pids = [int(word) for word in words if word.isdigit()]
        servers = pids_of(f"swarm fork server of {creator.pid}$")
        assert len(pids) == 2
        assert len(servers) == 1
        creator.kill()
    wait_until(lambda: not any(map(alive, [*pids, *servers])), timeout_s=10.0, what="children and server are gone")
