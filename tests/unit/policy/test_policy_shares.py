"""Rounding of shares to whole elements: Hagenbach-Bischoff, against D'Hondt's method seat by seat."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.policy.shares import bounds, hagenbach_bischoff

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
    spans = bounds(total, [float(w) for w in weights])
    assert len(spans) == len(weights)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == total
    assert [end - start for start, end in spans] == hagenbach_bischoff(total, [float(w) for w in weights])


@pytest.mark.parametrize("weights", [[], [0.0], [0.0, 0.0]])
def test_weights_without_a_sum_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive sum"):
        hagenbach_bischoff(5, weights)
