"""What may come in as a micro-batch, and how a module shows that it advances."""

from __future__ import annotations

import pytest
import torch

from swarm.stage.module import is_too_large, tick_with

DECLARED = {"router_counts": (8,), "hidden_states": (4, 2, 16, 32)}


@pytest.mark.parametrize(
    ("name", "shape", "is_floating", "expected"),
    [
        ("input_ids", (2, 16), False, False),
        ("input_ids", (1, 7), False, False),
        ("input_ids", (3, 16), False, True),
        ("input_ids", (2, 17), False, True),
        ("labels", (2,), False, False),
        ("labels", (3,), False, True),
        ("features", (2, 999), True, False),
        ("x", (2, 16, 999), True, False),
        ("x", (2, 17, 4), True, True),
        ("other", (8,), False, True),
        ("scalar", (), True, False),
        ("router_counts", (8,), False, False),
        ("router_counts", (9,), False, True),
        ("router_counts", (8, 1), False, True),
        ("hidden_states", (4, 2, 16, 32), True, False),
        ("hidden_states", (4, 1, 9, 32), True, False),
        ("hidden_states", (5, 2, 16, 32), True, True),
        ("hidden_states", (4, 3, 16, 32), True, True),
        ("hidden_states", (4, 2, 16, 33), True, True),
    ],
)
def test_no_input_is_larger_than_in_a_micro_batch(name, shape, is_floating, expected) -> None:
    assert is_too_large(name, shape, DECLARED, is_floating=is_floating, num_samples=2, sequence_length=16) is expected


class InPlace(torch.nn.Module):
    """Its output is changed in place by what comes after: hooks of the module's own would forbid that."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> object:
        made = x * self.weight
        return {"tensor": made, "tuple": (None, made), "dict": {"first": made}}[self.returns]


@pytest.mark.parametrize("returns", ["tensor", "tuple", "dict"])
def test_a_module_ticks_on_the_way_forward_and_on_the_way_back(returns: str) -> None:
    module, ticks = InPlace(returns), []
    tick_with(module, lambda: ticks.append("tick"))
    made = module(torch.ones(3))
    out = {"tensor": lambda: made, "tuple": lambda: made[1], "dict": lambda: made["first"]}[returns]()
    out += 1.0
    assert len(ticks) == 1
    out.sum().backward()
    assert len(ticks) == 2
    assert torch.equal(module.weight.grad, torch.ones(3))
    with torch.no_grad():
        module(torch.ones(3))
    assert len(ticks) == 3, "there is no way back"
