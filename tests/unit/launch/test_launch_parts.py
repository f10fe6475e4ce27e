"""Small promises of the launchers: sizes, the choice of a stage, locks, addresses, the metrics file, signals."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from launch.arguments import size_bytes
from launch.processes.runner import run_peer
from launch.processes.state_directory import claim_directory
from launch.run.composing import _reachable_host
from launch.run.metrics import MetricsFile
from launch.run.moved_stage import STAGE_FILE, remember_stage, remembered_stage
from swarm.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500 * 10**6), ("2g", 2 * 10**9), ("123", 123), ("7B", 7)],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XiB", "1ii", "nan", "0", "0GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size_bytes(text)


def test_a_peer_that_moved_is_restarted_where_its_checkpoints_are(tmp_path: Path) -> None:
    assert remembered_stage(tmp_path, "run", 3) is None
    remember_stage(tmp_path, "run", 2)
    remember_stage(tmp_path, "run", 1)
    assert remembered_stage(tmp_path, "run", 3) == 1
    assert remembered_stage(tmp_path, "another run", 3) is None
    assert remembered_stage(tmp_path, "run", 1) is None, "the run has no such stage"
    (tmp_path / STAGE_FILE).write_text("{")
    assert remembered_stage(tmp_path, "run", 3) is None
    remember_stage(tmp_path / "gone", "run", 1)  # one line in the log; training goes on


def test_two_processes_never_share_a_state_directory(tmp_path: Path) -> None:
    claim_directory(tmp_path / "state")
    with pytest.raises(ConfigError, match="in use"):  # flock tells descriptors apart, not processes
        claim_directory(tmp_path / "state", wait_s=0.0)
    assert list((tmp_path / "state").iterdir()) == [], "the lock leaves no file"


def test_a_directory_that_is_let_go_soon_is_waited_for_and_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a kill, whose children take three seconds to end."""
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    letting_go = threading.Timer(0.3, os.close, [held])
    letting_go.start()
    claim_directory(tmp_path)
    letting_go.join()
    assert [record.getMessage() for record in caplog.records] == [
        f"state directory {tmp_path} is in use; waiting 5 s for what uses it to end"
    ]


@pytest.mark.parametrize(
    ("host", "seen", "expected"),
    [("10.1.2.3", "9.9.9.9", "10.1.2.3"), ("0.0.0.0", "9.9.9.9", "9.9.9.9"), ("127.0.0.1", "", "127.0.0.1")],
)
def test_a_peer_is_announced_where_others_reach_it(host: str, seen: str, expected: str) -> None:
    assert _reachable_host(host, seen) == expected


def test_a_peer_behind_a_wildcard_that_was_seen_on_loopback_announces_its_way_out() -> None:
    assert _reachable_host("0.0.0.0", "127.0.0.1") not in ("0.0.0.0", "")


def line_of(step: int, version_id: str = "a", run: str = "r") -> dict[str, object]:
    return {"step": step, "head": f"{version_id}{step}", "run": run, "tokens": 10 * step}


def steps_in(path: Path) -> list[tuple[str, int, str]]:
    return [(x.get("run", ""), x["step"], x.get("head", "")) for x in map(json.loads, path.read_text().splitlines())]


def test_metrics_are_appended_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    metrics = MetricsFile(path)
    metrics.append(line_of(1))
    assert steps_in(path) == [("", 0, ""), ("r", 1, "a1")], "a line waits in a buffer"
    metrics.close()


def test_a_line_of_the_metrics_tells_the_runs_tokens_time_and_evaluation(tmp_path: Path) -> None:
    """Over the lives of its trainer, and without moving what others have read."""
    path, now = tmp_path / "metrics.jsonl", 100.0

    def lines() -> list[tuple[object, ...]]:
        found = map(json.loads, path.read_text().splitlines())
        return [(x["step"], x["total_tokens"], x["elapsed_s"], x["eval_loss"]) for x in found]

    metrics = MetricsFile(path, clock=lambda: now)
    for step in (1, 2):
        now += 5
        metrics.append(line_of(step))
    size = path.stat().st_size
    metrics.evaluate("r", 1, "a1", 0.1 + 0.2)
    metrics.evaluate("r", 2, "b2", 7.0)  # of a version that did not last
    metrics.evaluate("r", 9, "a9", 7.0)
    metrics.evaluate("r", 2, "a2", float("nan"))
    assert path.stat().st_size == size
    assert lines() == [(1, 10, 5.0, 0.3), (2, 30, 10.0, None)]
    metrics.close()
    now = 1000.0
    metrics = MetricsFile(path, clock=lambda: now)
    metrics.evaluate("r", 2, "a2", -1.25e-100)
    now += 2
    metrics.append(line_of(2, version_id="b"))
    metrics.append(line_of(3, version_id="b"))
    metrics.append(line_of(5))
    metrics.evaluate("r", 3, "b3", 2.5)
    metrics.close()
    assert lines() == [(1, 10, 5.0, 0.3), (2, 30, 12.0, None), (3, 60, 12.0, 2.5), (5, None, 12.0, None)]


def test_steps_that_are_missing_in_the_metrics_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their trainer was away, and nobody knows their records any more."""
    path = tmp_path / "metrics.jsonl"
    for steps in ((1, 2, 3), (8, 9), (11,)):
        metrics = MetricsFile(path)
        for step in steps:
            metrics.append(line_of(step))
        metrics.close()
    metrics = MetricsFile(tmp_path / "new.jsonl")
    metrics.append(line_of(7))  # who comes late writes from there on
    metrics.close()
    missing = "missing, committed while nobody wrote there"
    assert [record.getMessage() for record in caplog.records] == [
        f"--metrics {path}: steps 4 to 7 are {missing}",
        f"--metrics {path}: step 10 is {missing}",
    ]


def test_a_step_that_is_committed_anew_replaces_what_did_not_last(tmp_path: Path) -> None:
    """Also over a restart of the trainer, one that was killed while it wrote, and beside another run's lines."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append(line_of(7, run="other"))
    for step in (1, 2, 3, 4):
        metrics.append(line_of(step))
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 5, "he')
    metrics = MetricsFile(path)
    metrics.append(line_of(2))  # told again, as a newcomer is told the last records
    assert [step for _, step, _ in steps_in(path)] == [7, 1, 2, 3, 4]
    metrics.append(line_of(3, version_id="b"))
    metrics.append(line_of(4, version_id="b"))
    metrics.close()
    expected = [("other", 7, "a7"), ("r", 1, "a1"), ("r", 2, "a2"), ("r", 3, "b3"), ("r", 4, "b4")]
    assert steps_in(path) == expected


@pytest.mark.parametrize("content", ["no newline", "a line\n", '{"step": 1}\nnotes\n', "\x00\xff"])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds something else"):
        MetricsFile(path)
    assert path.read_text() == content


def test_a_metrics_file_without_a_line_is_not_left_behind(tmp_path: Path) -> None:
    """Unless it was there before."""
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.touch()
    for path in (new, old):
        MetricsFile(path).close()
    assert not new.exists()
    assert old.exists()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="another process writes it"):
        MetricsFile(tmp_path / "metrics.jsonl")
    metrics.close()
    MetricsFile(tmp_path / "metrics.jsonl").close()


def test_metrics_on_a_full_disk_are_one_error_and_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(Path("/dev/full"))
    for step in (1, 2):
        metrics.append(line_of(step))
    metrics.close()
    [error] = caplog.records
    assert "--metrics /dev/full: No space left on device" in error.getMessage()


def test_a_metrics_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/m\.jsonl"):
        MetricsFile(tmp_path / "missing" / "m.jsonl")


class StandInPeer:
    """Runs until stopped, and signals its own process once it runs."""

    def __init__(self, number: signal.Signals | None, *, at_start: bool = False) -> None:
        self._number = number
        self._at_start = at_start
        self._stopped = asyncio.Event()
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")
        if self._at_start and self._number is not None:
            os.kill(os.getpid(), self._number)
            await asyncio.Event().wait()

    async def run(self) -> None:
        self.calls.append("run")
        if self._number is not None:
            os.kill(os.getpid(), self._number)
            await self._stopped.wait()

    def stop(self) -> None:
        self.calls.append("stop")
        self._stopped.set()

    async def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize(
    ("number", "serves", "code"),
    [
        (None, False, 0),
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 0),
        (signal.SIGINT, True, 130),
    ],
)
def test_the_first_signal_stops_a_peer_in_order(number: signal.Signals | None, serves: bool, code: int) -> None:
    peers: list[StandInPeer] = []

    async def build():
        peers.append(StandInPeer(number))
        return peers[0], lambda: peers[0].calls.append("ready")

    assert run_peer(build, serves_until_stopped=serves) == code
    stop = ["stop"] if number else []
    assert peers[0].calls == ["start", "ready", "run", *stop, "close"]


def test_a_peer_that_saves_gets_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint takes as long as the model is large; anything else that lasts is dropped, which is told."""
    monkeypatch.setattr("launch.processes.runner.CLOSE_TIMEOUT_S", 0.1)

    class Saving(StandInPeer):
        is_saving = True

        async def close(self) -> None:
            await asyncio.sleep(0.35)
            self.is_saving = not self.saves
            self.calls.append("saved")
            await asyncio.sleep(60.0)

        saves = True

    for saves in (True, False):
        peer = Saving(None)
        peer.is_saving = saves

        async def build(peer: Saving = peer):
            return peer, lambda: None

        caplog.clear()
        assert run_peer(build, serves_until_stopped=False) == 0
        assert ("saved" in peer.calls) is saves
        assert "what was left is dropped" in caplog.text


def test_a_signal_during_the_start_gives_it_up_and_closes() -> None:
    peers: list[StandInPeer] = []

    async def build():
        peers.append(StandInPeer(signal.SIGINT, at_start=True))
        return peers[0], lambda: peers[0].calls.append("ready")

    assert run_peer(build, serves_until_stopped=True) == 130
    assert peers[0].calls == ["start", "close"]


def test_a_limit_for_a_gpu_says_nothing_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.arguments import LEAST_MEMORY_BYTES
    from launch.processes import devices
    from launch.stage import request_bytes
    from swarm.stage.memory_plan import LEAST_IN_FLIGHT_BYTES

    monkeypatch.setattr(devices, "available_memory", lambda: 400)
    assert request_bytes(7, "cpu") == 7
    assert request_bytes(7, "cuda:0") == request_bytes(None, "cpu") == request_bytes(None, "auto") == 100
    for found, num_bytes in (("cpu", 7), ("cuda:1", 100)):
        monkeypatch.setattr(devices, "resolve_device", lambda name, found=found: found)
        assert request_bytes(7, "auto") == num_bytes
    assert LEAST_MEMORY_BYTES == LEAST_IN_FLIGHT_BYTES
