"""Limits of control groups are seen in either version, on any ancestor, and from within a container."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launch.processes import devices
from launch.processes.control_groups import cpus_allowed, memory_left

GIB = 2**30
V2 = {"memory.max": str(4 * GIB), "memory.current": str(GIB), "cpu.max": "50000 100000"}
UNLIMITED_V2 = {"memory.max": "max", "memory.current": str(9 * GIB), "cpu.max": "max 100000"}
MEMORY_V1 = {"memory.limit_in_bytes": str(4 * GIB), "memory.usage_in_bytes": str(GIB)}
UNLIMITED_V1 = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": str(9 * GIB)}
CPU_V1 = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
UNLIMITED_CPU_V1 = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}

CASES = {
    "v2, own group": ("0::/a/b", {"a/b": V2, "a": UNLIMITED_V2}),
    "v2, an ancestor": (
        "0::/system.slice/job_7/step_0/task_0",
        {"system.slice/job_7": V2, "system.slice/job_7/step_0": UNLIMITED_V2, "system.slice/job_7/step_0/task_0": UNLIMITED_V2},
    ),
    "v2, a container that sees its group as the root": ("0::/", {"": V2}),
    "v2, a container that knows its path outside": ("0::/docker/1234", {"": V2}),
    "v2 beside v1": ("3:freezer:/\n0::/a", {"unified/a": V2}),
    "v1, own groups": ("5:memory:/a\n4:cpu,cpuacct:/b", {"memory/a": MEMORY_V1, "cpu,cpuacct/b": CPU_V1}),
    "v1, ancestors": (
        "5:memory:/a/x\n4:cpuacct,cpu:/b/y\n0::/",
        {
            "memory": UNLIMITED_V1,
            "memory/a": MEMORY_V1,
            "memory/a/x": UNLIMITED_V1,
            "cpu": UNLIMITED_CPU_V1,
            "cpu/b": CPU_V1,
            "cpu/b/y": UNLIMITED_CPU_V1,
        },
    ),
    "v1, a container that knows its path outside": ("5:memory:/docker/1\n4:cpu:/docker/1", {"memory": MEMORY_V1, "cpu": CPU_V1}),
}


def write(tmp_path: Path, own: str, groups: dict[str, dict[str, str]]) -> tuple[Path, Path]:
    for group, files in groups.items():
        (tmp_path / "fs" / group).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "fs" / group / name).write_text(content + "\n")
    (tmp_path / "own").write_text(own + "\n")
    return tmp_path / "fs", tmp_path / "own"


@pytest.mark.parametrize("case", CASES)
def test_a_limit_is_seen_wherever_it_stands(case: str, tmp_path: Path) -> None:
    where = write(tmp_path, *CASES[case])
    assert memory_left(*where) == 3 * GIB
    assert cpus_allowed(*where) == 0.5


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        ("", {}),
        ("0::/a", {"a": UNLIMITED_V2}),
        ("5:memory:/a\n4:cpu:/a", {"memory/a": UNLIMITED_V1, "cpu/a": UNLIMITED_CPU_V1}),
        ("0::/a", {"a": {"memory.max": "x", "memory.current": "", "cpu.max": "50000"}}),
        ("nonsense", {"": V2}),
    ],
    ids=["no groups", "v2 without limits", "v1 without limits", "nonsense in files", "nonsense of groups"],
)
def test_without_a_limit_there_is_none(own: str, groups: dict[str, dict[str, str]], tmp_path: Path) -> None:
    where = write(tmp_path, own, groups)
    assert memory_left(*where) > 2**60
    assert cpus_allowed(*where) == float("inf")


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_kernel_would_drop_counts_as_free(version: int, tmp_path: Path) -> None:
    """A machine that has read large files is not out of memory."""
    if version == 1:
        own, name = "5:memory:/", "memory"
        files = {**MEMORY_V1, "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 4}"}
    else:
        own, name = "0::/", ""
        files = {**V2, "memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 4}"}
    assert memory_left(*write(tmp_path, own, {name: files})) == 3 * GIB + 3 * GIB // 4


def test_devices_heed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_left", lambda: 2**21)
    assert devices.available_memory() == 2**21
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for allowed, cores in ((0.5, 1), (3.0, 3), (2.6, 3), (float(sys.maxsize), 64)):
        monkeypatch.setattr(devices, "cpus_allowed", lambda allowed=allowed: allowed)
        assert devices.num_cores() == cores
