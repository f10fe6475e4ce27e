"""Initial values are a function of (seed, name, shape): the same bits on every machine."""

from __future__ import annotations

import pytest
import torch

from models import initial
from swarm.base.errors import ConfigError

PINNED_NORMAL = [-1.673161268234253, 0.5916908383369446, 0.9616947174072266, 1.7694203853607178]
PINNED_UNIFORM = [0.6272056102752686, 0.01425815001130104]


def test_the_streams_are_pinned() -> None:
    """If this fails, numpy changed its streams: runs started with another numpy have other initial values."""
    assert initial.normal(0, "a.weight", (2, 2), 0.0, 1.0, 0).flatten().tolist() == PINNED_NORMAL
    assert initial.uniform(3, "b", (2,), -1.0, 1.0, 1).tolist() == PINNED_UNIFORM


def test_values_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    once = initial.normal(1, "x", (50, 7), 0.5, 2.0, 0)
    monkeypatch.setattr(initial, "_CHUNK", 16)
    assert torch.equal(initial.normal(1, "x", (50, 7), 0.5, 2.0, 0), once)


def test_name_seed_shape_and_draw_each_change_the_values() -> None:
    base = initial.normal(1, "x", (4, 4), 0.0, 1.0, 0)
    others = [(2, "x", (4, 4), 0), (1, "y", (4, 4), 0), (1, "x", (16,), 0), (1, "x", (4, 4), 1)]
    for seed, name, shape, draw in others:
        assert not torch.equal(initial.normal(seed, name, shape, 0.0, 1.0, draw).flatten(), base.flatten())


def test_torch_random_state_is_neither_read_nor_moved() -> None:
    def fill(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.5)
            torch.nn.init.uniform_(module.bias)

    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        module = torch.nn.Sequential(torch.nn.Linear(3, 200), torch.nn.Linear(200, 3))
        torch.random.set_rng_state(state)
        initial.initialize(module, fill, seed=9)
        assert torch.equal(torch.random.get_rng_state(), state)
        made.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*made)
    assert made[0][:600].std().item() == pytest.approx(0.5, rel=0.15)
    assert 0 <= made[0][600:800].min() < 0.1 < 0.9 < made[0][600:800].max() <= 1


def test_a_parameter_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight: the model's own code gives it no initial value"):
        initial.initialize(torch.nn.Linear(2, 2), lambda module: None, seed=0)


def test_a_distribution_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight: the model's initialisation draws .*: not supported"):
        initial.initialize(torch.nn.Linear(2, 2), lambda module: module.weight.exponential_(), seed=0)
