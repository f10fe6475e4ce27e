"""Children for the tests of the process machinery: no swarm, no torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from launch.processes.reports import Reports


def nothing(argument: str) -> int:
    return 0


def broken(argument: str) -> int:
    raise ImportError("no module named 'nonsense'")


def obedient(argv: Sequence[str], reports: Reports) -> int:
    """Serves until SIGTERM."""
    print("obedient child", *argv, flush=True)
    reports.send("serving", argv=list(argv))
    signal.pause()
    return 0


def stubborn(argv: Sequence[str], reports: Reports) -> int:
    """Ignores SIGTERM, as a process hung in native code would."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reports.send("serving")
    while True:
        time.sleep(1.0)


def failing(argv: Sequence[str], reports: Reports) -> int:
    print("what went wrong", flush=True)
    reports.failed("what went wrong")
    return 3
