"""CPU-seconds of processes and their threads, from /proc. Needs nothing but Python, so that any interpreter can use it."""

from __future__ import annotations

import os
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def stat_of(path: Path) -> tuple[int, float]:
    """Parent's pid and CPU-seconds (user and system) so far, of the process or thread whose `stat` file this is."""
    fields = path.read_text().rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_S


def tree_of(root: int) -> list[int]:
    """`root` and every process below it, in order."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = stat_of(entry / "stat")[0]
            except (OSError, IndexError):
                continue  # it has just ended
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return sorted(found)


def cpu_of_tree(root: int) -> float:
    """CPU-seconds so far of `root` and every process that lives below it."""
    return sum(stat_of(Path(f"/proc/{pid}/stat"))[1] for pid in tree_of(root))


def busy_machine_s() -> float:
    """CPU-seconds that all processes of the machine have used on the cores this one may run on; interrupts are nobody's."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = 0.0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in mine:
            user, nice, system, *_ = map(int, ticks)
            total += (user + nice + system) * TICK_S
    return total
