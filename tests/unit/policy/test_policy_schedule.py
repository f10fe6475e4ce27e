"""The learning rate is a pure function of the step."""

from __future__ import annotations

import itertools

import pytest

from swarm.base.config import RunConfig
from swarm.policy.schedule import learning_rate


def config(**changes: object) -> RunConfig:
    values: dict[str, object] = {"learning_rate": 2.0, "warmup_steps": 4, "total_steps": 24, "min_lr_ratio": 0.1}
    return RunConfig(**{**values, **changes})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    rates = [learning_rate(config(lr_schedule=schedule), step) for step in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(config(warmup_steps=0), 0) == 2.0


@pytest.mark.parametrize(("schedule", "middle", "end"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)])
def test_the_decay_ends_at_the_minimum_and_stays_there(schedule: str, middle: float, end: float) -> None:
    run = config(lr_schedule=schedule)
    assert learning_rate(run, 14) == pytest.approx(middle)
    assert learning_rate(run, 24) == pytest.approx(end)
    assert learning_rate(run, 10_000) == pytest.approx(end)


def test_a_quarter_of_the_cosine() -> None:
    quarter = 0.1 + 0.9 * 0.5 * (1 + 2**-0.5)
    assert learning_rate(config(), 9) == pytest.approx(2.0 * quarter)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_falls_after_the_warm_up_and_is_never_negative(schedule: str) -> None:
    run = config(lr_schedule=schedule, min_lr_ratio=0.0)
    rates = [learning_rate(run, step) for step in range(3, 30)]
    assert all(after <= before for before, after in itertools.pairwise(rates))
    assert rates[-1] == pytest.approx(0.0, abs=1e-15)
    assert min(rates) >= 0.0


def test_a_warm_up_as_long_as_the_run_never_divides_by_zero() -> None:
    run = config(warmup_steps=24)
    assert learning_rate(run, 23) == pytest.approx(2.0)
    assert learning_rate(run, 24) > 0.0
