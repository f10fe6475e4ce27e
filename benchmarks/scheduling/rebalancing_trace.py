"""A pipeline under preemption, as events: peers vanish and come, and the product's own policies place and move them.

The model. `num_peers` equal peers (one ticket per second each) are spread evenly over `num_stages`. Preemptions come as a
Poisson process, `churn` of the peers per hour; each takes one peer of a stage drawn uniformly (as in the paper, section
4.4) unless it is the stage's last. Newcomers arrive at such a rate that the number of peers follows `sizes`, linear
between its points; each is placed by `policy/placement.py` and serves after `transfer_s`. Every `period_s` the moves of
`policy/rebalance.py` are made: a mover serves nobody while it downloads for `transfer_s`. A stage's load is the part of
the time in which it computes. Throughput is the least of the stages' sums; the optimum is that of the best spread of the
peers that are there, instantly: the whole number of peers per stage.

The paper's trace (32 hours of preemptible T4s) is not public. `churn` and `sizes` are chosen so that without rebalancing
the throughput is 82.7 % of the optimum, and about 45 % in the last hour, as there.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from swarm.policy.placement import best_stage
from swarm.policy.rebalance import plan_moves
from swarm.policy.throughput import StageWork, Swarm, Worker

HOUR_S = 3600.0
BANDWIDTH = 12.5e6


@dataclass(frozen=True)
class Trace:
    """Settings of the model; see the module's docstring."""

    num_stages: int = 32
    hours: float = 32.0
    #: (hour, peers)
    sizes: tuple[tuple[float, int], ...] = ((0.0, 400), (10.0, 400), (32.0, 220))
    #: Part of the peers that is preempted per hour.
    churn: float = 0.028
    transfer_s: float = 20.0

    def size_at(self, hour: float) -> float:
        for (h0, n0), (h1, n1) in zip(self.sizes, self.sizes[1:], strict=False):
            if hour <= h1:
                return n0 + (n1 - n0) * (hour - h0) / (h1 - h0)
        return self.sizes[-1][1]

    def events(self, rng: random.Random) -> list[tuple[float, str]]:
        """(second, "preempt" or "arrive"); the same for every period that is compared."""
        found = []
        for minute in range(int(self.hours * 60)):
            hour = minute / 60
            size = self.size_at(hour)
            lost = self.churn * size / 60
            come = lost + self.size_at(hour + 1 / 60) - size
            for rate, kind in ((lost - min(0.0, come), "preempt"), (max(0.0, come), "arrive")):
                whole = int(rate) + (rng.random() < rate % 1)
                found += [((minute + rng.random()) * 60, kind) for _ in range(whole)]
        return sorted(found)


@dataclass
class Outcome:
    """Tickets done and possible, by hour, and what was moved."""

    done: list[float] = field(default_factory=list)
    possible: list[float] = field(default_factory=list)
    #: (hour, peers, part of the optimum) once a minute.
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    num_moves: int = 0

    def part(self, first: float = 0.0, last: float = 1e9) -> float:
        hours = [h for h in range(len(self.done)) if first <= h < last]
        return sum(self.done[h] for h in hours) / sum(self.possible[h] for h in hours)


class Pipeline:
    """The peers of one simulated run."""

    def __init__(self, trace: Trace, period_s: float, seed: int) -> None:
        self._trace = trace
        self._period_s = period_s
        self._rng = random.Random(seed + 1)
        self._stage_of = {(f"{i:04d}", ""): i % trace.num_stages for i in range(trace.sizes[0][1])}
        #: Peers that download, with the time of their first service.
        self._arriving: dict[tuple[str, str], float] = {}
        self._born = len(self._stage_of)
        self._events = trace.events(random.Random(seed))

    def _counts(self) -> list[int]:
        counts = [0] * self._trace.num_stages
        for key, stage in self._stage_of.items():
            counts[stage] += key not in self._arriving
        return counts

    def _swarm(self) -> Swarm:
        trace, counts = self._trace, self._counts()
        pace = min(counts)
        works = [StageWork(state_bytes=int(BANDWIDTH * trace.transfer_s))] * trace.num_stages
        return Swarm(
            works,
            [
                Worker(
                    key=key,
                    stage=stage,
                    seconds={stage: 1.0},
                    bandwidth=BANDWIDTH,
                    ready=key not in self._arriving,
                    load=pace / counts[stage] if counts[stage] else 1.0,
                )
                for key, stage in self._stage_of.items()
            ],
        )

    def _preempt(self) -> None:
        stage = self._rng.randrange(self._trace.num_stages)
        there = sorted(key for key, at in self._stage_of.items() if at == stage)
        if len(there) > 1:
            gone = self._rng.choice(there)
            del self._stage_of[gone]
            self._arriving.pop(gone, None)

    def _arrive(self, now: float) -> None:
        key = (f"{self._born:04d}", "")
        self._born += 1
        stage, _ = best_stage(self._swarm(), Worker(key=key, stage=0))
        assert stage is not None
        self._settle(key, stage, now)

    def _settle(self, key: tuple[str, str], stage: int, now: float) -> None:
        self._stage_of[key] = stage
        self._arriving[key] = now + self._trace.transfer_s

    def run(self) -> Outcome:
        trace, outcome = self._trace, Outcome()
        end = trace.hours * HOUR_S
        outcome.done, outcome.possible = [0.0] * int(trace.hours), [0.0] * int(trace.hours)
        heap = [(at, n, kind) for n, (at, kind) in enumerate(self._events)]
        heap += [(minute * 60.0, -2, "sample") for minute in range(int(trace.hours * 60))]
        if self._period_s:
            heap += [(k * self._period_s, -1, "decide") for k in range(1, int(end / self._period_s))]
        heapq.heapify(heap)
        now = 0.0
        while heap:
            until = min([heap[0][0], *self._arriving.values()])
            self._count(outcome, now, until)
            now = until
            self._arriving = {key: at for key, at in self._arriving.items() if at > now}
            if heap[0][0] > now:
                continue
            _, _, kind = heapq.heappop(heap)
            if kind == "preempt":
                self._preempt()
            elif kind == "arrive":
                self._arrive(now)
            elif kind == "decide":
                for move in plan_moves(self._swarm(), period_s=self._period_s).moves:
                    self._settle(move.key, move.target, now)
                    outcome.num_moves += 1
            else:
                best = len(self._stage_of) // trace.num_stages
                outcome.curve.append((now / HOUR_S, len(self._stage_of), min(self._counts()) / best))
        self._count(outcome, now, end)
        return outcome

    def _count(self, outcome: Outcome, start: float, end: float) -> None:
        """Work between two events, split at the hours."""
        pace, best = min(self._counts()), len(self._stage_of) // self._trace.num_stages
        while start < end:
            hour = int(start / HOUR_S)
            stop = min(end, (hour + 1) * HOUR_S)
            outcome.done[hour] += pace * (stop - start)
            outcome.possible[hour] += best * (stop - start)
            start = stop
