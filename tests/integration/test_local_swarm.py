"""`launch_local` as a user runs it: it trains, survives a killed stage process, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from swarm.testing.processes import alive, environment, launcher, pids_of, wait_until

#: Longest start-up that the tests put up with, on a loaded machine.
START_S = 60.0
#: What processes do does not depend on the model: with this one no process imports transformers' models, for seconds.
SMALL = ["--model", "tests.unit.models.mlp_classifier:factory", "--data", "tests.unit.models.mlp_classifier:dataset"]


class Swarm:
    """One `launch_local` in a directory of its own, with a TMPDIR that must be empty afterwards."""

    def __init__(self, directory: Path, *argv: object) -> None:
        self.directory = directory
        self.state_dir = directory / "state"
        self.tmp = directory / "tmp"
        self.tmp.mkdir()
        self.out, self.err = directory / "out.txt", directory / "err.txt"
        command = launcher("local", "--state-dir", self.state_dir, *argv)
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=directory,
                env={**environment(), "TMPDIR": str(self.tmp)},
            )

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def until(self, text: str) -> None:
        """Wait until `text` was printed."""

        def printed() -> bool:
            assert self.process.poll() is None or text in self.out.read_text(), f"it ended: {self.err.read_text()}"
            return text in self.out.read_text()

        wait_until(printed, timeout_s=START_S, what=f"launch_local prints {text!r}")

    def pids(self) -> list[int]:
        """Its children that serve, and its fork servers."""
        children = [pid for pid in pids_of(str(self.state_dir)) if pid != self.process.pid]
        return children + pids_of(f"swarm fork server of {self.process.pid}$")

    def stage_pids(self) -> list[int]:
        return pids_of(f"^launch_stage .*{re.escape(str(self.state_dir))}")

    def ports(self) -> list[int]:
        logs = [log.read_text() for log in (self.state_dir / "logs").glob("*.log")]
        return [int(port) for log in logs for port in re.findall(r"serving .* at 127\.0\.0\.1:(\d+)", log)]

    def assert_nothing_is_left(self, pids: list[int], *, within_s: float) -> None:
        began = time.monotonic()
        wait_until(lambda: not any(map(alive, pids)), timeout_s=within_s, what="every process is gone")
        assert not self.pids(), "a process was started late"
        for port in self.ports():
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                with socket.socket(socket.AF_INET, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        assert not list(self.tmp.iterdir()), "temporary files are left"
        assert time.monotonic() - began < within_s + 1.0


def test_a_run_finishes_though_a_stage_process_is_killed(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    argv = ["--stages", 2, "--peers-per-stage", 2, "--steps", 8, "--metrics", metrics]
    with Swarm(tmp_path, *argv) as swarm:
        swarm.until("step 2/8")
        stages = swarm.stage_pids()
        assert len(stages) == 4, "pgrep -f launch_stage must find the stage processes, all and only these"
        pids = swarm.pids()
        os.kill(stages[0], signal.SIGKILL)
        assert swarm.process.wait(timeout=START_S) == 0, swarm.err.read_text()
        swarm.assert_nothing_is_left(pids, within_s=1.0)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["tickets"] == [8, 8] for line in lines), "every step has every ticket exactly once"
    out = swarm.out.read_text()
    assert "killed by SIGKILL" in out
    assert "another peer joins with: launch_stage --join 127.0.0.1:" in out
    assert "done: 8 steps" in out
    assert "checkpoint of step 8" in out
    assert swarm.err.read_text() == ""


@pytest.mark.parametrize(
    ("number", "code", "within_s"),
    [(signal.SIGINT, 130, 5.0), (signal.SIGTERM, 143, 5.0), (signal.SIGKILL, -signal.SIGKILL, 10.0)],
)
def test_case_22_a_stopped_swarm_leaves_no_process_port_or_file(
    number: signal.Signals, code: int, within_s: float, tmp_path: Path
) -> None:
    argv = [*SMALL, "--stages", 1, "--peers-per-stage", 1, "--trainers", 1, "--steps", 1000]
    with Swarm(tmp_path, *argv) as swarm:
        swarm.until("step 2/1000")
        pids = swarm.pids()
        assert len(pids) == 5, "a backbone, a stage, a trainer and two fork servers"
        began = time.monotonic()
        swarm.process.send_signal(number)
        assert swarm.process.wait(timeout=within_s) == code
        swarm.assert_nothing_is_left(pids, within_s=within_s - (time.monotonic() - began))
    if number != signal.SIGKILL:  # what had committed is on disk, though no checkpoint was due
        committed = max(int(step) for step in re.findall(r"step (\d+)/1000", swarm.out.read_text()))
        assert f"checkpoint of step {committed} in" in swarm.out.read_text(), swarm.out.read_text()


def test_a_trainer_that_dies_fails_the_run_with_one_line(tmp_path: Path) -> None:
    with Swarm(tmp_path, *SMALL, "--stages", 1, "--peers-per-stage", 1, "--steps", 1000) as swarm:
        swarm.until("step 1/1000")
        pids = swarm.pids()
        [trainer] = pids_of(f"^launch_trainer .*{re.escape(str(swarm.state_dir))}")
        os.kill(trainer, signal.SIGKILL)
        assert swarm.process.wait(timeout=10.0) == 1
        swarm.assert_nothing_is_left(pids, within_s=1.0)
    [line] = swarm.err.read_text().splitlines()
    assert "trainer-0 ended (killed by SIGKILL)" in line
    again = f"launch_local --state-dir {swarm.state_dir} --peers-per-stage 1 --data PATH"
    assert line.endswith(f"go on from its last checkpoint with: {again}")


def test_an_interrupt_during_the_imports_ends_at_once(tmp_path: Path) -> None:
    with Swarm(tmp_path, "--steps", 1000) as swarm:
        wait_until(lambda: pids_of(f"swarm fork server of {swarm.process.pid}$"), timeout_s=10.0, what="it starts")
        pids = swarm.pids()
        swarm.process.send_signal(signal.SIGINT)
        assert swarm.process.wait(timeout=5.0) == 130
        swarm.assert_nothing_is_left(pids, within_s=1.0)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--stages", 7], "--stages 7"),
        (["--model", "nonsense"], "nonsense"),
        (["--port", "{taken}"], "{taken}"),
        ([*SMALL, "--device", "cuda:7"], "--device cuda:7"),
    ],
)
def test_what_a_child_refuses_is_one_line_and_exit_code_2(argv: list[object], named: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with Swarm(tmp_path, *(str(word).replace("{taken}", port) for word in argv)) as swarm:
            assert swarm.process.wait(timeout=START_S) == 2
    lines = swarm.err.read_text().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("launch_local: ")
    assert named.replace("{taken}", port) in lines[0]
    assert "backbone at" not in swarm.out.read_text(), "a run that cannot begin was announced"
    assert not swarm.state_dir.exists(), "a run that never began leaves no directory"
