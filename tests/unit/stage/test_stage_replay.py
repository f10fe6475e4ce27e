"""Where two computations of a ticket part is found in the order in which a micro-batch computes."""

from __future__ import annotations

import copy

import pytest

from swarm.stage.replay import Parting, agree, first_parting

NORMS = [
    {"output": 3.0, "parameters": 5.0},
    {"output": 4.0, "parameters": 6.0, "gradient": 0.5},
    {"parameters": 7.0, "gradient": 0.25},
]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([], None),
        ([(0, "output"), (1, "output")], Parting(0, "output")),
        ([(1, "output"), (2, "parameters"), (0, "parameters")], Parting(1, "output")),
        ([(2, "gradient"), (1, "parameters"), (1, "gradient"), (0, "parameters")], Parting(2, "gradient")),
        ([(1, "gradient"), (0, "parameters")], Parting(1, "gradient")),
        ([(0, "parameters")], Parting(0, "parameters")),
    ],
)
def test_the_first_that_differs_is_found(changes: list[tuple[int, str]], found: Parting | None) -> None:
    here = copy.deepcopy(NORMS)
    for stage, name in changes:
        here[stage][name] *= 1.1
    assert first_parting(NORMS, here, (2.0, 2.0), tolerance=0.01) == found


def test_the_loss_comes_after_all_outputs_and_before_all_gradients() -> None:
    here = copy.deepcopy(NORMS)
    here[2]["parameters"] = 9.0
    assert first_parting(NORMS, here, (2.0, 2.1), tolerance=0.01) == Parting(2, "loss")


def test_what_one_side_has_not_is_a_difference() -> None:
    assert agree(None, None, tolerance=0.1)
    assert not agree(None, 0.0, tolerance=0.1)
    assert agree(0.0, 0.0, tolerance=0.1)
    assert not agree(1.0, float("nan"), tolerance=0.1)
