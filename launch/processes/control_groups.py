"""What the control groups of this process leave it: memory and processor time, of versions 1 and 2. Asks the kernel alone.

A limit on any ancestor counts, so each is looked at, from the root that is visible here down to this process's own group. A
container often sees its own group as the root, under the path that it has outside: parts that are not there are passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_left(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Bytes that the tightest group still lets its processes have; file pages that the kernel would drop count as free."""
    left = sys.maxsize
    for group, is_v1 in _groups("memory", root, own):
        limit = _number(group / ("memory.limit_in_bytes" if is_v1 else "memory.max"))
        used = _number(group / ("memory.usage_in_bytes" if is_v1 else "memory.current"))
        if limit is not None and used is not None:
            left = min(left, limit - max(0, used - _droppable(group, "total_" if is_v1 else "")))
    return left


def cpus_allowed(root: Path = _ROOT, own: Path = _OWN) -> float:
    """Processors' worth of time that the tightest group lets its processes have; infinite without a quota."""
    allowed = float("inf")
    for group, is_v1 in _groups("cpu", root, own):
        if is_v1:
            quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        else:
            words = _text(group / "cpu.max").split()
            quota, period = (_as_number(words[0]), _as_number(words[1])) if len(words) == 2 else (None, None)
        if quota is not None and period and quota > 0:  # version 1 writes -1 for none, version 2 "max"
            allowed = min(allowed, quota / period)
    return allowed


def _groups(controller: str, root: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """Directories of this process's groups that `controller` may limit, outermost first, and whether they are of version 1."""
    for line in _text(own).splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            mounts, is_v1 = [root / names, root / controller], True
        elif number == "0" and not names:
            mounts, is_v1 = [root, root / "unified"], False
        else:
            continue
        for mount in dict.fromkeys(mounts):
            group = mount
            yield group, is_v1
            for part in path.split("/"):
                if part not in ("", ".", ".."):
                    group /= part
                    yield group, is_v1


def _droppable(group: Path, prefix: str) -> int:
    """Bytes of file pages that are in memory only because nothing else wanted it."""
    fields = dict(line.partition(" ")[::2] for line in _text(group / "memory.stat").splitlines())
    return sum(_as_number(fields.get(f"{prefix}{name}", "")) or 0 for name in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    return _as_number(_text(path))


def _as_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _text(path: Path) -> str:
    """What is in `path`; "" if that cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
