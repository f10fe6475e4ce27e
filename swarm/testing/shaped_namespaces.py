"""Peers with real links: one network namespace each, joined by a bridge, with a token bucket (`tbf`) in each direction.

Needs root, `ip` and `tc`. What a namespace sends is shaped where it leaves it, what it receives where it enters it, so
all connections of a peer share its rates, as on a real line. Leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NET = "10.77.0"
#: The host's own address on the bridge.
DRIVER = f"{_NET}.1"
_BURST_BYTES = 2**17
_QUEUE_BYTES = 2**20


@dataclass(frozen=True)
class Place:
    """Where a peer runs: its address, and what to put before its command."""

    host: str
    prefix: tuple[str, ...]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode} (needs root, ip and tc)")


@contextlib.contextmanager
def namespaces(rates: Sequence[float]) -> Iterator[list[Place]]:
    """One namespace for each of `rates` (bits per second, both directions)."""
    tag = f"sw{os.getpid() % 10000}"
    bridge = f"{tag}b"
    made: list[str] = []
    try:
        _run("ip", "link", "add", "name", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{DRIVER}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        places = []
        for i, rate in enumerate(rates):
            name, outer, host = f"{tag}n{i}", f"{tag}v{i}", f"{_NET}.{10 + i}"
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"{host}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            bucket = ["root", "tbf", "rate", f"{round(rate)}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
            _run("tc", "qdisc", "add", "dev", outer, *bucket)
            _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *bucket)
            places.append(Place(host, inside))
        yield places
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
