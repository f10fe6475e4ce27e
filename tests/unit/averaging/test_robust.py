"""CenteredClip: its oracle, its limits, and a whole round with a member that lies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_average_compressors import one_round

from swarm.averaging.compressors.plain import Plain
from swarm.averaging.robust import centered_clip

ORACLE = torch.tensor([[0.0], [0.0], [0.0], [100.0]])


def test_the_oracle() -> None:
    """{0, 0, 0, 100} with radius 1: 1/3, where the mean is 25."""
    assert float(centered_clip(ORACLE, [1.0] * 4, 1.0)) == pytest.approx(1 / 3, abs=1e-5)
    assert float(centered_clip(ORACLE, [1.0] * 4, math.inf)) == 25.0


@pytest.mark.parametrize(("steps", "value"), [(1, 0.25), (2, 0.3125)])
def test_the_first_steps_of_the_oracle(steps: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.averaging.robust._MAX_STEPS", steps)
    assert float(centered_clip(ORACLE, [1.0] * 4, 1.0)) == pytest.approx(value)


@settings(deadline=None, max_examples=50)
@given(num=st.integers(1, 6), width=st.integers(1, 9), seed=st.integers(0, 99), radius=st.sampled_from([0.1, 1.0, 1e6]))
def test_it_equals_the_slow_twin(num: int, width: int, seed: int, radius: float) -> None:
    """Plain loops over members and coordinates."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(num, width, generator=generator, dtype=torch.float64)
    weights = [float(w) for w in torch.rand(num, generator=generator) + 0.1]
    center = [sorted(float(p[k]) for p in points) for k in range(width)]
    v = [(c[(num - 1) // 2] + c[num // 2]) / 2 for c in center]
    for _ in range(100):
        step = [0.0] * width
        for w, p in zip(weights, points, strict=True):
            far = math.dist([float(x) for x in p], v)
            for k in range(width):
                step[k] += w / sum(weights) * (float(p[k]) - v[k]) * (min(1.0, radius / far) if far else 1.0)
        v = [a + b for a, b in zip(v, step, strict=True)]
        if math.hypot(*step) <= 1e-6 * min(1.0, radius):
            break
    assert torch.allclose(centered_clip(points, weights, radius), torch.tensor(v, dtype=torch.float64), atol=1e-9)


def test_a_round_with_a_member_that_lies_stays_near_the_others() -> None:
    """Members with unequal tokens; replicas are identical, and without liars it is near the mean."""
    generator = torch.Generator().manual_seed(1)
    honest = torch.randn(60, generator=generator)
    means = [honest + 0.01 * torch.randn(60, generator=generator) for _ in range(4)]
    tokens = [3, 5, 2, 4]
    flats: list[torch.Tensor | None] = [x * n for x, n in zip(means, tokens, strict=True)]

    def average(given: list[torch.Tensor | None], radius: float | None) -> torch.Tensor:
        members = [Plain(60, clip_radius=radius) for _ in given]
        return one_round(list(members), given, tokens=tokens, chunk_elements=7) / sum(tokens)

    fair = average(flats, 1.0)
    assert torch.allclose(fair, average(flats, None), atol=1e-5)
    lying: list[torch.Tensor | None] = [*flats[:3], torch.full((60,), 1e6)]
    assert float((average(lying, 1.0) - honest).norm()) < 1.5
    assert float((average(lying, None) - honest).norm()) > 1e5
