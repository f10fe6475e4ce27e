"""Shares of a round: METHODS' oracles, DeDLOC's linear program as the slow twin, and rounding to whole elements.

Rounding (Hagenbach-Bischoff) is compared with D'Hondt's method seat by seat.
"""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.policy.roles import Candidate, solve
from swarm.policy.shares import (
    WORTH,
    Reducer,
    Report,
    best_shares,
    best_time,
    choose_auxiliaries,
    choose_shares,
    hagenbach_bischoff,
    slice_bounds,
    time_of,
)

WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any)


def seat_by_seat(total: int, weights: list[int]) -> list[int]:
    """Each seat goes to the highest quotient weight / (seats + 1), the lowest index first (exact arithmetic)."""
    seats = [0] * len(weights)
    for _ in range(total):
        best = max(range(len(weights)), key=lambda i: (Fraction(weights[i], seats[i] + 1), -i))
        seats[best] += 1
    return seats


def test_the_oracle_of_the_papers_code() -> None:
    assert hagenbach_bischoff(7, [0.5, 0.3, 0.2]) == [4, 2, 1]


@given(st.integers(0, 120), WEIGHTS)
def test_equals_the_slow_twin(total: int, weights: list[int]) -> None:
    assert hagenbach_bischoff(total, [float(w) for w in weights]) == seat_by_seat(total, weights)


@given(st.integers(0, 2**40), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=64))
def test_the_parts_sum_to_the_total_and_follow_the_weights(total: int, weights: list[float]) -> None:
    parts = hagenbach_bischoff(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        exact = total * weight / sum(weights)
        assert exact - len(weights) - 1e-6 * total <= part <= exact + len(weights) + 1e-6 * total


@given(st.integers(0, 200), WEIGHTS)
def test_who_has_no_weight_gets_nothing(total: int, weights: list[int]) -> None:
    parts = hagenbach_bischoff(total, [float(w) for w in weights])
    assert all(part == 0 for part, weight in zip(parts, weights, strict=True) if weight == 0)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_equal_weights_differ_by_one_element_at_most(total: int, num: int) -> None:
    parts = hagenbach_bischoff(total, [1.0] * num)
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


@given(st.integers(0, 10_000), WEIGHTS)
def test_bounds_cover_every_element_once(total: int, weights: list[int]) -> None:
    spans = slice_bounds(hagenbach_bischoff(total, [float(w) for w in weights]))
    assert len(spans) == len(weights)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == total
    assert [end - start for start, end in spans] == hagenbach_bischoff(total, [float(w) for w in weights])


@pytest.mark.parametrize("weights", [[], [0.0], [0.0, 0.0]])
def test_weights_without_a_sum_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive sum"):
        hagenbach_bischoff(5, weights)


# ---------------------------------------------------------------------------------------------------- best shares


def both_ways(*bandwidths: float) -> list[Reducer]:
    return [Reducer(upload=b, download=b) for b in bandwidths]


@pytest.mark.parametrize(
    ("bandwidths", "best", "uniform"),
    [
        ([1000, 100, 100, 100, 100], 0.010, 0.016),
        ([200] * 4 + [100] * 8 + [50] * 4, 0.020, 0.0375),
        ([120, 100, 80], 0.013333, (1 + 1 / 3) / 80),
    ],
)
def test_the_oracles_of_simplified_shares(bandwidths: list[float], best: float, uniform: float) -> None:
    reducers = both_ways(*bandwidths)
    shares = best_shares(reducers)
    assert shares.time == pytest.approx(best, rel=1e-4)
    assert sum(shares.weights) == pytest.approx(1.0)
    assert time_of(reducers, [1 / len(reducers)] * len(reducers)) == pytest.approx(uniform, rel=1e-9)


def test_the_one_optimum_that_is_unique() -> None:
    assert best_shares(both_ways(120, 100, 80)).weights == pytest.approx([0.6, 1 / 3, 0.2 / 3])


AUXILIARY = {"computes": False, "receives": False}


@pytest.mark.parametrize(
    ("reducers", "rate"),
    [
        (both_ways(*[100] * 4), 200 / 3),
        ([*both_ways(*[100] * 4), Reducer(upload=1000, download=1000, **AUXILIARY)], 100.0),
        ([*both_ways(*[100] * 4), Reducer(upload=200, download=200, **AUXILIARY)], 250 / 3),
        ([*both_ways(*[100] * 3), Reducer(upload=100, download=100, reachable=False)], 60.0),
    ],
    ids=["all-reduce", "parameter server", "hybrid", "no inbound"],
)
def test_the_averaging_rates_of_dedloc(reducers: list[Reducer], rate: float) -> None:
    assert 1.0 / best_shares(reducers).time == pytest.approx(rate)


def members(**rest: object) -> st.SearchStrategy[Reducer]:
    fields = {name: st.just(value) for name, value in rest.items()}
    return st.builds(Reducer, upload=st.floats(1, 1000), download=st.floats(1, 1000), **fields)


#: Two that compute, and some of: others, one with an empty ledger and an auxiliary, or some that nobody can connect to.
REDUCERS = st.tuples(
    st.lists(members(), min_size=2, max_size=3),
    st.one_of(
        st.lists(st.one_of(members(computes=False), members(**AUXILIARY)), max_size=2),
        st.lists(members(reachable=False), max_size=2),
    ),
).map(lambda both: [*both[0], *both[1]])


@settings(deadline=None, max_examples=30)
@given(REDUCERS)
def test_no_shares_are_faster_than_the_linear_program_finds(reducers: list[Reducer]) -> None:
    """The slow twin: the whole program, in which several may reduce one slice. That is 0.1 % faster where an upload is tiny."""
    candidates = [
        Candidate(samples_per_s=1, upload=r.upload, download=r.download, holds_replica=r.receives, reachable=r.reachable)
        for r in reducers
    ]
    rate, _ = solve(candidates, [r.computes for r in reducers])
    shares = best_shares(reducers)
    assert rate * (1 - 2e-3) <= 1.0 / shares.time <= rate * (1 + 1e-5)
    assert best_time(reducers) == pytest.approx(shares.time, rel=1e-9)
    assert time_of(reducers, shares.weights) == pytest.approx(shares.time, rel=1e-9)
    assert all(w == 0.0 for w, r in zip(shares.weights, reducers, strict=True) if not r.reachable)


def test_a_thousand_peers_take_less_than_a_second() -> None:
    rng = random.Random(0)
    reducers = [Reducer(upload=rng.uniform(1, 1e3), download=rng.uniform(1, 1e3)) for _ in range(1000)]
    began = time.process_time()
    shares = best_shares(reducers)
    assert time.process_time() - began < 1.0
    assert shares.time < time_of(reducers, [1e-3] * 1000)


def test_bad_groups_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="nobody of the group can be connected to"):
        best_shares([Reducer(upload=1, download=1, reachable=False)] * 3)
    with pytest.raises(ValueError, match="fewer than two members need the result"):
        best_shares([*both_ways(1), Reducer(upload=1, download=1, **AUXILIARY)])
    with pytest.raises(ValueError, match="a bandwidth is not positive"):
        best_shares(both_ways(1, 0, 1))


# ---------------------------------------------------------------------------------------------------- the decision


def reports(*bandwidths: float | None) -> list[Report]:
    return [Report(f"peer{i}", b, b) for i, b in enumerate(bandwidths)]


def test_unknown_is_not_zero() -> None:
    weights, reason = choose_shares(reports(None, None, None))
    assert weights == pytest.approx([1 / 3] * 3)
    assert reason == "equal: no bandwidth has been measured"
    weights, reason = choose_shares(reports(9e6, 1e6, 1e6, None))
    assert weights[3] == pytest.approx(weights[1])  # taken for a middling one
    assert "1 not measured" in reason


def test_slow_links_reduce_less_and_the_reason_says_so() -> None:
    weights, reason = choose_shares(reports(1000e6, 100e6, 100e6, 100e6, 100e6))
    assert weights[0] > 0.9
    assert reason == "by bandwidth: 1.60 x faster than equal ones; the slowest is peer1 with 100 MB/s"


def test_shares_stay_equal_where_it_hardly_matters() -> None:
    weights, reason = choose_shares(reports(100e6, 101e6, 99e6, 100e6))
    assert weights == (0.25,) * 4
    assert reason.startswith("equal: by bandwidth the round would be 1.0")


def test_shares_change_only_once_bandwidths_drifted_far_enough() -> None:
    first, _ = choose_shares(reports(120e6, 100e6, 80e6))
    again, reason = choose_shares(reports(121e6, 99e6, 80e6), first)
    assert again == first
    assert reason == f"as before: no others are faster by more than {WORTH:.0%}"
    later, reason = choose_shares(reports(60e6, 100e6, 80e6), first)
    assert later != first
    assert reason.startswith("by bandwidth:")


def test_two_members_share_equally_whatever_their_links() -> None:
    assert choose_shares(reports(1e6, 100e6))[0] == (0.5, 0.5)


def test_a_member_with_an_empty_ledger_sends_less_so_it_reduces_more() -> None:
    """Home lines: uploads are what a round waits for."""
    busy = [Report(f"peer{i}", 10e6, 100e6) for i in range(3)]
    weights, _ = choose_shares([*busy, Report("peer3", 10e6, 100e6, computes=False)])
    assert weights == pytest.approx([2 / 11] * 3 + [5 / 11])


# ---------------------------------------------------------------------------------------------------- auxiliaries


def offers(*bandwidths: float | None, is_limit: bool = True) -> list[Report]:
    return [Report(f"auxiliary{i}", b, b, is_auxiliary=True, is_limit=is_limit) for i, b in enumerate(bandwidths)]


FOUR = reports(*[100e6] * 4)


@pytest.mark.parametrize(("bandwidth", "gain", "part"), [(1000e6, 1.5, 1.0), (200e6, 1.25, 0.6)])
def test_an_auxiliary_makes_rounds_as_fast_as_dedloc_says(bandwidth: float, gain: float, part: float) -> None:
    """A parameter server, and a hybrid of it and an all-reduce."""
    used, reason = choose_auxiliaries(FOUR, offers(bandwidth), most=1)
    assert (used, reason) == ((0,), f"auxiliary0: rounds should be {gain:.2f} x as fast as without")
    weights, reason = choose_shares([*FOUR, *offers(bandwidth)])
    assert weights[4] == pytest.approx(part)
    assert f"{gain:.2f} x faster than equal ones" in reason
    assert f"auxiliaries reduce {part:.0%}" in reason


def test_the_fastest_offers_are_taken_as_long_as_they_are_worth_it() -> None:
    sixteen = reports(*[100e6] * 16)
    assert choose_auxiliaries(sixteen, offers(500e6, 600e6, 100e6), most=1)[0] == (1,)
    assert choose_auxiliaries(sixteen, offers(500e6, 600e6, 100e6), most=3)[0] == (1, 0), "a third one has little to add"
    assert choose_auxiliaries(FOUR, offers(1000e6, 1000e6), most=2)[0] == (0,), "a second one has nothing to add"
    assert choose_auxiliaries(FOUR, offers(1000e6), most=0)[0] == ()


def test_what_may_carry_more_is_tried() -> None:
    """An auxiliary can be done without, so what is not known of it is taken for half of a middling member's."""
    used, reason = choose_auxiliaries(FOUR, offers(None, is_limit=False), most=1)
    assert (used, reason) == ((0,), "auxiliary0: rounds should be 1.06 x as fast as without")
    assert choose_auxiliaries(FOUR, offers(50e6, is_limit=False), most=1)[0] == (0,)
    assert choose_auxiliaries(FOUR, offers(50e6), most=1)[0] == ()


def test_a_change_of_helpers_must_be_worth_it() -> None:
    """140: 18 % faster."""
    assert choose_auxiliaries(FOUR, offers(140e6), most=1) == ((), "none: no offer makes rounds faster by 20%")
    assert choose_auxiliaries(FOUR, offers(140e6), most=1, before=["auxiliary0"])[0] == (0,)
    assert choose_auxiliaries(FOUR, offers(100e6), most=1, before=["auxiliary0"])[0] == ()


@pytest.mark.parametrize(
    ("members", "offered", "why"),
    [
        (FOUR, [], "none: nobody offers help"),
        (FOUR[:2], [1000e6], "none: two members send the same whoever reduces"),
        (reports(None, None, None), [1000e6], "none: no bandwidth of a member has been measured"),
        (reports(100e6, 100e6, 100e6, 10e6), [1000e6], "none: no offer makes rounds faster by 20%"),
    ],
    ids=["nobody", "two", "unmeasured", "the slowest has its own to carry"],
)
def test_no_help_has_a_reason(members: list[Report], offered: list[float], why: str) -> None:
    assert choose_auxiliaries(members, offers(*offered), most=1) == ((), why)


def test_without_bandwidths_auxiliaries_get_nothing() -> None:
    assert choose_shares([*reports(None, None, None), *offers(None)])[0] == (1 / 3, 1 / 3, 1 / 3, 0.0)
