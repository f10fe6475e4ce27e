"""Compressors with error feedback: oracles, slow twins, and the sum that no round may change."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_averaging_round import ATTEMPT, exchange_of, seals

from swarm.averaging.all_reduce import Round, StageSum
from swarm.averaging.compressors.fragments import Fragments
from swarm.averaging.compressors.interface import Compressor, Contribution
from swarm.averaging.compressors.powersgd import PowerSgd, _Matrix
from swarm.averaging.reduction import Code
from swarm.stage.layout import Layout
from swarm.testing.virtual_time import run_virtual


def one_round(
    compressors: list[Compressor],
    flats: list[torch.Tensor | None],
    *,
    step: int = 0,
    tokens: list[int] | None = None,
    chunk_elements: int | None = None,
    adopt: bool = True,
) -> torch.Tensor:
    """The committed average of one round, the same bits at every member; each adopts what it kept back."""
    counted = tuple(n if flat is not None else 0 for n, flat in zip(tokens or [1] * len(flats), flats, strict=True))

    async def main() -> list[StageSum]:
        names = seals(len(flats))
        rounds = [
            Round(
                ATTEMPT,
                names,
                names[i].member.key,
                compressors[i].compress(Contribution(flat, counted, i, step)),
                dtype=torch.float32,
                chunk_elements=chunk_elements,
            )
            for i, flat in enumerate(flats)
        ]
        rng = random.Random(step)
        return list(await asyncio.gather(*(r.run(exchange_of(rounds, i, rng=rng)) for i, r in enumerate(rounds))))

    results = run_virtual(main())
    assert len({result.digest for result in results}) == 1, "replicas_identical"
    if adopt:
        for compressor, result in zip(compressors, results, strict=True):
            compressor.adopt(result.state)
    return results[0].flat


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    module = torch.nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape)))
    return Layout.of(module)


# ------------------------------------------------------------------------------------------------------------ PowerSGD


def test_the_oracle_of_powersgd() -> None:
    """M1 = [[2,0],[0,0]], M2 = [[0,0],[0,2]], q = [1,1], rank 1, as means over two members."""
    compressors = [PowerSgd(layout_of((2, 2)), rank=1, seed=0) for _ in range(2)]
    for compressor in compressors:  # so small a matrix would travel as it is
        compressor._matrices, compressor._rest = [_Matrix(0, 4, 2, 2)], []
        compressor._factors = [torch.ones(2, 1)]
    flats = [torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 2.0])]
    mean = one_round(list(compressors), list(flats)) / 2
    assert torch.allclose(mean, torch.full((4,), 0.5))
    residual = sum(c.error for c in compressors if c.error is not None) / 2
    assert torch.allclose(residual, torch.tensor([0.5, -0.5, -0.5, 0.5]))


SHAPES = [(24, 40), (7,), (30, 6, 5), (3, 3), (50, 20)]


@settings(deadline=None, max_examples=15)
@given(num=st.integers(2, 4), rank=st.integers(1, 3), seed=st.integers(0, 99), missing=st.booleans())
def test_average_and_residuals_add_up_to_what_was_given(num: int, rank: int, seed: int, missing: bool) -> None:
    """Over several steps with error feedback; and the average is the twin's: the projection on the range of P."""
    layout = layout_of(*SHAPES)
    compressors = [PowerSgd(layout, rank=rank, seed=3) for _ in range(num)]
    generator = torch.Generator().manual_seed(seed)
    owed = torch.zeros(layout.num_elements)
    for step in range(3):
        flats: list[torch.Tensor | None] = [torch.randn(layout.num_elements, generator=generator) for _ in range(num)]
        if missing:
            flats[step % num] = None
        residuals = [c.error for c in compressors]
        factors = [f.double().numpy() for f in compressors[0]._first_factors(torch.float32)]
        average = one_round(list(compressors), flats, step=step)
        given_now = sum(flat for flat in flats if flat is not None)
        assert torch.allclose(average + _residuals(compressors, layout), given_now + owed, atol=1e-3)
        whole = sum(flat if r is None else flat + r for flat, r in zip(flats, residuals, strict=True) if flat is not None)
        for matrix, factor in zip(compressors[0]._matrices, factors, strict=True):
            m = matrix.of(whole).double().numpy()
            q, _ = np.linalg.qr(m @ factor)
            assert np.allclose(matrix.of(average).numpy(), q @ (q.T @ m), atol=2e-3)
        owed = _residuals(compressors, layout)


def _residuals(compressors: list[PowerSgd], layout: Layout) -> torch.Tensor:
    kept = [c.error for c in compressors if c.error is not None]
    return sum(kept, torch.zeros(layout.num_elements))


def test_in_a_local_run_the_copies_keep_the_error_whoever_joins_or_leaves() -> None:
    """mean(x_i) is the same before and after each step (outer rate 1), weighted by tokens; a newcomer begins with none."""
    layout = layout_of(*SHAPES)
    compressors = [PowerSgd(layout, rank=2, seed=1, in_copy=True) for _ in range(3)]
    outer, tokens = torch.randn(layout.num_elements), [3, 1, 4]
    weights = [n / sum(tokens) for n in tokens]

    def copies() -> list[torch.Tensor]:
        return [outer if c.residual is None else outer - c.residual for c in compressors]

    for step in range(4):
        if step == 2:
            compressors = [*compressors[:2], PowerSgd(layout, rank=2, seed=1, in_copy=True)]
            assert compressors[2].residual is None
        moved = [x + 0.1 * torch.randn(layout.num_elements) for x in copies()]
        flats: list[torch.Tensor | None] = [(outer - x) * n for x, n in zip(moved, tokens, strict=True)]
        outer = outer - one_round(list(compressors), flats, step=step, tokens=tokens) / sum(tokens)
        after = sum(w * x for w, x in zip(weights, copies(), strict=True))
        assert torch.allclose(after, sum(w * x for w, x in zip(weights, moved, strict=True)), atol=1e-4)
        assert all(c.residual is not None for c in compressors)


def test_only_matrices_that_get_smaller_are_compressed_and_the_rest_is_exact() -> None:
    layout = layout_of(*SHAPES)
    compressors = [PowerSgd(layout, rank=2, seed=1) for _ in range(2)]
    assert [(x.rows, x.columns) for x in compressors[0]._matrices] == [(24, 40), (30, 30), (50, 20)]
    flats = [torch.randn(layout.num_elements) for _ in range(2)]
    average = one_round(list(compressors), list(flats))
    for start, end in compressors[0]._rest:
        assert torch.equal(average[start:end], flats[0][start:end] + flats[1][start:end])


def test_one_member_alone_loses_nothing() -> None:
    layout = layout_of(*SHAPES)
    compressor = PowerSgd(layout, rank=1, seed=1)
    compressor.error = torch.ones(layout.num_elements)
    flat = torch.randn(layout.num_elements)
    assert torch.equal(one_round([compressor], [flat]), flat + 1)
    assert compressor.error is None


def test_a_failed_attempt_changes_nothing() -> None:
    layout = layout_of(*SHAPES)
    compressors = [PowerSgd(layout, rank=1, seed=1) for _ in range(2)]
    flats: list[torch.Tensor | None] = [torch.randn(layout.num_elements) for _ in range(2)]
    first = one_round(list(compressors), flats, adopt=False)
    assert all(c.error is None for c in compressors)
    assert torch.equal(one_round(list(compressors), flats), first)


def test_columns_that_depend_on_others_become_zero() -> None:
    """A matrix of rank 1 with rank 3 asked for: no NaN, and the matrix exactly."""
    layout = layout_of((40, 30))
    compressors = [PowerSgd(layout, rank=3, seed=1) for _ in range(2)]
    m = torch.outer(torch.randn(40), torch.randn(30)).view(-1)
    assert torch.allclose(one_round(list(compressors), [m, m]), 2 * m, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- fragments


@settings(deadline=None, max_examples=25)
@given(
    num=st.integers(1, 4),
    fragments=st.integers(1, 4),
    top=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 99),
    num_elements=st.integers(8, 90),
)
def test_the_mean_of_copies_and_what_reducers_carry_is_invariant(
    num: int, fragments: int, top: float, seed: int, num_elements: int
) -> None:
    """Two steps of copies that drift: mean(x_i) + e is the same before and after each (outer learning rate 1)."""
    code = Code("sparse4", top) if top else Code()
    compressors = [Fragments(num_elements, fragments, code) for _ in range(num)]
    generator = torch.Generator().manual_seed(seed)
    outer = torch.randn(num_elements, generator=generator)
    tokens = [int(n) for n in torch.randint(1, 9, (num,), generator=generator)]
    weights = torch.tensor(tokens) / sum(tokens)
    for step in range(2):
        copies = [
            outer - (c.residual if c.residual is not None else 0.0) + 0.1 * torch.randn(num_elements, generator=generator)
            for c in compressors
        ]
        carried = sum(c.carry for c in compressors if c.carry is not None)
        before = sum(w * x for w, x in zip(weights, copies, strict=True)) - carried
        flats: list[torch.Tensor | None] = [(outer - x) * n for x, n in zip(copies, tokens, strict=True)]
        total = one_round(list(compressors), flats, step=step, tokens=tokens, chunk_elements=7)
        untouched = torch.ones(num_elements, dtype=torch.bool)
        untouched[step % fragments :: fragments] = False
        assert not total[untouched].any(), "only the fragment whose turn it is is sent"
        outer = outer - total / sum(tokens)
        carried = sum(c.carry for c in compressors if c.carry is not None)
        after = sum(
            w * (outer - (c.residual if c.residual is not None else 0.0)) for w, c in zip(weights, compressors, strict=True)
        )
        assert torch.allclose(after - carried, before, atol=1e-5)


def test_without_a_sparse_code_and_with_one_fragment_nothing_is_kept_back() -> None:
    compressors = [Fragments(10, 1, Code()) for _ in range(2)]
    one_round(list(compressors), [torch.randn(10), torch.randn(10)])
    assert all(c.residual is None and c.carry is None for c in compressors)


def test_who_has_nothing_to_add_keeps_what_it_has() -> None:
    compressors = [Fragments(10, 2, Code()) for _ in range(2)]
    one_round(list(compressors), [torch.ones(10), torch.ones(10)])
    kept = compressors[1].residual
    one_round(list(compressors), [torch.ones(10), None], step=1)
    assert kept is not None
    assert torch.equal(compressors[1].residual, kept)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_every_element_has_its_turn(step: int) -> None:
    compressors = [Fragments(7, 3, Code()) for _ in range(2)]
    total = one_round(list(compressors), [torch.ones(7), torch.ones(7)], step=step)
    assert total.nonzero().flatten().tolist() == list(range(7))[step::3]
