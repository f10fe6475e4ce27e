"""Live swarms of real processes for `rebalancing.py`: peers of set speed, placed at will, killed at will, and measured.

Every process is forked from this one, which has imported what they need, so that a swarm of ten stands in seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launch.backbone
import launch.stage
import launch.trainer
import models.registry
import swarm.peer.stage.stage_peer
import swarm.stage.devices
from benchmarks.timed_model import DATA, MODEL, SPEED_VARIABLE
from launch.processes.lifeline import die_with_parent
from swarm.testing.launched import metrics_of
from swarm.testing.processes import free_port

__all__ = ["Peer", "Phase", "Settings", "Swarm", "best_rate", "measure", "spread"]

READY = (models.registry, swarm.peer.stage.stage_peer, swarm.stage.devices)  # imported here for the processes to come
NUM_STAGES = 3
#: Elements of a sample.
WIDTH = 32


@dataclass(frozen=True)
class Peer:
    stage: int
    slowness: float = 1.0


@dataclass(frozen=True)
class Phase:
    """Steps `first..last` (counted from 1) of one swarm."""

    tickets_per_s: float
    first: int
    last: int


@dataclass
class Settings:
    """Of one swarm."""

    seconds: float = 1.0
    tickets_per_step: int = 24
    period_s: float = 30.0
    in_flight: int = 40
    delay_steps: int = 0
    rebalance: bool = True


def best_rate(peers: Sequence[Peer], seconds: float) -> float:
    """Tickets per second if each peer did what it can do alone, and each ticket needs a peer of every stage."""
    return sum(1 / (seconds * peer.slowness) for peer in peers) / NUM_STAGES


@dataclass
class Swarm:
    """One run; a context manager that leaves no process behind."""

    root: Path
    peers: Sequence[Peer]
    settings: Settings
    pids: list[int] = field(default_factory=list)
    stage_pids: list[int] = field(default_factory=list)

    def __enter__(self) -> Swarm:
        s = self.settings
        self.root.mkdir(parents=True)
        run = self.root / "run.toml"
        times = {name: [s.seconds * part] * NUM_STAGES for name, part in (("forward_s", 1 / 3), ("backward_s", 2 / 3))}
        run.write_text(
            f'name = "rebalancing"\nmodel = "{MODEL}"\ndata = "{DATA}"\nsequence_length = {WIDTH}\n'
            f"model_options = {{width = {WIDTH}, forward_s = {times['forward_s']}, backward_s = {times['backward_s']}}}\n"
            f"num_stages = {NUM_STAGES}\n"
            f"micro_batch_size = 4\ntarget_batch_size = {4 * s.tickets_per_step}\ntotal_steps = 100000\n"
            f'compression = "none"\neval_samples = 0\ncheckpoint_every = 0\ndelay_steps = {s.delay_steps}\n'
            f"[timing]\ngenesis_quiet_s = 6.0\nrebalance_every_s = {s.period_s if s.rebalance else 0.0}\n"
        )
        port = free_port()
        self._fork("backbone", launch.backbone.main, ["--run", str(run), "--port", str(port)])
        join = ["--join", f"127.0.0.1:{port}", "--port", "0"]
        time.sleep(1.0)
        for peer in self.peers:
            words = [*join, "--stage", str(peer.stage), "--allow-import", MODEL, "--device", "cpu", "--threads", "1"]
            pid = self._fork(f"stage{len(self.stage_pids)}", launch.stage.main, words, slowness=peer.slowness)
            self.stage_pids.append(pid)
        words = [*join, "--data", DATA, "--in-flight", str(s.in_flight)]
        self._fork("trainer", launch.trainer.main, [*words, "--metrics", str(self.root / "metrics.jsonl")])
        return self

    def _fork(self, name: str, main: Any, argv: list[str], *, slowness: float = 1.0) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.pids.append(pid)
            return pid
        die_with_parent(parent)
        os.environ[SPEED_VARIABLE] = str(1 / slowness)
        log = os.open(self.root / f"{name}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(main([*argv, "--host", "127.0.0.1"]))

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)

    def stages(self) -> dict[int, list[int]]:
        """Which of `peers` serve each stage now, by the titles of their processes."""
        found: dict[int, list[int]] = {stage: [] for stage in range(NUM_STAGES)}
        for index, pid in enumerate(self.stage_pids):
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
            if "--stage" in title:  # not so once it is dead
                found[int(title[title.index("--stage") + 1])].append(index)
        return found

    def kill_all_but_one(self, stage: int) -> list[int]:
        """SIGKILL; returns who was killed."""
        victims = self.stages()[stage][1:]
        for index in victims:
            os.kill(self.stage_pids[index], signal.SIGKILL)
        return victims

    def lines(self) -> list[dict[str, Any]]:
        return metrics_of(self.root / "metrics.jsonl")

    def periods_until_best(self, is_best: Any) -> float:
        """Waits until `is_best()` holds for who serves which stage; in periods of decisions from now on."""
        began = time.monotonic()
        self.wait("the best assignment", lambda lines: is_best(), 20 * self.settings.period_s)
        return (time.monotonic() - began) / self.settings.period_s

    def wait(self, what: str, condition: Any, deadline_s: float) -> list[dict[str, Any]]:
        """Until `condition(lines)`; returns the lines."""
        began = time.monotonic()
        while True:
            lines = self.lines()
            if condition(lines):
                return lines
            if time.monotonic() - began > deadline_s:
                said = lines[-1] if lines else "no step"
                raise SystemExit(f"{what}: not within {deadline_s:g} s; last: {said}; logs in {self.root}")
            time.sleep(0.2)


def spread(counts: Sequence[int]) -> list[Peer]:
    """Equal peers, so many at each stage."""
    return [Peer(stage) for stage, count in enumerate(counts) for _ in range(count)]


def measure(swarms: Sequence[Swarm], num_steps: int, *, skip: int) -> list[Phase]:
    """Tickets per second of each swarm over its next `num_steps` steps, after `skip` that may still be mixed.

    All at the same time, so that whatever else the machine does disturbs them alike.
    """
    first = [len(one.lines()) + skip for one in swarms]
    phases = []
    for one, begin in zip(swarms, first, strict=True):
        end = begin + num_steps
        lines = one.wait(f"{num_steps} steps", lambda found, end=end: len(found) >= end, 600.0)[begin:end]
        seconds = sum(line["seconds"] for line in lines)
        phases.append(Phase(sum(line["tickets"][0] for line in lines) / seconds, begin + 1, end))
    return phases
