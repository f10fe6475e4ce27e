"""What a link carries: the best window of a round, averaged over rounds; unknown until something was measured."""

from __future__ import annotations

import pytest

from swarm.policy.bandwidth import ALPHA, LARGE_BYTES, MIN_BYTES, WINDOW_S, Meter


def transfer(meter: Meter, begin: float, *, rate: float, seconds: float, piece_s: float = 0.05) -> float:
    """One transfer at `rate` bytes per second; returns its end."""
    meter.opened(begin)
    for k in range(1, round(seconds / piece_s) + 1):
        meter.moved(begin + k * piece_s, round(rate * piece_s))
    meter.closed(begin + seconds)
    return begin + seconds


def test_unknown_until_a_round_was_measured() -> None:
    meter = Meter()
    assert meter.rate is None
    transfer(meter, 0.0, rate=1e7, seconds=1.0)
    assert meter.rate is None
    meter.end_round()
    assert meter.rate == pytest.approx(1e7)


def test_a_round_without_a_large_transfer_says_nothing() -> None:
    meter = Meter()
    transfer(meter, 0.0, rate=MIN_BYTES / 2, seconds=1.0)
    meter.end_round()
    assert meter.rate is None
    transfer(meter, 5.0, rate=1e7, seconds=1.0)
    meter.end_round()
    meter.end_round()  # nothing moved: nothing new
    assert meter.rate == pytest.approx(1e7)


def test_waiting_for_a_slow_peer_is_no_slowness() -> None:
    """A fast peer's link shows what it carries at first; the rest of the round it waits for others."""
    meter = Meter()
    end = transfer(meter, 0.0, rate=2e7, seconds=0.5)
    transfer(meter, end, rate=2e6, seconds=10.0)
    meter.end_round()
    assert meter.rate == pytest.approx(2e7)


def test_transfers_at_once_add_up() -> None:
    meter = Meter()
    meter.opened(0.0)
    meter.opened(0.0)
    for k in range(1, 101):
        meter.moved(k * 0.01 - 0.005, 10**5)
        meter.moved(k * 0.01, 10**5)
    meter.closed(1.0)
    meter.closed(1.0)
    meter.end_round()
    assert meter.rate == pytest.approx(2e7, rel=0.05)


def test_idle_time_does_not_count() -> None:
    meter = Meter()
    for k in range(10):
        transfer(meter, 10.0 * k, rate=2e7, seconds=0.2)
    meter.end_round()
    assert meter.rate == pytest.approx(2e7)


def test_a_burst_out_of_a_buffer_says_nothing_unless_it_is_large() -> None:
    meter = Meter()
    meter.opened(0.0)
    meter.moved(0.001, LARGE_BYTES // 2)
    meter.closed(0.001)
    meter.end_round()
    assert meter.rate is None
    meter.opened(1.0)
    meter.moved(1.016, LARGE_BYTES)
    meter.closed(1.016)
    meter.end_round()
    assert meter.rate == pytest.approx(LARGE_BYTES / 0.016)


def test_bytes_in_a_sockets_buffer_have_not_left() -> None:
    backlog = 0
    meter = Meter(lambda: backlog)
    meter.opened(0.0)
    backlog = 3_000_000
    meter.moved(WINDOW_S, 6_000_000)  # 3 MB of them arrived
    meter.moved(2 * WINDOW_S, 3_000_000)
    meter.closed(2 * WINDOW_S)
    meter.end_round()
    assert meter.rate == pytest.approx(3_000_000 / WINDOW_S)


def test_rounds_are_averaged_so_that_drift_shows() -> None:
    meter = Meter()
    transfer(meter, 0.0, rate=1e7, seconds=1.0)
    meter.end_round()
    transfer(meter, 2.0, rate=5e6, seconds=1.0)
    meter.end_round()
    assert meter.rate == pytest.approx((1 - ALPHA) * 1e7 + ALPHA * 5e6)
