"""Which peers move to another stage (SWARM, arXiv 2301.11913, section 3.2 and algorithm 2, improved). Pure.

The paper moves the least loaded peer of the least loaded stage to the most loaded one. Here a plan is made that raises
the slowest stage again and again, by one peer that comes or by two that change places, until nothing raises it further;
the part of the plan that pays is done. So nothing moves unless the swarm gets faster, by more than noise and by more than
the transfers cost. Guards: no stage is left without the peers that it needs; one mover per pair of stages (in each
direction) and period; the new state fits the mover's memory; a stage that is slow because of its links gets no compute;
where the trainers are the limit (no load) nobody moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from swarm.base.ids import MemberKey
from swarm.policy.throughput import Swarm, Worker

#: A plan must raise the predicted throughput by the part `MIN_GAIN`, and by what noise may feign: `NOISE` over the root of the
#: number of tickets that were measured at the slowest stage.
MIN_GAIN = 0.03
NOISE = 0.25
#: Periods for which an assignment is expected to hold: a transfer must pay for itself within them.
HORIZON_PERIODS = 4.0
#: A slowest stage whose peers have a lower load (queue + utilisation) is not what the swarm waits for.
MIN_LOAD = 0.5
#: Rates closer than this part are one rate.
TOLERANCE = 1e-9


class PlannedMove(NamedTuple):
    """One peer goes from stage `source` to stage `target`."""

    key: MemberKey
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The moves of one period; `before` and `after` are predicted tickets/s. No moves: the reason says why."""

    moves: tuple[PlannedMove, ...]
    reason: str
    before: float
    after: float


def plan_moves(swarm: Swarm, *, period_s: float, min_peers: int = 1) -> RebalancePlan:
    """Choose the moves that pay.

    Args:
        swarm: the snapshot; peers that are on their way to a stage count there, and stay.
        period_s: time to the next decision.
        min_peers: ready peers that every stage keeps while others of it move.
    """
    search = _Search(swarm, max(1, min_peers))
    before = min(search.rates)
    slowest = search.rates.index(before)
    served = any(worker.stage == slowest and worker.ready for worker in swarm.workers)
    if served and (load := swarm.load_of(slowest)) < MIN_LOAD:
        return RebalancePlan(
            (), f"stage {slowest} is the slowest, but idle (load {load:.2f}): links or trainers are the limit", before, before
        )
    least_gain = MIN_GAIN + _noise(swarm, slowest)
    best: tuple[float, int, float] | None = None
    while search.raise_slowest():
        after = min(search.rates)
        accepted = before if best is None else best[2]  # what is added must gain as much again, or noise would move peers
        if after <= accepted * (1 + least_gain) or after <= accepted:
            continue
        worth = _worth(swarm, search.moves, before=before, after=after, horizon_s=HORIZON_PERIODS * period_s)
        if worth > 0 and (best is None or worth > best[0] * (1 + TOLERANCE)):
            best = (worth, len(search.moves), after)
    if best is None:
        return RebalancePlan((), _why_not(search, before, least_gain, period_s), before, before)
    moves = _needed(swarm, search.moves[: best[1]], best[2])
    after = swarm.throughput({move.key: move.target for move in moves})
    what = ", ".join(f"{move.key[0][:8]} from {move.source} to {move.target}" for move in moves)
    reason = f"stage {slowest} is {swarm.bound_of(slowest)}-bound at {before:.3g} tickets/s; {what}: {after:.3g}"
    return RebalancePlan(moves, reason, before, after)


class _Search:
    """The assignment as the plan changes it. Invariant: `rates` are those of `where`."""

    def __init__(self, swarm: Swarm, min_peers: int) -> None:
        self._swarm = swarm
        self._min_peers = min_peers
        self.rates = swarm.stage_rates({})
        self.moves: tuple[PlannedMove, ...] = ()
        self._used: set[tuple[int, int]] = set()
        self._moved: set[MemberKey] = set()
        self._at: list[list[Worker]] = [[] for _ in swarm.stages]
        for worker in swarm.workers:
            self._at[worker.stage].append(worker)
        #: Ready peers of each stage that do not move.
        self._staying = [sum(worker.ready for worker in workers) for workers in self._at]

    def raise_slowest(self) -> bool:
        """Make the best change that raises the slowest stage and leaves nobody as slow; False if there is none."""
        slowest = min(self.rates)
        target = self.rates.index(slowest)
        best = max(self._single(target), key=lambda c: (c[0], c[1]), default=None)
        others = [rate for stage, rate in enumerate(self.rates) if stage != target]
        if best is None or best[0] < min(others):  # a swap moves two states: only where one peer does not do
            swap = max(self._swaps(target), key=lambda c: (c[0], c[1]), default=None)
            if swap is not None and (best is None or swap[0] > best[0] * (1 + TOLERANCE)):
                best = swap
        if best is None or best[0] <= slowest * (1 + TOLERANCE):
            return False
        for move in best[2]:
            self._make(move)
        return True

    def _make(self, move: PlannedMove) -> None:
        self.moves += (move,)
        self._used.add((move.source, move.target))
        self._moved.add(move.key)
        worker = next(w for w in self._at[move.source] if w.key == move.key)
        self._staying[move.source] -= 1
        self.rates[move.source] -= self._swarm.rate(worker, move.source).tickets_per_s
        self.rates[move.target] += self._swarm.rate(worker, move.target).tickets_per_s

    def _movers(self, source: int, target: int) -> Iterator[tuple[float, float, Worker]]:
        """Peers that may go, with what their going costs and their coming gives; one of each kind."""
        if (source, target) in self._used or self._staying[source] <= self._min_peers:
            return
        kinds: set[tuple[float, float]] = set()
        for worker in self._at[source]:
            if not worker.ready or worker.key in self._moved or not self._swarm.fits(worker, target):
                continue
            lost = self._swarm.rate(worker, source).tickets_per_s
            given = self._swarm.rate(worker, target).tickets_per_s
            if (lost, given) not in kinds:
                kinds.add((lost, given))
                yield lost, given, worker

    def _single(self, target: int) -> Iterator[tuple[float, float, tuple[PlannedMove, ...]]]:
        """(rate of the slower of the two stages afterwards, preference, moves): the richest source, if all else is equal."""
        for source, rate in enumerate(self.rates):
            if source != target:
                for lost, given, worker in self._movers(source, target):
                    slower = min(rate - lost, self.rates[target] + given)
                    yield slower, rate, (PlannedMove(worker.key, source, target),)

    def _swaps(self, target: int) -> Iterator[tuple[float, float, tuple[PlannedMove, ...]]]:
        for source, rate in enumerate(self.rates):
            if source == target:
                continue
            back = list(self._movers(target, source))
            for lost, given, worker in self._movers(source, target) if back else ():
                for lost_back, given_back, other in back:
                    slower = min(rate - lost + given_back, self.rates[target] + given - lost_back)
                    yield slower, rate, (PlannedMove(worker.key, source, target), PlannedMove(other.key, target, source))


def _noise(swarm: Swarm, stage: int) -> float:
    """Relative error of a stage's measured rate, about twice its standard deviation; 0 if nothing was measured there."""
    num_tickets = sum(worker.num_tickets for worker in swarm.workers if worker.stage == stage)
    return NOISE / math.sqrt(num_tickets) if num_tickets else 0.0


def _worth(swarm: Swarm, moves: tuple[PlannedMove, ...], *, before: float, after: float, horizon_s: float) -> float:
    """Tickets gained over the horizon: nobody counts on a mover while it downloads."""
    workers = {worker.key: worker for worker in swarm.workers}
    transfer_s = max(swarm.transfer_s(workers[move.key], move.target) for move in moves)
    meanwhile = swarm.throughput({move.key: None for move in moves})
    return (after - before) * (horizon_s - transfer_s) - (before - meanwhile) * transfer_s


def _needed(swarm: Swarm, moves: tuple[PlannedMove, ...], after: float) -> tuple[PlannedMove, ...]:
    """Leave out the moves that `after` does not need."""
    for move in reversed(moves):
        fewer = tuple(other for other in moves if other != move)
        if swarm.throughput({m.key: m.target for m in fewer}) >= after * (1 - TOLERANCE):
            return _needed(swarm, fewer, after)
    return moves


def _why_not(search: _Search, before: float, least_gain: float, period_s: float) -> str:
    if not search.moves:
        return f"no move raises the slowest stage above {before:.3g} tickets/s"
    gain = min(search.rates) / before - 1 if before else 0.0
    if gain <= least_gain:
        return f"{len(search.moves)} moves would gain {gain:.1%}, less than {least_gain:.1%}"
    within_s = HORIZON_PERIODS * period_s
    return f"{len(search.moves)} moves would gain {gain:.1%}, but their transfers do not pay within {within_s:g} s"
