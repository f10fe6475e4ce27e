"""Versions are kept as long as tickets may use them; the memory budget keeps its bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.ids import ZERO_BALLOT
from swarm.stage.layout import Layout
from swarm.stage.memory_budget import MemoryBudget
from swarm.stage.moments import OptimizerState
from swarm.stage.versions import StageState, Version, VersionStore, make_version
from swarm.wire.messages import CommitRecord

torch.set_num_threads(1)

LAYOUT = Layout.of(torch.nn.Linear(3, 2))


def version(step: int, dtype: torch.dtype = torch.float32) -> Version:
    record = CommitRecord(run="1" * 64, step=step, version_id=f"{step + 1:064x}", ballot=ZERO_BALLOT, members=((),))
    return make_version(record, LAYOUT, torch.full((8,), float(step)), dtype)


def state(step: int) -> OptimizerState:
    return OptimizerState({"first": torch.full((8,), float(step)), "second": torch.zeros(8)}, step)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_exactly_the_newest_versions_are_kept(keep: int) -> None:
    store = VersionStore(version(-1), state(0), keep=keep)
    for step in range(5):
        store.add(version(step), state(step))
        assert store.newest.num_commits == step + 1
        assert store.optimizer.num_updates == step
        kept = [n for n in range(step + 2) if store.at(n) is not None]
        assert kept == list(range(step + 2))[-keep:]
        for n in range(step + 2):
            found = store.get(f"{n:064x}")
            assert (found is not None) is (n in kept)
            assert found is None or found is store.at(n)


def test_a_downloaded_version_replaces_all() -> None:
    store = VersionStore(version(-1), state(0), keep=2)
    store.add(version(0), state(1))
    store.replace(StageState(version(7), state(8)))
    assert store.newest.num_commits == 8
    assert store.at(1) is None
    assert store.optimizer.num_updates == 8


@pytest.mark.parametrize(("keep", "previous"), [(1, None), (2, 1)])
def test_a_state_is_all_that_the_next_step_needs(keep: int, previous: int | None) -> None:
    store = VersionStore(version(-1), state(0), keep=keep)
    assert store.state().previous is None, "before the initial values there was nothing"
    store.add(version(0), state(1))
    store.add(version(1), state(2))
    taken = store.state()
    assert taken.version is store.newest
    assert taken.optimizer is store.optimizer
    assert (taken.previous.num_commits if taken.previous else None) == previous
    other = VersionStore(version(-1), state(0), keep=keep)
    other.replace(taken)
    assert other.newest is taken.version
    assert other.at(1) is taken.previous
    other.add(version(2), state(3))
    assert other.newest.num_commits == 3
    assert (other.at(2) is not None) is (keep == 2)


def test_the_compute_copy_is_leaves_in_the_layouts_order() -> None:
    made = version(3, torch.bfloat16)
    assert tuple(made.parameters) == LAYOUT.names
    for parameter, shape in zip(made.parameters.values(), LAYOUT.shapes, strict=True):
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert (parameter.dtype, parameter.shape) == (torch.bfloat16, shape)
        assert parameter.eq(3.0).all()
    assert made.masters.dtype == torch.float32
    assert not made.masters.requires_grad


@pytest.mark.parametrize(("dtype", "shared"), [(torch.float32, True), (torch.bfloat16, False)])
def test_masters_are_shared_only_where_the_dtype_is_theirs(dtype: torch.dtype, shared: bool) -> None:
    made = version(3, dtype)
    storages = {p.untyped_storage().data_ptr() for p in made.parameters.values()}
    assert (storages == {made.masters.untyped_storage().data_ptr()}) is shared


@given(st.lists(st.integers(0, 60), max_size=30), st.randoms(use_true_random=False))
def test_the_memory_budget_is_never_exceeded(sizes: list[int], rng) -> None:
    budget, held = MemoryBudget(100), []
    for size in sizes:
        fits = sum(held) + size <= 100
        assert budget.reserve(size) is fits
        if fits:
            held.append(size)
        if held and rng.random() < 0.4:
            budget.release(held.pop(rng.randrange(len(held))))
        assert 0 <= budget.used_bytes == sum(held) <= budget.limit_bytes


def test_more_cannot_be_released_than_was_reserved() -> None:
    budget = MemoryBudget(10)
    assert budget.reserve(4)
    with pytest.raises(AssertionError, match="more memory released than reserved"):
        budget.release(5)
