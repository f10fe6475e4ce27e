"""Interleaved weighted round robin: the oracle of docs/methods.md, and the faults of earlier systems that must not return."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from swarm.base.ids import MemberKey
from swarm.policy.routing import StageRouter

A, B, C, D = ((name, "0") for name in "abcd")


def router(*keys: MemberKey, seed: int = 0, max_ban_s: float = 30.0) -> StageRouter:
    made = StageRouter(random.Random(seed), max_ban_s=max_ban_s)
    made.set_members(keys)
    return made


def serve(stage: StageRouter, seconds: dict[MemberKey, float], num: int, *, now: float = 0.0) -> list[MemberKey]:
    """`num` micro-batches of one sample, one after the other; returns who served each."""
    served = []
    for _ in range(num):
        key = stage.candidates(1, now=now)[0]
        stage.observe(key, seconds[key], 1, reserved=key)
        served.append(key)
    return served


RATES_4_2_1 = {A: 0.25, B: 0.5, C: 1.0}


@pytest.mark.parametrize("seed", range(10))
def test_work_is_shared_in_proportion_to_speed(seed: int) -> None:
    """docs/methods.md: rates 4:2:1 receive 700 micro-batches as 400:200:100 (+-1), any 9 in a row hold one for each."""
    stage = router(A, B, C, seed=seed)
    for key, seconds in RATES_4_2_1.items():
        stage.observe(key, seconds, 1)
    served = serve(stage, RATES_4_2_1, 700)
    counts = Counter(served)
    assert abs(counts[A] - 400) <= 1, counts
    assert abs(counts[B] - 200) <= 1, counts
    assert abs(counts[C] - 100) <= 1, counts
    for start in range(len(served) - 8):
        assert set(served[start : start + 9]) == {A, B, C}, f"micro-batches {start}..{start + 8} starve a peer"


@pytest.mark.parametrize("seed", range(10))
def test_an_unmeasured_start_costs_a_peer_two_micro_batches_at_most(seed: int) -> None:
    counts = Counter(serve(router(A, B, C, seed=seed), RATES_4_2_1, 700))
    assert all(abs(counts[key] - expected) <= 2 for key, expected in ((A, 400), (B, 200), (C, 100))), counts


def test_equal_peers_take_turns() -> None:
    served = serve(router(A, B, C), {A: 1.0, B: 1.0, C: 1.0}, 300)
    assert set(Counter(served).values()) == {100}


def test_everyone_is_tried_before_anyone_is_measured() -> None:
    """All replies are still out: the first micro-batches must not all go to one peer."""
    stage = router(A, B, C, D)
    assert {stage.candidates(8, now=0.0)[0] for _ in range(4)} == {A, B, C, D}


def test_work_counts_when_it_is_reserved_and_not_when_it_returns() -> None:
    stage = router(A, B)
    serve(stage, {A: 1.0, B: 1.0}, 20)
    in_flight = [stage.candidates(1, now=0.0)[0] for _ in range(6)]
    assert Counter(in_flight) == {A: 3, B: 3}


def test_a_new_peer_is_tried_at_once_and_does_not_get_everything() -> None:
    stage = router(A, B)
    serve(stage, {A: 1.0, B: 1.0}, 500)
    stage.set_members([A, B, C])
    served = serve(stage, {A: 1.0, B: 1.0, C: 1.0}, 30)
    assert C in served[:2], "a new peer enters at the heap's minimum"
    assert Counter(served)[C] <= 11, "it must not catch up on what was assigned before it came"


def test_an_unmeasured_peer_is_charged_the_median() -> None:
    stage = router(A, B, C)
    serve(stage, {A: 1.0, B: 1.0, C: 1.0}, 60)
    stage.set_members([A, B, C, D])
    in_flight = [stage.candidates(1, now=0.0)[0] for _ in range(40)]  # D never answers
    assert Counter(in_flight)[D] == pytest.approx(10, abs=1)


def test_a_member_that_left_is_forgotten() -> None:
    stage = router(A, B)
    serve(stage, {A: 1.0, B: 1.0}, 10)
    stage.set_members([B])
    assert stage.candidates(1, now=0.0) == [B]
    assert stage.seconds_per_sample(A) is None
    stage.observe(A, 1.0, 1)  # a late reply of somebody who left
    stage.failed(A, now=0.0)
    assert stage.candidates(1, now=0.0) == [B]


def test_the_measure_is_a_bias_corrected_average() -> None:
    stage = router(A)
    stage.observe(A, 8.0, 4)
    assert stage.seconds_per_sample(A) == pytest.approx(2.0), "the first measurement counts in full"
    stage.observe(A, 4.0, 4)
    assert stage.seconds_per_sample(A) == pytest.approx((0.9 * 0.1 * 2.0 + 0.1 * 1.0) / 0.19)


def test_a_hung_peer_loses_its_fast_score() -> None:
    """Known fault: only successes updated the score, so a hung peer stayed the favourite for ever."""
    stage = router(A, B)
    serve(stage, {A: 0.01, B: 0.1}, 200)
    assert stage.seconds_per_sample(A) == pytest.approx(0.01)
    stage.failed(A, now=0.0, waited_s=8.0)
    score = stage.seconds_per_sample(A)
    assert score is not None
    assert score > 0.5, "the deadline is evidence too"
    served = serve(stage, {A: 8.0, B: 0.1}, 100, now=1000.0)
    assert Counter(served)[A] <= 20


def test_bans_double_and_expire() -> None:
    stage = router(A, B, max_ban_s=6.0)
    now = 0.0
    for ban_s in (1.0, 2.0, 4.0, 6.0, 6.0):
        stage.failed(A, now=now)
        assert A not in stage.candidates(1, now=now)
        assert A not in stage.candidates(1, now=now + ban_s - 0.01), f"ban of {ban_s} s ended early"
        now += ban_s
        assert A in stage.candidates(1, now=now), f"ban of {ban_s} s did not end"


def test_bans_double_for_a_peer_that_hangs_each_time() -> None:
    """As above, but each failure was waited for: what a hung peer looks like."""
    stage = router(A, B)
    now = 0.0
    for ban_s in (1.0, 2.0, 4.0):
        stage.failed(A, now=now, waited_s=8.0)
        assert A not in stage.candidates(1, now=now + ban_s - 0.01), f"ban of {ban_s} s ended early"
        now += ban_s


def test_a_success_ends_the_doubling() -> None:
    stage = router(A, B)
    for attempt in range(4):
        stage.failed(A, now=20.0 * attempt)
    stage.observe(A, 1.0, 1)
    stage.failed(A, now=100.0)
    assert A in stage.candidates(1, now=101.0)


def test_a_peer_that_returns_from_a_ban_is_not_flooded() -> None:
    """What the others did meanwhile is no debt: any 9 in a row still hold one for each."""
    seconds = {A: 1.0, B: 1.0, C: 1.0}
    stage = router(A, B, C)
    serve(stage, seconds, 30)
    stage.failed(A, now=0.0)
    serve(stage, seconds, 200, now=0.5)  # A is banned
    served = serve(stage, seconds, 9, now=1.0)
    assert set(served) == {A, B, C}, f"after its ban one peer gets everything: {Counter(served)}"


def test_the_first_one_goes_in_front_if_it_may_be_tried() -> None:
    stage = router(A, B, C)
    serve(stage, {A: 0.1, B: 1.0, C: 1.0}, 30)
    for _ in range(5):
        order = stage.candidates(1, now=0.0, first=C)
        assert order[0] == C
        assert sorted(order) == [A, B, C]
    stage.failed(C, now=0.0)
    assert C not in stage.candidates(1, now=0.5, first=C)
    assert stage.candidates(1, now=0.5, first=D)[0] in (A, B), "one that is no member is no candidate"


def test_work_is_reserved_at_the_one_in_front() -> None:
    stage = router(A, B)
    serve(stage, {A: 1.0, B: 1.0}, 20)
    for _ in range(5):
        stage.candidates(1, now=0.0, first=B)
    assert [stage.candidates(1, now=0.0)[0] for _ in range(5)] == [A] * 5


def test_an_alternate_that_served_is_charged_once() -> None:
    """A was asked first and B answered: B's work counts like any other."""
    stage = router(A, B, C)
    serve(stage, {A: 1.0, B: 1.0, C: 1.0}, 30)
    for _ in range(6):
        assert stage.candidates(1, now=0.0, first=A)[0] == A
        stage.observe(B, 1.0, 1, reserved=A)
    assert [stage.candidates(1, now=0.0)[0] for _ in range(6)] == [C] * 6


def test_candidates_are_bounded_and_distinct() -> None:
    keys = [(f"{number:02d}", "0") for number in range(10)]
    stage = router(*keys)
    order = stage.candidates(1, now=0.0, limit=4)
    assert len(set(order)) == len(order) == 4


def test_nobody_left() -> None:
    stage = router(A, B)
    stage.failed(A, now=0.0)
    stage.failed(B, now=0.0)
    stage.failed(B, now=0.0)
    assert stage.candidates(1, now=0.5) == []
    assert router().candidates(1, now=0.0) == []


def test_what_fails_at_once_is_one_failure() -> None:
    """A peer that is not serving yet refuses everything that is under way to it: the ban is that of one failure."""
    stage = router(A)
    for _ in range(8):
        stage.failed(A, now=5.0)
    assert [stage.candidates(1, now=now) for now in (5.9, 6.0)] == [[], [A]]
    stage.failed(A, now=6.0)
    assert [stage.candidates(1, now=now) for now in (7.9, 8.0)] == [[], [A]], "the next attempt failed, too"


def test_who_was_left_out_is_not_given_all_that_it_missed() -> None:
    stage = router(A, B)
    for key in (A, B):
        stage.observe(key, 1.0, 1)
    for _ in range(50):
        assert stage.candidates(1, now=0.0, without={B})[0] == A
    served = Counter(serve(stage, {A: 1.0, B: 1.0}, 20))
    assert served[A] >= 9
