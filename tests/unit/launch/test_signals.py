"""Signals that tell a process to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WORK = """
import asyncio
from launch.processes.runner import run_until_done

async def work(stopper):
    print("up", flush=True)
    await asyncio.sleep(30.0)

raise SystemExit(run_until_done(work, serves_until_stopped=True))
"""


INHERITED = "import signal; signal.signal(signal.SIGHUP, signal.{})"


@pytest.mark.parametrize(("how", "code"), [("SIG_DFL", 128 + signal.SIGHUP), ("SIG_IGN", 0)])
def test_a_hang_up_ends_a_process_unless_it_was_started_to_survive_it(how: str, code: int) -> None:
    """As `nohup` starts it."""
    with subprocess.Popen([sys.executable, "-c", INHERITED.format(how) + WORK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        if not code:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGTERM)
        assert process.wait(10.0) == code


LEAVES_SLOWLY = """
import asyncio
from launch.processes.runner import run_until_done

async def work(stopper):
    asked = asyncio.Event()
    stopper.on_stop = asked.set
    print("up", flush=True)
    await asked.wait()
    await asyncio.sleep(2.0)
    print("left", flush=True)

raise SystemExit(run_until_done(work, serves_until_stopped=True))
"""


@pytest.mark.parametrize(("apart_s", "said", "code"), [(0.1, "left\n", 0), (1.2, "", 128 + signal.SIGTERM)])
def test_a_second_signal_ends_a_process_at_once_unless_it_is_the_first_again(apart_s: float, said: str, code: int) -> None:
    """Who ends a group of processes tells a worker and its supervisor, which hands it on."""
    with subprocess.Popen([sys.executable, "-c", LEAVES_SLOWLY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(apart_s)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10.0) == code
        assert process.stdout.read() == said
