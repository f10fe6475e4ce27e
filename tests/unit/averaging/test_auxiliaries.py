"""Auxiliaries in a round: they reduce slices and hold nothing else; the sum is the plain one, and failures name who failed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_averaging_round import ATTEMPT, coded_sum, decoded, make_exchanges, member, on_the_wire, payload, plain_sum, seals

from swarm.averaging.all_reduce import PhaseExchange, Round, StageSum
from swarm.averaging.compressors.interface import Contribution
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.reduction import AUXILIARY_WINDOW, Code, CodedChunk, GroupVector, Reduction, RoundFailed, bytes_under_way
from swarm.base.errors import RemoteRefused, Unreachable
from swarm.policy.shares import hagenbach_bischoff
from swarm.testing.virtual_time import run_virtual

torch.set_num_threads(1)

Contributions = list[torch.Tensor | None]
#: Raises to make the exchange from a member to another fail.
Fault = Callable[[int, int], Awaitable[None]]


class Group:
    """Members with rounds, and auxiliaries behind them, which exchange by direct calls that take random times."""

    def __init__(
        self,
        contributions: Contributions,
        num_auxiliaries: int,
        slice_sizes: list[int],
        *,
        dtype: torch.dtype = torch.float32,
        codec: str = "raw",
        seed: int = 0,
        fault: Fault | None = None,
        **options: Any,
    ) -> None:
        num, code = len(contributions), Code(codec)  # type: ignore[arg-type]
        self.num_elements = sum(slice_sizes)
        everyone = [member(number) for number in range(num + num_auxiliaries)]
        self.rounds = [
            Round(
                ATTEMPT,
                seals(num),
                everyone[i].key,
                Plain(self.num_elements, code).compress(Contribution(contribution, (1,) * num, i, 0)),
                dtype=dtype,
                slice_sizes=slice_sizes,
                auxiliaries=everyone[num:],
                **options,
            )
            for i, contribution in enumerate(contributions)
        ]
        self.auxiliaries = [
            Reduction(
                everyone,
                num + k,
                GroupVector(self.num_elements, None, code),
                dtype=dtype,
                slice_sizes=slice_sizes,
                num_auxiliaries=num_auxiliaries,
                **options,
            )
            for k in range(num_auxiliaries)
        ]
        self._rng = random.Random(seed)
        self._fault = fault
        #: Most bytes of parts and of sums, and most chunks, that an auxiliary held.
        self.most_bytes = self.most_chunks = 0

    def _exchange_of(self, me: int) -> PhaseExchange:
        async def exchange(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            if self._fault is not None:
                await self._fault(me, j)
            sent = None if part is None else on_the_wire(part)
            try:
                if j < len(self.rounds):
                    reduced = await self.rounds[j].reduce(member(me), phase, number, sent)
                else:
                    auxiliary = self.auxiliaries[j - len(self.rounds)]
                    asking = asyncio.ensure_future(auxiliary.reduce(me, number, sent))
                    await asyncio.sleep(0)
                    self._look_at(auxiliary)
                    reduced = await asking
            except RoundFailed as failure:
                raise RemoteRefused("failed", str(failure)) from None
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            return on_the_wire(reduced)

        return exchange

    def _look_at(self, auxiliary: Reduction) -> None:
        held = 0
        for chunk in auxiliary._chunks.values():
            held += sum(len(part[1]) for part in chunk.received.values() if part is not None)
            if chunk.reduced.done() and not chunk.reduced.exception():
                held += memoryview(chunk.reduced.result()[1]).nbytes
        self.most_bytes = max(self.most_bytes, held)
        self.most_chunks = max(self.most_chunks, len(auxiliary._chunks))

    async def run(self, *, dead: int | None = None) -> list[StageSum | BaseException]:
        alive = [i for i in range(len(self.rounds)) if i != dead]
        return await asyncio.gather(*(self.rounds[i].run(self._exchange_of(i)) for i in alive), return_exceptions=True)


@settings(deadline=None, max_examples=60)
@given(
    holds=st.lists(st.booleans(), min_size=2, max_size=5),
    num_auxiliaries=st.integers(1, 3),
    num_elements=st.integers(0, 40),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    chunk_elements=st.integers(1, 9),
    weights=st.randoms(),
    slow=st.floats(0.0, 1.0),
)
def test_every_member_ends_on_the_bits_of_the_plain_sum(
    holds: list[bool],
    num_auxiliaries: int,
    num_elements: int,
    seed: int,
    dtype: torch.dtype,
    chunk_elements: int,
    weights: random.Random,
    slow: float,
) -> None:
    """Whatever part the auxiliaries reduce: all of it, or nothing."""
    parts = [slow * weights.random() for _ in holds] + [weights.random() + 1e-9 for _ in range(num_auxiliaries)]
    slice_sizes = hagenbach_bischoff(num_elements, parts)
    generator = torch.Generator().manual_seed(seed)
    contributions = [torch.randn(num_elements, generator=generator, dtype=dtype) if held else None for held in holds]

    async def main() -> tuple[list[StageSum | BaseException], Group]:
        group = Group(contributions, num_auxiliaries, slice_sizes, dtype=dtype, seed=seed, chunk_elements=chunk_elements)
        results = await group.run()
        for auxiliary in group.auxiliaries:
            await auxiliary.all_reduced()
            assert not auxiliary._chunks, "everyone has taken every chunk"
        return results, group

    results, group = run_virtual(main())
    expected = plain_sum(contributions, num_elements, dtype)
    for result in results:
        assert isinstance(result, StageSum), result
        assert result.flat.dtype == dtype
        assert torch.equal(result.flat, expected)
    assert len({result.digest for result in results}) == 1, "replicas_identical"  # type: ignore[union-attr]
    assert group.most_chunks <= len(holds) * AUXILIARY_WINDOW


@settings(deadline=None, max_examples=30)
@given(
    num=st.integers(2, 4),
    num_elements=st.integers(1, 60),
    seed=st.integers(0, 99),
    chunk_elements=st.integers(1, 20),
    codec=st.sampled_from(["scaled16", "bf16", "scaled8", "int8"]),
)
def test_replicas_are_identical_with_lossy_codecs_and_equal_the_slow_twin(
    num: int, num_elements: int, seed: int, chunk_elements: int, codec: str
) -> None:
    """The twin: an auxiliary sees every member's part rounded; a member, all but its own."""
    generator = torch.Generator().manual_seed(seed)
    contributions: Contributions = [torch.randn(num_elements, generator=generator) for _ in range(num)]
    slice_sizes = hagenbach_bischoff(num_elements, [1.0] * num + [2.0])

    async def main() -> list[StageSum | BaseException]:
        return await Group(contributions, 1, slice_sizes, codec=codec, seed=seed, chunk_elements=chunk_elements).run()

    results = run_virtual(main())
    expected = coded_sum(contributions, slice_sizes, chunk_elements, codec)
    for result in results:
        assert isinstance(result, StageSum), result
        assert torch.equal(result.flat, expected)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_an_auxiliary_holds_chunks_under_way_and_no_slice(codec: str) -> None:
    """Promise "bounded": what is asked of it beforehand is enough, however long the vector is."""
    num, num_elements = 3, 3 * 2**20

    async def main() -> Group:
        group = Group([torch.ones(num_elements)] * num, 1, [0] * num + [num_elements], codec=codec)
        assert all(isinstance(result, StageSum) for result in await group.run())
        return group

    group = run_virtual(main())
    code = Code(codec)  # type: ignore[arg-type]
    bound = bytes_under_way(code, num_elements, torch.float32, num)
    assert group.most_bytes <= bound / 2, "the other half is for parts that the transport holds until it has answered"
    assert bytes_under_way(code, 10**12, torch.float32, num) == bytes_under_way(code, 10**9, torch.float32, num)


def test_an_auxiliary_that_is_gone_is_named_by_all() -> None:
    async def fault(sender: int, receiver: int) -> None:
        if receiver == 3:
            raise Unreachable("no connection")

    async def main() -> list[StageSum | BaseException]:
        async with asyncio.timeout(5.0):
            return await Group([torch.ones(9)] * 3, 1, [1, 1, 1, 6], fault=fault).run()

    for result in run_virtual(main()):
        assert isinstance(result, RoundFailed)
        assert result.suspects == (member(3),)


def test_an_auxiliary_names_who_sends_no_numbers() -> None:
    async def main() -> None:
        bad = torch.ones(9)
        bad[4] = float("nan")
        group = Group([torch.ones(9), bad, torch.ones(9)], 1, [0, 0, 0, 9])
        results = await group.run()
        assert all(isinstance(result, RoundFailed) for result in results)
        assert all(result.suspects == () for result in results), "it answered, so nobody blames it"  # type: ignore[union-attr]
        with pytest.raises(RoundFailed, match="is not finite") as raised:
            await group.auxiliaries[0].all_reduced()
        assert raised.value.suspects == (member(1),)

    run_virtual(main())


def test_members_name_an_auxiliary_whose_sums_are_no_numbers() -> None:
    async def main() -> None:
        (one, *_) = make_exchanges([torch.ones(6)] * 2 + [torch.zeros(6)], slice_sizes=[0, 0, 6], num_auxiliaries=1)

        async def exchange(j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            return payload(torch.full((6,), float("inf")))

        with pytest.raises(RoundFailed, match="a reduced slice") as raised:
            await one.run(exchange)
        assert raised.value.suspects == (member(2),)

    run_virtual(main())


def auxiliary_of_two() -> Reduction:
    members = [member(number) for number in range(3)]
    return Reduction(
        members, 2, GroupVector(4, None), dtype=torch.float32, slice_sizes=[1, 1, 2], num_auxiliaries=1, chunk_elements=1
    )


def test_an_auxiliary_knows_whose_parts_it_waits_for() -> None:
    async def main() -> None:
        auxiliary = auxiliary_of_two()
        assert auxiliary.awaited == []
        asking = asyncio.create_task(auxiliary.reduce(1, 0, payload(torch.ones(1))))
        await asyncio.sleep(1.0)
        assert auxiliary.awaited == [member(0)]
        assert torch.equal(decoded(await auxiliary.reduce(0, 0, None)), torch.ones(1))
        await asking
        assert auxiliary.awaited == []

    run_virtual(main())


def test_a_part_counts_once_and_a_chunk_that_everyone_took_is_gone() -> None:
    async def main() -> None:
        auxiliary = auxiliary_of_two()
        asking = [asyncio.create_task(auxiliary.reduce(1, 0, payload(torch.full((1,), x)))) for x in (1.0, 5.0)]
        await asyncio.sleep(1.0)
        assert torch.equal(decoded(await auxiliary.reduce(0, 0, payload(torch.ones(1)))), torch.full((1,), 2.0))
        assert all(torch.equal(decoded(each), torch.full((1,), 2.0)) for each in await asyncio.gather(*asking))
        with pytest.raises(ValueError, match="everyone has taken chunk 0"):
            await auxiliary.reduce(0, 0, payload(torch.ones(1)))

    run_virtual(main())


def test_an_auxiliary_has_no_part_in_the_sum() -> None:
    async def main() -> None:
        first, *_ = make_exchanges([torch.ones(6)] * 2 + [torch.zeros(6)], slice_sizes=[2, 2, 2], num_auxiliaries=1)
        with pytest.raises(ValueError, match="an auxiliary adds nothing to the sum"):
            await first.reduce(2, 0, payload(torch.ones(2)))
        with pytest.raises(ValueError, match="auxiliaries help two members or more, not 1"):
            make_exchanges([torch.ones(6)] * 2, num_auxiliaries=1)

    run_virtual(main())
