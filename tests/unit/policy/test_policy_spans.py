"""Spans of layers: the slowest stage is as fast as can be, the largest as small; compared with trying every cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.policy.spans import LayerLoad, Loads, cut, fewest_stages

loads_strategy = st.builds(LayerLoad, st.integers(0, 9).map(float), st.integers(0, 9))
models = st.builds(Loads, st.lists(loads_strategy, min_size=1, max_size=7).map(tuple), loads_strategy, loads_strategy)


def all_cuts(num_layers: int, num_stages: int) -> list[list[range]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    edges = [(0, *at, num_layers) for at in inner]
    return [[range(a, b) for a, b in pairwise(edge)] for edge in edges]


def quality(loads: Loads, spans: list[range]) -> tuple[float, int, float]:
    parts = [loads.of(span) for span in spans]
    return max(p.work for p in parts), max(p.num_bytes for p in parts), sum(p.work**2 for p in parts)


@given(models, st.integers(1, 4))
def test_no_cut_is_better(loads: Loads, num_stages: int) -> None:
    num_stages = min(num_stages, len(loads.layers))
    found, reason = cut(loads, num_stages)
    every = all_cuts(len(loads.layers), num_stages)
    assert found in every
    assert quality(loads, found) == min(quality(loads, spans) for spans in every)
    assert "times the mean's work" in reason


@given(models, st.integers(0, 40))
def test_fewest_stages_are_the_fewest(loads: Loads, max_bytes: int) -> None:
    number, reason = fewest_stages(loads, max_bytes)
    fits = [n for n in range(1, len(loads.layers) + 1) if all(loads.of(span).num_bytes <= max_bytes for span in cut(loads, n)[0])]
    assert number == (fits[0] if fits else None)
    assert reason


def test_a_large_version_leaves_its_stage_fewer_layers() -> None:
    """Llama-3-8B: the head is worth 2.4 layers."""
    layer, version_id = LayerLoad(2 * 218e6, 218_000_000), LayerLoad(2 * 525e6, 525_000_000)
    found, reason = cut(Loads((layer,) * 32, LayerLoad(0.0, 525_000_000), version_id), 4)
    assert [len(span) for span in found] == [8, 9, 9, 6]
    assert reason == "the slowest stage has 1.05 times the mean's work"


def test_equal_layers_are_spread_evenly() -> None:
    spans, _ = cut(Loads((LayerLoad(1.0, 1),) * 8, LayerLoad(0.0, 0), LayerLoad(0.1, 0)), 3)
    assert spans == [range(3), range(3, 6), range(6, 8)]


def test_a_layer_that_fits_nowhere_is_named() -> None:
    number, reason = fewest_stages(
        Loads((LayerLoad(1.0, 5), LayerLoad(1.0, 9), LayerLoad(1.0, 5)), LayerLoad(0.0, 1), LayerLoad(0.0, 1)), 8
    )
    assert (number, reason) == (None, "layer 1 alone takes 9 bytes")


@pytest.mark.parametrize("num_stages", [0, 4])
def test_impossible_numbers_of_stages_raise(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"{num_stages} stages of 3 layers"):
        cut(Loads((LayerLoad(1.0, 1),) * 3, LayerLoad(0.0, 0), LayerLoad(0.0, 0)), num_stages)


def test_a_deep_model_is_cut_at_once() -> None:
    """128 layers into 64 stages: a polynomial search, not one over all cuts."""
    spans, _ = cut(Loads(tuple(LayerLoad(float(n % 7 + 1), n) for n in range(128)), LayerLoad(3.0, 3), LayerLoad(9.0, 9)), 64)
    assert len(spans) == 64
