"""What a link carries: the best window of a round, averaged over rounds; unknown until something was measured."""

from __future__ import annotations

import math

import pytest

from swarm.policy.bandwidth import (
    ALPHA,
    FORGOTTEN_S,
    GROWTH,
    LARGE_BYTES,
    MAX_WINDOWS,
    MIN_BYTES,
    MIN_WINDOW_S,
    WINDOW_S,
    Meter,
    Reach,
)


def run_round(meter: Meter, *phases: tuple[float, float], begin: float = 0.0, total: int = 0) -> None:
    """A round of phases `(seconds, bytes per second)`, sampled twice in each window."""
    now = begin
    meter.begin_round(now, total)
    for seconds, rate in phases:
        steps = max(1, round(seconds / (WINDOW_S / 2)))
        for _ in range(steps):
            now += seconds / steps
            total += round(rate * seconds / steps)
            meter.sample(now, total)
    meter.end_round(now, total)


def test_unknown_until_a_round_was_measured() -> None:
    meter = Meter()
    assert meter.rate is None
    run_round(meter, (1.0, 1e7))
    assert meter.rate == pytest.approx(1e7)


def test_a_small_round_says_nothing() -> None:
    meter = Meter()
    run_round(meter, (1.0, MIN_BYTES / 2))
    assert meter.rate is None
    run_round(meter, (1.0, 1e7))
    run_round(meter, (1.0, 0.0))  # nothing moved: nothing new
    assert meter.rate == pytest.approx(1e7)


def test_waiting_for_a_slow_peer_is_no_slowness() -> None:
    """A fast peer's link shows what it carries at first; the rest of the round it waits for others."""
    meter = Meter()
    run_round(meter, (0.5, 2e7), (10.0, 2e6))
    assert meter.rate == pytest.approx(2e7)


def test_a_slow_link_is_measured_over_longer_windows() -> None:
    meter = Meter()
    run_round(meter, (50.0, 3e4))
    assert meter.rate == pytest.approx(3e4, rel=0.01)


def test_a_buffer_that_lets_some_through_at_once_makes_no_line_fast() -> None:
    rate, burst_s = 6e6, 2 * WINDOW_S
    round_ = ((burst_s, 1.6 * rate), (burst_s, 0.4 * rate), (burst_s, rate)) * 10
    meter = Meter()
    run_round(meter, *round_)
    assert rate <= meter.rate <= 1.31 * rate
    run_round(meter, (0.5, rate), *round_, (0.5, rate))
    assert meter.rate <= 1.31 * rate


def test_of_a_round_without_end_the_newest_windows_are_kept() -> None:
    meter = Meter()
    run_round(meter, (10.0, 1e8), (2 * WINDOW_S * MAX_WINDOWS, 1e7))
    assert meter.rate == pytest.approx(1e7)


def test_a_short_round_counts_if_it_was_long_enough_to_mean_something_or_large() -> None:
    meter = Meter()
    run_round(meter, (MIN_WINDOW_S / 2, LARGE_BYTES / MIN_WINDOW_S))
    assert meter.rate is None, "a burst out of a buffer"
    run_round(meter, (MIN_WINDOW_S, 1e8))
    assert meter.rate == pytest.approx(1e8)
    meter = Meter()
    run_round(meter, (MIN_WINDOW_S / 2, 2.5 * LARGE_BYTES / MIN_WINDOW_S))
    assert meter.rate == pytest.approx(2.5 * LARGE_BYTES / MIN_WINDOW_S)


def test_bytes_between_rounds_do_not_count() -> None:
    meter = Meter()
    run_round(meter, (1.0, 1e7), begin=100.0, total=10**12)
    assert meter.rate == pytest.approx(1e7)


def test_rounds_are_averaged_so_that_drift_shows() -> None:
    meter = Meter()
    run_round(meter, (1.0, 1e7))
    run_round(meter, (1.0, 5e6), begin=2.0)
    assert meter.rate == pytest.approx((1 - ALPHA) * 1e7 + ALPHA * 5e6)


# ---------------------------------------------------------------------------------------------------- what may be more


class Helper:
    """An auxiliary with a line of `capacity` that is asked to carry what it tells, as members could send `most`."""

    def __init__(self, capacity: float, most: float = math.inf) -> None:
        self.meter, self.fast, self.reach = Meter(), Meter(), Reach()
        self.capacity, self.most = capacity, most
        self.now = 0.0

    def round(self, otherwise: float = 1e7) -> float | None:
        """What it tells of its line; `otherwise` is what it is asked for if it tells nothing."""
        told = self.reach.tell(self.now)
        carried = min(told or otherwise, self.capacity, self.most)
        run_round(self.meter, (2.0, carried), begin=self.now)
        run_round(self.fast, (0.5, 4 * carried), begin=self.now)  # the other direction carries as much, and is faster
        self.now += 10.0
        self.reach.heard(self.meter, self.fast, self.now)
        return told


def test_an_auxiliary_tells_more_until_it_was_too_much() -> None:
    helper = Helper(capacity=3e7)
    told = [helper.round() for _ in range(7)]
    assert told[:4] == [None, *(pytest.approx(1e7 * GROWTH**k) for k in (1, 2, 3))]
    assert 2.5e7 < told[5] <= told[6] <= 3.0e7, f"it is told what was measured: {told}"  # type: ignore[operator]
    assert helper.reach.is_limit(helper.now)


def test_an_auxiliary_that_nobody_could_ask_more_of_stays_where_it_is() -> None:
    helper = Helper(capacity=1e9, most=4e7)
    told = [helper.round() for _ in range(20)]
    assert told[-1] is not None
    assert 4e7 * 0.9 < told[-1] <= 4e7 * GROWTH


def test_what_was_learnt_is_forgotten() -> None:
    helper = Helper(capacity=3e7)
    for _ in range(8):
        helper.round()
    helper.now += FORGOTTEN_S + 1.0
    assert not helper.reach.is_limit(helper.now)
    assert helper.reach.tell(helper.now) is None


def test_what_shows_nothing_is_not_tried_again_and_again() -> None:
    helper = Helper(capacity=3e7)
    assert not helper.reach.is_limit(0.0)
    helper.meter.begin_round(0.0, 0)
    helper.meter.end_round(0.01, 100)
    helper.reach.heard(helper.meter, Meter(), 0.01)
    assert helper.reach.tell(1.0) is None
    assert helper.reach.is_limit(1.0)
    assert not helper.reach.is_limit(1.0 + FORGOTTEN_S)
