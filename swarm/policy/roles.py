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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.policy.shares import Reducer, best_shares, best_time

#: Every choice of computing members is looked at if no more than so many could compute; else one change at a time.
MAX_ENUMERATED = 10
#: Every choice is solved as the whole program in groups up to this size, or if single links have limits. Larger groups use the
#: rates of a butterfly (`shares.py`), which are a little lower where few members can be connected to.
MAX_SOLVED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One peer of a stage: `samples_per_s` of its device (0 for an auxiliary), its link, and how it is connected."""

    samples_per_s: float
    upload: float
    download: float
    holds_replica: bool = True
    reachable: bool = True

    def reducer(self, computes: bool) -> Reducer:
        """This candidate as the shares' program sees it, if it `computes` or not."""
        return Reducer(
            upload=self.upload, download=self.download, computes=computes, receives=self.holds_replica, reachable=self.reachable
        )


@dataclass(frozen=True, slots=True)
class RolePlan:
    """`steps_per_s` = min(computing rate, averaging rate); `weights` say what part of the data each member aggregates."""

    computes: tuple[bool, ...]
    weights: tuple[float, ...]
    steps_per_s: float


Bandwidths = Sequence[Sequence[float]]
_Rate = Callable[[Sequence[int]], float]


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
    candidates: Sequence[Candidate], *, batch: float, parameters: float, links: Bandwidths | None = None
) -> tuple[RolePlan, str]:
    """Choose who should compute, and what each should aggregate, for the most steps per second; and say why.

    Args:
        candidates: all peers of the group.
        batch: samples of one step.
        parameters: units of data of one average.
        links: see `solve`.
    """
    able = [i for i, c in enumerate(candidates) if c.samples_per_s > 0]
    if not able:
        raise ValueError("nobody can compute")

    def computing(chosen: Sequence[int]) -> float:
        return sum(candidates[i].samples_per_s for i in chosen) / batch

    def averaging(chosen: Sequence[int]) -> float:
        computes = [i in chosen for i in range(len(candidates))]
        if len(candidates) == 1:
            return math.inf
        if links is not None or len(candidates) <= MAX_SOLVED:
            return solve(candidates, computes, links)[0] / parameters
        return 1.0 / (best_time([c.reducer(x) for c, x in zip(candidates, computes, strict=True)]) * parameters)

    enumerated = len(able) <= MAX_ENUMERATED
    choices = _all_choices(able, computing) if enumerated else _greedy_choices(able, computing, averaging)
    best: tuple[int, ...] = ()
    best_rate = -1.0
    for chosen in choices:
        if computing(chosen) <= best_rate:
            break  # choices come fastest first: no later one can be better
        rate = min(computing(chosen), averaging(chosen))
        if rate > best_rate:
            best, best_rate = chosen, rate
    computes = tuple(i in best for i in range(len(candidates)))
    if links is not None or len(candidates) <= MAX_SOLVED:
        weights = tuple(float(w) for w in solve(candidates, computes, links)[1])
    else:
        weights = best_shares([c.reducer(x) for c, x in zip(candidates, computes, strict=True)]).weights
    bound = "computing" if computing(best) <= averaging(best) else "averaging"
    idle = [i for i in able if i not in best]
    reason = f"{bound} is the bottleneck" + (f"; members {idle} only aggregate" if idle else "; everybody computes")
    return RolePlan(computes, weights, best_rate), reason


def _all_choices(able: Sequence[int], computing: _Rate) -> list[tuple[int, ...]]:
    chosen = (c for size in range(1, len(able) + 1) for c in itertools.combinations(able, size))
    return sorted(chosen, key=lambda c: (-computing(c), c))


def _greedy_choices(able: Sequence[int], computing: _Rate, averaging: _Rate) -> Iterator[tuple[int, ...]]:
    """Greedily: everybody, then without whoever's leaving helps most, while it helps."""
    current = tuple(able)
    yield current
    while len(current) > 1:
        rate = min(computing(current), averaging(current))
        smaller = [tuple(i for i in current if i != leaving) for leaving in current]
        best = max(smaller, key=lambda c: (min(computing(c), averaging(c)), computing(c)))
        if min(computing(best), averaging(best)) <= rate:
            return
        current = best
        yield current
