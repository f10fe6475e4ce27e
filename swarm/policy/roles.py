"""Who computes and who only aggregates: DeDLOC's linear program (arXiv 2106.10207, section 3.2 and appendix), solved by
HiGHS. Pure; scipy is imported at first use.

Rates are in units of data per second: `raw[i][j]` of raw gradients from i to j, `reduced[i][j]` of aggregated ones from i
to j. Member i aggregates at most as fast as the slowest raw stream reaches it: `reduced[i][j] <= min over computing k of
raw[k][i]`. Every holder of a replica must receive the aggregate whether it computes or not (the paper asks that of
computing peers only, which would leave the others' replicas behind); auxiliaries hold none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.policy.shares import Reducer, best_shares, best_time

#: Every choice of computing members is looked at if no more than so many could compute; else one change at a time.
MAX_ENUMERATED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One peer of a stage: `samples_per_s` of its device (0 for an auxiliary), its link, and how it is connected."""

    samples_per_s: float
    upload: float
    download: float
    holds_replica: bool = True
    reachable: bool = True

    def reducer(self, computes: bool, *, reduces: bool = True) -> Reducer:
        """This candidate as the shares' program sees it, if it `computes` and `reduces` or not."""
        return Reducer(
            upload=self.upload,
            download=self.download,
            computes=computes,
            receives=self.holds_replica,
            reachable=self.reachable and reduces,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step of a stage."""

    #: Tickets, or samples, in units of the candidates' rates.
    tickets: float
    #: One average, in units of the candidates' links.
    average_bytes: float
    #: The next step is computed while an average is under way.
    overlaps: bool = False
    #: Seconds in which the slowest other stage computes a step: this one need not be faster.
    others_s: float = 0.0


def step_s(work: Work, compute_s: float, average_s: float) -> float:
    """Seconds of a step that takes so long to compute, and so long to average."""
    compute_s = max(compute_s, work.others_s)
    return max(compute_s, average_s) if work.overlaps else compute_s + average_s


@dataclass(frozen=True, slots=True)
class RolePlan:
    """`weights` say what part of the data each member aggregates."""

    computes: tuple[bool, ...]
    weights: tuple[float, ...]
    steps_per_s: float


Bandwidths = Sequence[Sequence[float]]


def solve(candidates: Sequence[Candidate], computes: Sequence[bool], links: Bandwidths | None = None) -> tuple[float, np.ndarray]:
    """Solve the linear program at given roles.

    Args:
        candidates: all peers of the group.
        computes: who computes.
        links: `links[i][j]`, what can go from i to j; None for no limits but the peers' own.

    Returns:
        The averaging rate, and for each member the part that it aggregates.
    """
    from scipy.optimize import linprog

    n = len(candidates)
    pairs = {pair: k for k, pair in enumerate(itertools.permutations(range(n), 2))}
    num_pairs = len(pairs)
    # Variables: raw rates of pairs, reduced rates of pairs, each member's own aggregation rate, the averaging rate.
    num = 2 * num_pairs + n + 1
    rows, limits = [], []

    def at_most(factors: dict[int, float], limit: float) -> None:
        row = np.zeros(num)
        for variable, factor in factors.items():
            row[variable] = factor
        rows.append(row)
        limits.append(limit)

    upper = np.full(num, np.inf)
    for (i, j), k in pairs.items():
        if not computes[i] or not candidates[j].reachable:
            upper[k] = 0.0  # nothing to send, or nobody can connect to j
        if not candidates[i].reachable or not candidates[j].holds_replica:
            upper[num_pairs + k] = 0.0
        if links is not None:
            at_most({k: 1.0, num_pairs + k: 1.0}, links[i][j])
    for i, candidate in enumerate(candidates):
        own = 2 * num_pairs + i
        if not candidate.reachable:
            upper[own] = 0.0
        others = [j for j in range(n) if j != i]
        for k in others:
            if computes[k]:
                at_most({own: 1.0, pairs[k, i]: -1.0}, 0.0)
        for j in others:
            at_most({num_pairs + pairs[i, j]: 1.0, own: -1.0}, 0.0)
        at_most({p: 1.0 for j in others for p in (pairs[j, i], num_pairs + pairs[j, i])}, candidate.download)
        at_most({p: 1.0 for j in others for p in (pairs[i, j], num_pairs + pairs[i, j])}, candidate.upload)
        if candidate.holds_replica:
            got = {num_pairs + pairs[j, i]: -1.0 for j in others} | {own: -1.0}
            at_most(got | {num - 1: 1.0}, 0.0)
    upper[2 * num_pairs : num - 1] = np.minimum(upper[2 * num_pairs : num - 1], sum(c.upload + c.download for c in candidates))
    objective = np.zeros(num)
    objective[-1] = -1.0
    result = linprog(
        objective, A_ub=np.array(rows), b_ub=np.array(limits), bounds=list(zip(np.zeros(num), upper, strict=True)), method="highs"
    )
    if result.status != 0:
        raise ValueError(f"no rates for this group: {result.message}")
    own = np.maximum(result.x[2 * num_pairs : num - 1], 0.0)
    return float(result.x[-1]), own / own.sum() if own.sum() > 0 else np.full(n, 1.0 / n)


def plan_roles(
    candidates: Sequence[Candidate],
    work: Work,
    *,
    links: Bandwidths | None = None,
    whole: bool = False,
    fixed: Collection[int] = (),
) -> tuple[RolePlan, str]:
    """Choose who should compute, and what each should aggregate, for the most steps per second; and say why.

    Args:
        candidates: all peers of the group.
        work: one step of it.
        links: see `solve`.
        fixed: those who compute in any case, if they can.
        whole: solve the whole program, in which several may reduce one slice; else, without `links`, the butterfly that runs.
    """
    able = [i for i, c in enumerate(candidates) if c.samples_per_s > 0]
    if not able:
        raise ValueError("nobody can compute")
    is_whole = whole or links is not None

    def computing_s(chosen: Sequence[int]) -> float:
        return work.tickets / sum(candidates[i].samples_per_s for i in chosen)

    def reducers(chosen: Sequence[int]) -> list[Reducer]:
        return [c.reducer(i in chosen) for i, c in enumerate(candidates)]

    def averaging_s(chosen: Sequence[int]) -> float:
        if len(candidates) == 1:
            return 0.0
        if is_whole:
            rate, _ = solve(candidates, [i in chosen for i in range(len(candidates))], links)
            return work.average_bytes / rate if rate > 0 else math.inf
        return best_time(reducers(chosen)) * work.average_bytes

    def seconds(chosen: Sequence[int]) -> float:
        return step_s(work, computing_s(chosen), averaging_s(chosen))

    best: tuple[int, ...] = ()
    best_s = math.inf
    choices = _all_choices(able, fixed) if len(able) <= MAX_ENUMERATED else _greedy_choices(able, fixed, candidates, seconds)
    for chosen in sorted(choices, key=lambda c: (computing_s(c), c)):
        if step_s(work, computing_s(chosen), 0.0) >= best_s:
            break  # choices come fastest first: no later one can be better
        if (time := seconds(chosen)) < best_s:
            best, best_s = chosen, time
    computes = tuple(i in best for i in range(len(candidates)))
    if is_whole or len(candidates) == 1:
        weights = tuple(float(w) for w in solve(candidates, computes, links)[1])
    else:
        weights = best_shares(reducers(best)).weights
    bound = "computing" if computing_s(best) >= averaging_s(best) else "averaging"
    idle = [i for i in able if i not in best]
    reason = f"{bound} is the bottleneck" + (f"; members {idle} only aggregate" if idle else "; everybody computes")
    return RolePlan(computes, weights, 1.0 / best_s), reason


def _all_choices(able: Sequence[int], fixed: Collection[int]) -> list[tuple[int, ...]]:
    chosen = (c for size in range(1, len(able) + 1) for c in itertools.combinations(able, size))
    always = set(able).intersection(fixed)
    return [c for c in chosen if always.issubset(c)]


def _greedy_choices(
    able: Sequence[int], fixed: Collection[int], candidates: Sequence[Candidate], seconds: Callable[[Sequence[int]], float]
) -> list[tuple[int, ...]]:
    """Everybody but those with the slowest uploads, however many; from the best of these one more leaves while it helps."""
    by_upload = sorted(able, key=lambda i: candidates[i].upload)
    free = [i for i in by_upload if i not in fixed]
    choices = [tuple(i for i in able if i not in free[:k]) for k in range(min(len(free) + 1, len(able)))]
    current = min(choices, key=seconds)
    while len(current) > 1 and not set(current).issubset(fixed):
        smaller = [tuple(i for i in current if i != leaving) for leaving in current if leaving not in fixed]
        best = min(smaller, key=seconds)
        if seconds(best) >= seconds(current):
            break
        current = best
        choices.append(current)
    return choices
