"""Faults for a swarm of real processes: which, whom, when, and how each is undone.

The coordinator and the stages' leaders are picked as victims more often than others. A fault that would leave a stage
without a peer that is up to date, or the run without a trainer or a backbone, is not begun. Owns the choice and the list
of what was done; must not know how a process is started.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass

from benchmarks.faults.proxied_swarm import COME_BACK_S, NUM_STAGES, Process, ProxiedSwarm
from swarm.testing.faulty_proxy import Fault
from swarm.wire.messages import StatusReply

#: Relative frequencies.
KINDS = {"kill": 6, "stop": 5, "lost replies": 3, "cut off": 2, "cut link": 3, "delay": 2, "reset connections": 2}


@dataclass
class Injected:
    """A fault as it goes into the report."""

    kind: str
    victim: str
    role: str
    began: float
    recovered: float | None = None


class Chaos:
    """Disturbs a swarm."""

    def __init__(self, swarm: ProxiedSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng
        self.injected: list[Injected] = []
        self.spared = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, *, interval_s: float) -> None:
        """Begin faults for `seconds`, one each `interval_s` on average, then wait until all is well again."""
        due = time.monotonic()
        until = due + seconds
        while (due := due + self._rng.expovariate(1 / interval_s)) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._one_fault()
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        if self._running:
            await asyncio.wait(self._running, timeout=2 * COME_BACK_S)

    async def _one_fault(self) -> None:
        statuses = await self._swarm.statuses()
        for _ in range(20):
            kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
            role, victim = self._victim(statuses)
            group = [victim]
            if kind == "cut link":
                group.append(self._rng.choice([p for p in self._swarm.processes.values() if p is not victim]))
            if self._spares(group, statuses):
                continue
            for process in group:
                process.trouble = kind
            task = self._swarm.background(self._disturb(kind, role, group))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return
        self.spared += 1

    def _victim(self, statuses: dict[str, StatusReply]) -> tuple[str, Process]:
        """The coordinator, a leader, or anybody; with what it is."""
        processes = self._swarm.processes
        leading = [(s.ballot, n) for n, s in statuses.items() if s.ballot >= 0]
        coordinator = max(leading)[1] if leading else None
        newest = max(statuses.values(), key=lambda s: s.step).stages if statuses else ()
        by_peer = {p.peer: p for p in processes.values()}
        firsts = [next((x.peer for x in members if x.ready), "") for members in newest]
        leaders = [by_peer[peer] for peer in firsts if peer in by_peer]
        draw = self._rng.random()
        if draw < 0.25 and coordinator is not None:
            return "coordinator", processes[coordinator]
        if draw < 0.5 and leaders:
            return "leader", self._rng.choice(leaders)
        victim = self._rng.choice(list(processes.values()))
        if victim.name == coordinator:
            return "coordinator", victim
        return ("leader" if victim in leaders else victim.role), victim

    def _spares(self, group: list[Process], statuses: dict[str, StatusReply]) -> bool:
        """Whether a fault here would leave a stage without a peer that is up to date, or the run without a trainer."""
        if any(process.trouble or process.pid is None for process in group):
            return True
        newest = max((s.step for s in statuses.values()), default=0)
        left = [
            p
            for p in self._swarm.processes.values()
            if p not in group
            and not p.trouble
            and (s := statuses.get(p.name)) is not None
            and (
                p.role != "stage"
                or (
                    s.state == "serving"
                    and s.step >= newest - 1
                    and any(x.ready and x.peer == p.peer for x in s.stages[p.stage or 0])
                )
            )
        ]
        stages = {p.stage for p in left if p.role == "stage"}
        return len(stages) < NUM_STAGES or not {"trainer", "backbone"} <= {p.role for p in left}

    async def _disturb(self, kind: str, role: str, group: list[Process]) -> None:
        swarm, rng, victim = self._swarm, self._rng, group[0]
        entry = Injected(kind, " - ".join(p.name for p in group), role, time.monotonic())
        self.injected.append(entry)
        seconds = rng.uniform(1.0, 15.0)
        assert victim.child is not None
        if kind == "kill":
            victim.child.signal(signal.SIGKILL)
            await victim.child.ended
            await swarm.come_back(victim, restart_after_s=rng.choice([0.0, rng.uniform(0.0, 5.0)]))
        else:
            if kind == "stop":
                victim.child.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                victim.child.signal(signal.SIGCONT)
            elif kind == "reset connections":
                swarm.network.reset(victim.name)
            else:
                fault = {
                    "lost replies": Fault("lost_replies", victim.name, part=rng.uniform(0.1, 0.6), silent=rng.random() < 0.3),
                    "cut off": Fault("cut", victim.name),
                    "cut link": Fault("cut", victim.name, frozenset(p.name for p in group[1:])),
                    "delay": Fault("delay", victim.name, delay_s=rng.uniform(0.02, 0.6)),
                }[kind]
                swarm.network.begin(fault)
                await asyncio.sleep(seconds)
                swarm.network.end(fault)
            await asyncio.gather(*(swarm.come_back(p) for p in group if p.trouble == kind))
        entry.recovered = time.monotonic()
