"""Finding and awaiting real processes, and ports for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from swarm.net.ports import bind_tcp_and_udp

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """For a subprocess that imports this checkout, its tests included."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def free_port(host: str = "127.0.0.1") -> int:
    """A number that is free for TCP and UDP at `host` now."""
    tcp, udp, port = bind_tcp_and_udp(host, 0)
    tcp.close()
    udp.close()
    return port


def pids_of(text: str) -> list[int]:
    """Processes whose command line holds `text`, as `pgrep -f` finds them."""
    found = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found]


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], *, timeout_s: float, what: str) -> float:
    """Seconds until `condition()` held.

    Raises:
        AssertionError: it did not within `timeout_s`; names `what`.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - began


def launcher(module: str, *argv: object) -> list[str]:
    """A command that runs `launch.<module>` of this checkout."""
    return [sys.executable, "-m", f"launch.{module}", *map(str, argv)]
