"""Which slice of the flat gradient each member of a group reduces, from what its link carries. Pure.

A *share* is the fraction of the gradient that one member reduces, a *slice* the range of elements that comes of it.

The shares that end a round soonest are the optimum of DeDLOC's linear program (arXiv 2106.10207, section 3.2) at given
roles. Without limits of single links no solver is needed: a member sends and receives all its slices at one rate. If member i
reduces the fraction w_i, a round takes `max_i load_i(w_i) / bandwidth_i`. Loads are linear in w_i, so the best time is found
by bisection. `roles.py` holds the program itself. It may let several members reduce the same slice, which is no butterfly,
and which helps only if few members compute or can be connected to. Rounding to whole elements is
by the Hagenbach-Bischoff method, as in DeDLOC's code.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

#: Shares by bandwidth are used, and changed, only if they make the round faster by this fraction.
WORTH = 0.05
#: A member that only aggregates reduces nothing unless that makes rounds faster by this fraction: its slice comes in first, and
#: goes out only then.
AGGREGATE_WORTH = 0.1
#: An auxiliary must make rounds faster by the first fraction to be taken, and by the second to be kept. About a tenth of what
#: the program promises is lost: a chunk's sum goes out only after it has come in from all.
AUXILIARY_WORTH = 0.2
KEPT_WORTH = 0.15
#: Halvings of an interval by bisection: the result is exact to rounding.
_HALVINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """One member of a round: what it carries per second in each direction (any one unit), and what it takes part in."""

    upload: float
    download: float
    #: It has something to average: its ledger holds tickets.
    computes: bool = True
    #: It needs the result; an auxiliary, which only reduces, does not.
    receives: bool = True
    #: Others can connect to it, so it can reduce.
    reachable: bool = True


@dataclass(frozen=True, slots=True)
class Shares:
    """`weights` sum to 1; `time` is that of averaging one unit of data (1 / DeDLOC's averaging rate)."""

    weights: tuple[float, ...]
    time: float


class _Loads:
    """Units that each member sends and receives, `base + slope * weight`, for one averaged unit."""

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        computes = np.array([r.computes for r in reducers], dtype=float)
        receives = np.array([r.receives for r in reducers], dtype=float)
        upload = np.array([r.upload for r in reducers], dtype=float)
        download = np.array([r.download for r in reducers], dtype=float)
        if not (np.all(upload > 0) and np.all(download > 0)):
            raise ValueError("a bandwidth is not positive: leave the member out, or say that it is unknown")
        self.reachable = np.array([r.reachable for r in reducers])
        self.receives = receives
        # A member sends its own vector without the slice that it reduces itself, and its reduced slice to each other member.
        # What it receives is the reverse.
        self.base = np.stack([computes, receives])
        self.slope = np.stack([receives.sum() - receives - computes, computes.sum() - computes - receives])
        self.bandwidth = np.stack([upload, download])

    @property
    def least_time(self) -> float:
        """A lower bound of a round's time, whatever the shares.

        A member with a load that no share changes takes its time; and all bandwidths together must carry all loads.
        """
        alone = np.where(self.slope == 0, self.base / self.bandwidth, 0.0).max()
        together = ((self.base.sum(axis=1) + self.slope.min(axis=1)) / self.bandwidth.sum(axis=1)).max()
        return float(max(alone, together))

    def time(self, weights: np.ndarray) -> float:
        return float(((self.base + self.slope * weights) / self.bandwidth).max())

    def bounds(self, time: float) -> tuple[np.ndarray, np.ndarray]:
        """Least and greatest weight of each member with which it is done within `time`; no weight if least > greatest.

        `time` is not below `least_time`.
        """
        room = time * self.bandwidth - self.base
        with np.errstate(divide="ignore", invalid="ignore"):
            edge = room / self.slope
        least = np.where(self.slope < 0, edge, 0.0).max(axis=0)
        greatest = np.where(self.slope > 0, edge, np.inf).min(axis=0)
        return np.maximum(least, 0.0), np.minimum(greatest, np.where(self.reachable, 1.0, 0.0))


def best_shares(reducers: Sequence[Reducer]) -> Shares:
    """The shares that minimise a round's time; of several such, those in which slower members reduce least.

    Raises:
        ValueError: if nobody can reduce, or a bandwidth is not positive.
    """
    loads = _Loads(reducers)
    level = _best_time(loads)
    least, greatest = loads.bounds(level)
    greatest = np.maximum(least, greatest)
    # A member whose link is the bottleneck whatever it reduces decides the time; the rest is shared as if it were not
    # there: at the lowest time at which the others' greatest weights add up to 1.
    low_level = 0.0
    for _ in range(_HALVINGS):
        middle = (low_level + level) / 2
        if np.clip(loads.bounds(middle)[1], least, greatest).sum() >= 1.0:
            level = middle
        else:
            low_level = middle
    weights = np.clip(loads.bounds(level)[1], least, greatest)
    weights = weights / weights.sum()
    return Shares(tuple(float(w) for w in weights), loads.time(weights))


def best_time(reducers: Sequence[Reducer]) -> float:
    """The time of `best_shares`, without the shares: cheaper."""
    return _best_time(_Loads(reducers))


def _best_time(loads: _Loads) -> float:
    if not loads.reachable.any():
        raise ValueError("nobody of the group can be connected to")
    if sum(loads.receives) < 2:
        raise ValueError("fewer than two members need the result")
    low, high = loads.least_time, loads.time(np.where(loads.reachable, 1.0 / loads.reachable.sum(), 0.0))
    for _ in range(_HALVINGS):
        time = (low + high) / 2
        least, greatest = loads.bounds(time)
        if (least <= greatest).all() and least.sum() <= 1.0 <= greatest.sum():
            high = time
        else:
            low = time
    return high


def time_of(reducers: Sequence[Reducer], weights: Sequence[float]) -> float:
    """The time of averaging one unit of data with these shares."""
    return _Loads(reducers).time(np.array(weights, dtype=float))


@dataclass(frozen=True, slots=True)
class Report:
    """What one peer reports of its link, in bytes per second (None: not measured yet), and its role in the round."""

    name: str
    upload: float | None
    download: float | None
    #: Its sealed ledger holds tickets.
    computes: bool = True
    #: It may reduce: a record may say that it only computes.
    reduces: bool = True
    #: It is no member: it has nothing to average and only reduces.
    is_auxiliary: bool = False
    #: The link was seen to be full at these rates. If not, it may carry more.
    is_limit: bool = True


def _reducers(reports: Sequence[Report], members: Sequence[Report]) -> list[Reducer] | None:
    """Reducers of `reports` as they were measured; None if none of `members` was.

    A peer that was not measured counts as a median member, and such an auxiliary as half of one.
    """
    known_up = [r.upload for r in members if r.upload is not None]
    known_down = [r.download for r in members if r.download is not None]
    if not known_up or not known_down:
        return None
    middle_up, middle_down = statistics.median(known_up), statistics.median(known_down)
    return [
        Reducer(
            upload=r.upload or middle_up / (2.0 if r.is_auxiliary else 1.0),
            download=r.download or middle_down / (2.0 if r.is_auxiliary else 1.0),
            computes=r.computes and not r.is_auxiliary,
            receives=not r.is_auxiliary,
            reachable=r.reduces,
        )
        for r in reports
    ]


def choose_auxiliaries(
    members: Sequence[Report], offers: Sequence[Report], *, most: int, before: Collection[str] = ()
) -> tuple[tuple[int, ...], str]:
    """Choose which of the `offers` should help the members, at most `most` of them; and say why.

    The fastest come first, each if it makes rounds faster by `AUXILIARY_WORTH`; `before` names those of the last round. An
    offer whose link may carry more than it reports is tried if it makes rounds faster at all.
    """
    if not offers:
        return (), "none: nobody offers help"
    if len(members) < 3:
        return (), "none: two members send the same whoever reduces"
    reducers, known = _reducers(offers, members), _reducers(members, members)
    if reducers is None or known is None:
        return (), "none: no bandwidth of a member has been measured"
    used: list[int] = []
    time = alone = best_time(known)
    for i in sorted(range(len(offers)), key=lambda i: -min(reducers[i].upload, reducers[i].download))[:most]:
        helped = best_time([*known, reducers[i]])
        worth = KEPT_WORTH if offers[i].name in before else AUXILIARY_WORTH
        worth = worth if offers[i].is_limit else 0.0
        if time <= helped * (1.0 + worth):
            break
        known, time = [*known, reducers[i]], helped
        used.append(i)
    if not used:
        return (), f"none: no offer makes rounds faster by {AUXILIARY_WORTH:.0%}"
    names = ", ".join(offers[i].name for i in used)
    return tuple(used), f"{names}: rounds should be {alone / time:.2f} x as fast as without"


def choose_shares(reports: Sequence[Report], previous: Sequence[float] | None = None) -> tuple[tuple[float, ...], str]:
    """The shares of the next round: by bandwidth where that is worth it, else equal ones of the members; and why.

    A member that has not been measured is taken for a middling one. `previous` are the shares of the same peers' last
    round: they stay unless new ones are faster by `WORTH`.
    """
    members = [r for r in reports if not r.is_auxiliary]
    if not any(r.reduces for r in members):
        reports = [replace(r, reduces=True) for r in reports]
    reducing = [r.reduces and not r.is_auxiliary for r in reports]
    equal = tuple(part / sum(reducing) for part in reducing)
    if len(members) < 3 and all(r.computes for r in members):
        return equal, "equal: " + ("two members send the same whatever they reduce" if members[1:] else "nobody else is there")
    reducers = _reducers(reports, members)
    if reducers is None:
        return equal, "equal: no bandwidth has been measured"
    best = best_shares(reducers)
    only = [replace(r, reachable=False) if not r.computes and r.receives else r for r in reducers]
    if any(r.reachable for r in only):
        without = best_shares(only)
        best = without if without.time <= best.time * (1.0 + AGGREGATE_WORTH) else best
    may_stay = previous is not None and all(r.reduces or not part for r, part in zip(reports, previous, strict=True))
    if previous is not None and may_stay and time_of(reducers, previous) <= best.time * (1.0 + WORTH):
        return tuple(previous), f"as before: no others are faster by more than {WORTH:.0%}"
    gain = time_of(reducers, equal) / best.time
    if gain <= 1.0 + WORTH:
        return equal, f"equal: by bandwidth the round would be {gain:.2f} x faster"
    slowest = min(range(len(reports)), key=lambda i: min(reducers[i].upload, reducers[i].download))
    slow = min(reducers[slowest].upload, reducers[slowest].download)
    unknown = sum(r.upload is None or r.download is None for r in reports)
    helped = sum(weight for weight, r in zip(best.weights, reports, strict=True) if r.is_auxiliary)
    return best.weights, (
        f"by bandwidth: {gain:.2f} x faster than equal ones; the slowest is {reports[slowest].name} with "
        f"{slow / 1e6:.3g} MB/s"
        + (f"; auxiliaries reduce {helped:.0%}" if helped else "")
        + (f"; {unknown} not measured" if unknown else "")
    )


def hagenbach_bischoff(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` elements in proportion to `weights`; the sizes of the slices sum to `total` exactly."""
    whole = sum(weights)
    if whole <= 0:
        raise ValueError("weights must have a positive sum")
    sizes = [int(total * weight / (whole * (1 + 1 / max(1, total)))) for weight in weights]
    heap = [(-weight / (size + 1), i) for i, (weight, size) in enumerate(zip(weights, sizes, strict=True))]
    heapq.heapify(heap)
    for _ in range(total - sum(sizes)):
        _, i = heapq.heappop(heap)
        sizes[i] += 1
        heapq.heappush(heap, (-weights[i] / (sizes[i] + 1), i))
    return sizes


def slice_bounds(slice_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """`(start, end)` of each member's slice."""
    result = []
    start = 0
    for size in slice_sizes:
        result.append((start, start + size))
        start += size
    return result
