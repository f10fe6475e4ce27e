"""Sums of tied parameters: every stage that holds a copy ends on the same bits, and one of them counts it."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.averaging.all_reduce import Round
from swarm.averaging.compressors.interface import Contribution
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.reduction import CodedChunk
from swarm.averaging.tied import TiedRanges
from swarm.base.errors import ConfigError
from swarm.base.ids import ZERO_BALLOT
from swarm.stage.digest import digest_of, squares_of
from swarm.stage.layout import Layout
from swarm.stage.module import Tie, ties_of
from swarm.wire.messages import Attempt, Member, Seal

TIE = Tie(((0, "embedding"), (2, "head")))
SIZES = {0: {"embedding": 6, "other": 3}, 2: {"norm": 2, "head": 6, "bias": 1}}


def layout_of(stage: int) -> Layout:
    module = torch.nn.Module()
    for name, size in SIZES[stage].items():
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))
    return Layout.of(module)


@given(st.integers(0, 2**32 - 1))
def test_all_stages_hold_the_same_sum_and_only_the_owner_counts_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    flats = {stage: torch.randn(sum(sizes.values()), generator=generator) for stage, sizes in SIZES.items()}
    ranges = {stage: TiedRanges([TIE], stage, layout_of(stage)) for stage in SIZES}
    own = {stage: ranges[stage].own(flat)["embedding"] for stage, flat in flats.items()}
    tied = {
        stage: ranges[stage].tie(flat.clone(), {("embedding", other): own[other] for other in own if other != stage})
        for stage, flat in flats.items()
    }
    expected = own[0] + own[2]
    assert torch.equal(tied[0].flat[:6], expected)
    assert torch.equal(tied[2].flat[2:8], expected)
    assert torch.equal(tied[0].flat[6:], flats[0][6:])
    assert torch.equal(tied[2].flat[[0, 1, 8]], flats[2][[0, 1, 8]])
    assert tied[0].digests == tied[2].digests == (("embedding", digest_of([expected])),)
    squares = [squares_of(t.flat, t.uncounted) for t in tied.values()]
    whole = torch.cat([expected, flats[0][6:], flats[2][[0, 1, 8]]]).double()
    assert sum(squares) == pytest.approx(float(whole @ whole), rel=1e-12)


def test_a_stage_without_a_copy_has_no_ranges() -> None:
    assert not TiedRanges([TIE], 1, layout_of(0))


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (Tie(((0, "embeding"), (2, "head"))), "tie embeding: stage 0 trains no parameter embeding"),
        (Tie(((0, "embedding"), (0, "other"))), "tie embedding: a stage is named twice"),
    ],
)
def test_a_tie_that_does_not_fit_is_refused_by_name(tie: Tie, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TiedRanges([tie], 0, layout_of(0))


def test_frozen_copies_need_no_sum_and_are_frozen_together() -> None:
    class Factory:
        num_stages = 3
        ties = (TIE,)

    assert ties_of(Factory(), ["norm", "other"]) == (TIE,)  # type: ignore[arg-type]
    assert ties_of(Factory(), ["emb*", "head"]) == ()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="frozen: head and embedding are one parameter in two stages"):
        ties_of(Factory(), ["head"])  # type: ignore[arg-type]


def test_a_member_alone_leaves_its_accumulator_as_it_was_sealed() -> None:
    """Its sum is the accumulator itself: an attempt that fails afterwards must not have tied parts in it."""
    accumulated = torch.arange(9.0)
    member = Member(peer="11" * 20, incarnation="ab" * 8, host="h", port=1)
    ranges = TiedRanges([TIE], 0, layout_of(0))

    async def main() -> torch.Tensor:
        seals = [Seal(member=member, version_id="cc" * 32)]
        compression = Plain(9).compress(Contribution(accumulated, (1,), 0, 0))
        round_ = Round(Attempt(ballot=ZERO_BALLOT), seals, member.key, compression, dtype=torch.float32)

        async def add(flat: torch.Tensor):  # type: ignore[no-untyped-def]
            return ranges.tie(flat, {("embedding", 2): torch.ones(6)})

        async def exchange(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            raise AssertionError("nobody else is here")

        return (await round_.run(exchange, add)).flat

    assert asyncio.run(main())[0] == 1.0
    assert torch.equal(accumulated, torch.arange(9.0))
