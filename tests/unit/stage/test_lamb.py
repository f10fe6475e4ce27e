"""LAMB on flat tensors equals the paper's algorithm on whole tensors, to the same bits wherever it runs."""

from __future__ import annotations

import math

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.stage.layout import Layout
from swarm.stage.optimizers.choice import optimizer_of
from swarm.stage.optimizers.lamb import squares_of
from swarm.testing.simulation.reference_lamb import ReferenceLamb

torch.set_num_threads(1)

CONFIG = RunConfig(optimizer="lamb", weight_decay=0.1, no_decay=("biases",))


class Net(torch.nn.Module):
    """Tensors shorter and longer than what is summed at a time, a 0-d one, an empty one and one of zeros."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in {"wide": (300, 301), "bias": (301,), "scale": (), "nothing": (0, 3), "small": (5, 7)}.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
            self.register_parameter(name, torch.nn.Parameter((values * (name != "bias")).to(dtype)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_equals_the_reference_over_20_steps(dtype: torch.dtype, tolerance: float) -> None:
    net = Net(dtype)
    layout = Layout.of(net)
    optimizer = optimizer_of(CONFIG, layout, dtype=dtype, device="cpu")
    masters, state = layout.flatten(net.parameters(), dtype=dtype, device="cpu"), optimizer.moments.zero()
    groups = [
        {"params": [p for name, p in net.named_parameters() if (name == "bias") == is_bias], "weight_decay": decay}
        for is_bias, decay in ((False, 0.1), (True, 0.0))
    ]
    reference = ReferenceLamb(groups, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.epsilon)
    generator = torch.Generator().manual_seed(4)
    for step in range(20):
        gradient = torch.randn(layout.num_elements, generator=generator, dtype=torch.float64).to(dtype) * 10.0 ** (step % 5 - 3)
        rate = 0.01 * (1 + step % 3)
        for parameter, part in zip(net.parameters(), layout.views(gradient), strict=True):
            parameter.grad = part * 0.37
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        before = masters.clone()
        after, state = optimizer.update(masters, gradient, state, step=step, learning_rate=rate, factor=0.37)
        assert torch.equal(masters, before), "the older version changed"
        masters = after
        for name, mine in layout.named(masters).items():
            theirs = net.get_parameter(name).detach()
            assert float((mine - theirs).norm()) <= tolerance * float(theirs.norm()), f"{name} at step {step}"


def test_a_step_is_as_long_as_its_tensor() -> None:
    net = Net(torch.float64)
    layout = Layout.of(net)
    optimizer = optimizer_of(CONFIG, layout, dtype=torch.float64, device="cpu")
    masters = layout.flatten(net.parameters(), dtype=torch.float64, device="cpu")
    gradient = torch.randn(layout.num_elements, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 1e3
    after, _ = optimizer.update(masters, gradient, optimizer.moments.zero(), step=0, learning_rate=0.25)
    for name in ("wide", "small"):
        before, now = (layout.named(flat)[name] for flat in (masters, after))
        assert float((now - before).norm()) == pytest.approx(0.25 * float(before.norm()), rel=1e-12)
    zeros = layout.named(after)["bias"]
    assert float(zeros.norm()) == pytest.approx(0.25 * math.sqrt(301), rel=1e-6), "a tensor of zeros takes Adam's step"


@pytest.mark.parametrize("num_elements", [0, 1, 2, 3, 1000, 2**16, 2**16 + 1, 3 * 2**16 + 17])
def test_replicas_identical_a_norm_does_not_depend_on_where_its_tensor_lies(num_elements: int) -> None:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    shifted = torch.empty(num_elements + 3)[3:].copy_(values)
    before = values.clone()
    assert torch.equal(squares_of(values), squares_of(shifted))
    assert torch.equal(values, before)
    assert float(squares_of(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-13)
    slow = fold([float(value) ** 2 for value in values.double()]) if num_elements <= 2**16 else float(squares_of(values))
    assert float(squares_of(values)) == slow, "the order of the additions is part of what replicas agree on"


def fold(values: list[float]) -> float:
    """The slow twin: halves, added."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [value + (values[half + i] if half + i < len(values) else 0.0) for i, value in enumerate(values[:half])]
    return values[0] if values else 0.0
