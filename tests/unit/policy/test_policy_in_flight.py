"""The number of micro-batches in flight finds the knee of the throughput curve and stays there."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.policy.in_flight import InFlightControl

LATENCY_S = 2.0


def simulate(control: InFlightControl, *, knee: int, num: int, jitter: float = 0.0, start: float = 0.0) -> list[int]:
    """Micro-batches come back at rate `min(limit, knee) / latency`; returns the limit after each."""
    rng = random.Random(1)
    now = start
    limits = []
    for _ in range(num):
        now += LATENCY_S / min(control.limit, knee) * rng.uniform(1 - jitter, 1 + jitter)
        limits.append(control.completed(now))
    return limits


@pytest.mark.parametrize("first", [1, 4, 200])
@pytest.mark.parametrize("knee", [5, 16, 40])
def test_the_knee_is_found_and_kept(first: int, knee: int) -> None:
    limits = simulate(InFlightControl(limit=first), knee=knee, num=20_000)[-4000:]
    assert min(limits) >= 0.6 * knee, "throughput is given away"
    assert max(limits) <= 1.6 * knee + 2, "micro-batches queue for nothing"


def test_noise_does_not_make_it_run_away() -> None:
    limits = simulate(InFlightControl(limit=4), knee=12, num=50_000, jitter=0.3)[-30_000:]
    assert max(limits) <= 40
    assert sum(limits) / len(limits) == pytest.approx(12, abs=8)


def test_it_follows_a_swarm_that_grows_and_shrinks() -> None:
    control = InFlightControl(limit=4)
    simulate(control, knee=8, num=5000)
    grown = simulate(control, knee=32, num=20_000, start=1e5)[-2000:]
    assert min(grown) >= 18
    shrunk = simulate(control, knee=8, num=20_000, start=1e6)[-2000:]
    assert max(shrunk) <= 16


@pytest.mark.parametrize("lowest", [1, 3])
def test_it_grows_again_from_the_lowest(lowest: int) -> None:
    control = InFlightControl(limit=6, lowest=lowest)
    assert simulate(control, knee=1, num=5000)[-1] <= lowest + 1
    assert min(simulate(control, knee=32, num=20_000, start=1e6)[-2000:]) >= 18


def test_the_bounds_hold() -> None:
    assert max(simulate(InFlightControl(limit=4, highest=10), knee=1000, num=5000)) == 10
    low = simulate(InFlightControl(limit=6, lowest=3), knee=1, num=5000)
    assert min(low) == 3


def test_nothing_changes_before_a_window_is_full() -> None:
    control = InFlightControl(limit=4)
    assert set(simulate(control, knee=100, num=32)) == {4}
    assert control.completed(1e6) != 4


def test_a_burst_at_one_instant_is_no_infinite_rate() -> None:
    control = InFlightControl(limit=4)
    assert [control.completed(5.0) for _ in range(200)] == [4] * 200


def test_every_change_has_a_reason() -> None:
    control = InFlightControl(limit=4)
    now, before, reasons = 0.0, 4, set()
    for _ in range(5000):
        now += LATENCY_S / min(control.limit, 12)
        after = control.completed(now)
        if after != before:
            reasons.add(control.reason.rsplit(" ", 1)[-1])
        before = after
    assert {"window", "on", "back"} <= reasons


def test_small_losses_do_not_add_up() -> None:
    """On a soft knee each step down costs less than the noise; all of them together would cost a fifth."""
    control = InFlightControl(limit=12)
    now, limits = 0.0, []
    for _ in range(20_000):
        now += (1 + 4 / control.limit**1.5) / 30
        limits.append(control.completed(now))
    assert min(1 / (1 + 4 / limit**1.5) for limit in limits[-10_000:]) > 0.88


def test_time_in_which_the_limit_did_not_bind_is_not_counted() -> None:
    """Between steps a trainer may have nothing to do: that says nothing about the limit."""
    control = InFlightControl(limit=4)
    now = 0.0
    for number in range(20_000):
        pause = 50.0 if number % 16 == 0 else 0.0
        now += LATENCY_S / min(control.limit, 12) + pause
        control.completed(now, in_flight=1 if pause else control.limit)
    assert 9 <= control.limit <= 20


def test_the_knee_costs_little_to_keep() -> None:
    control = InFlightControl(limit=6)
    simulate(control, knee=12, num=5000)
    limits = simulate(control, knee=12, num=20_000, start=1e6)
    assert sum(min(limit, 12) for limit in limits) / len(limits) >= 0.99 * 12


def test_a_long_latency_is_filled_within_a_few_windows() -> None:
    """From 6 to 160 in flight: with equal steps of an eighth that would take 28 windows."""
    control = InFlightControl(limit=6)
    limits = simulate(control, knee=160, num=3000)
    windows = [limit for before, limit in itertools.pairwise(limits) if limit != before]
    assert max(windows[:14]) >= 140
