"""Groups of groups: everyone ends on the exact sum, in groups no larger than allowed."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_averaging_round import averages, plain_sum

from swarm.averaging.grid import grid_of, groups_of, num_levels

NUM_SHUFFLES = 10_000


def test_the_oracle_of_moshpit_sgd() -> None:
    """A 3 x 3 grid of 0..8: all 4.0 after two rounds."""
    assert grid_of(9, 3) == (3, 3)
    values = [float(i) for i in range(9)]
    levels = [list(groups_of(9, me, 3)) for me in range(9)]
    for turn in range(2):
        values = [sum(values[i] for i in levels[me][turn][1]) / 3 for me in range(9)]
    assert values == [4.0] * 9
    assert all(len(turns) == 2 for turns in levels)


def test_the_oracle_of_random_groups() -> None:
    """One level leaves (r - 1) / (N - 1) of the variance if who stands where is random: 0.2 of 16 in 4 groups. Two, none."""
    rng, left = random.Random(0), [0.0, 0.0]
    levels = [list(groups_of(16, me, 4)) for me in range(16)]
    for _ in range(NUM_SHUFFLES):
        values = [float(i) for i in range(16)]
        rng.shuffle(values)
        before = statistics.pvariance(values)
        for turn in range(2):
            values = [sum(values[i] for i in levels[me][turn][1]) / 4 for me in range(16)]
            left[turn] += statistics.pvariance(values) / before / NUM_SHUFFLES
    assert left == [pytest.approx(0.2, rel=0.03), 0.0]


@pytest.mark.parametrize(
    ("num", "max_group", "sides"),
    [(7, 16, (7,)), (16, 16, (16,)), (17, 16, (4, 4)), (100, 16, (10, 10)), (1000, 16, (10, 10, 10)), (5, 2, (2, 2))],
)
def test_the_grid_is_the_largest_with_the_fewest_levels(num: int, max_group: int, sides: tuple[int, ...]) -> None:
    assert grid_of(num, max_group) == sides


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 1 sums nothing"):
        grid_of(4, 1)


@settings(deadline=None, max_examples=80)
@given(num=st.integers(1, 90), max_group=st.integers(2, 9))
def test_every_contribution_is_added_once_and_groups_agree(num: int, max_group: int) -> None:
    sides = grid_of(num, max_group)
    assert num / 3 < math.prod(sides) <= num, "a member on the grid has two guests at most"
    held = [{me: 1} for me in range(num)]
    for level in range(num_levels(num, max_group)):
        turns = {me: turn for me in range(num) for turn in groups_of(num, me, max_group) if turn[0] == level}
        before = held
        held = [dict(x) for x in before]
        for me, (_, group, _) in turns.items():
            assert me in group
            assert list(group) == sorted(group)
            assert len(group) <= max(max_group, 3)
            assert all(turns[other][1] == group for other in group), "all of a group know the same group"
            held[me] = {}
            for other in group:
                if turns[other][2]:
                    for source, count in before[other].items():
                        held[me][source] = held[me].get(source, 0) + count
    assert all(x == {me: 1 for me in range(num)} for x in held)


@settings(deadline=None, max_examples=25)
@given(
    num=st.integers(3, 11),
    max_group=st.integers(2, 4),
    num_elements=st.integers(1, 50),
    seed=st.integers(0, 99),
    codec=st.sampled_from(["raw", "scaled16", "int8"]),
)
def test_replicas_are_identical_and_hold_the_sum(num: int, max_group: int, num_elements: int, seed: int, codec: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    contributions: list[torch.Tensor | None] = [torch.randn(num_elements, generator=generator) for _ in range(num)]
    contributions[seed % num] = None
    results = averages(contributions, num_elements, seed=seed, codec=codec, max_group=max_group)
    assert len({result.digest for result in results}) == 1, "replicas_identical"
    expected = plain_sum(contributions, num_elements, torch.float32)
    bound = {"raw": 1e-5, "scaled16": 2e-3, "int8": 0.1}[codec]
    assert float((results[0].flat - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max())) * num
