"""A worker that crashes after it served is started again with what it had; one that cannot begin is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

WORKER = """
import json, os, signal, sys, time
directory, fd, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(os.path.join(directory, "lives"), "a") as lives:
    print(port, os.getpid(), file=lives)
life = len(open(os.path.join(directory, "lives")).readlines())
how = sys.argv[4 + min(life, len(sys.argv) - 4) - 1]
if how == "refuse":
    sys.exit(2)
if how == "lack memory":
    os.kill(os.getpid(), signal.SIGKILL)
os.write(fd, json.dumps({"event": "serving", "port": 4000 + life}).encode() + b"\\n")
if how == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if how == "fail":
    sys.exit(1)
if how == "is refused":
    sys.exit(2)
if how == "end":
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(60)
"""

SUPERVISOR = """
import logging, sys
from launch.processes.supervisor import Supervisor
logging.basicConfig(format="%(message)s")
directory, *lives = sys.argv[1:]
def command(fd, served):
    return [sys.executable, directory + "/worker.py", directory, str(fd), str(served["port"] if served else 0), *lives]
sys.exit(Supervisor(command, first_backoff_s=0.05).run())
"""


def start(directory: Path, *lives: str) -> subprocess.Popen[str]:
    (directory / "worker.py").write_text(WORKER)
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(directory), *lives],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def lives_in(directory: Path) -> list[list[int]]:
    path = directory / "lives"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def until_lives(directory: Path, count: int) -> None:
    until = time.monotonic() + 20.0
    while len(lives_in(directory)) < count:
        assert time.monotonic() < until, f"{len(lives_in(directory))} lives"
        time.sleep(0.02)
    time.sleep(0.2)  # it has told that it serves


@pytest.mark.parametrize(
    ("lives", "code", "ports", "told"),
    [
        (["end"], 0, [0], []),
        (["crash", "fail", "end"], 0, [0, 4001, 4002], ["was killed by SIGSEGV", "ended with code 1"]),
        (["refuse"], 2, [0], []),
        (["is refused"], 2, [0], []),
        (["lack memory"], 137, [0], ["was killed by SIGKILL before it served, and is not started again"]),
        (["crash", "refuse", "end"], 0, [0, 4001, 4001], ["was killed by SIGSEGV", "ended with code 2"]),
    ],
)
def test_a_worker_is_started_again_once_it_has_served(
    lives: list[str], code: int, ports: list[int], told: list[str], tmp_path: Path
) -> None:
    supervisor = start(tmp_path, *lives)
    _, errors = supervisor.communicate(timeout=30)
    assert supervisor.returncode == code
    assert [port for port, _ in lives_in(tmp_path)] == ports, "the port it had is the port it gets"
    assert len(errors.splitlines()) == len(told)
    for line, words in zip(errors.splitlines(), told, strict=True):
        assert words in line
    backoffs = [float(line.split(" in ")[1].split(" s")[0]) for line in errors.splitlines() if " in " in line]
    assert backoffs == [0.05 * 2**n for n in range(len(backoffs))]


def test_a_stop_signal_reaches_the_worker_and_ends_both(tmp_path: Path) -> None:
    supervisor = start(tmp_path, "serve")
    until_lives(tmp_path, 1)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=10) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(lives_in(tmp_path)[0][1], 0)


def test_a_stop_signal_reaches_a_worker_that_was_stopped(tmp_path: Path) -> None:
    supervisor = start(tmp_path, "serve")
    until_lives(tmp_path, 1)
    os.kill(lives_in(tmp_path)[0][1], signal.SIGSTOP)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=10) == 0


def test_a_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    supervisor = start(tmp_path, "serve")
    until_lives(tmp_path, 1)
    os.kill(lives_in(tmp_path)[0][1], signal.SIGKILL)
    until_lives(tmp_path, 2)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=10) == 0
    assert [port for port, _ in lives_in(tmp_path)] == [0, 4001]


def test_a_worker_whose_supervisor_died_before_it_looked_ends() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    worker = subprocess.run(
        [sys.executable, "-m", "launch.stage", "--join", "127.0.0.1:1", "--worker-of", "1", str(gone.pid)],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (worker.returncode, worker.stdout, worker.stderr) == (1, "", ""), "it ended before it asked anybody"
