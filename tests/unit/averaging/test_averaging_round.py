"""One all-reduce round among members in one process: the plain sum, the same bits everywhere, and failures that name."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.all_reduce import PhaseExchange, Round, StageSum
from swarm.averaging.butterfly import Butterfly
from swarm.averaging.compressors.interface import Contribution
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.reduction import (
    MAX_CHUNK_ELEMENTS,
    MIN_CHUNK_ELEMENTS,
    Code,
    CodedChunk,
    GroupVector,
    RoundFailed,
    chunk_elements_of,
    num_chunks_of,
    window_of,
)
from swarm.base.errors import InternalError, LinkBroken, RemoteRefused, Unreachable
from swarm.lifecycle.step import LedgerEntry
from swarm.policy.shares import hagenbach_bischoff, slice_bounds
from swarm.stage.accumulator import Accumulator
from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout
from swarm.testing.virtual_time import run_virtual
from swarm.wire.compression import decode_tensor, encode_tensor
from swarm.wire.messages import BLOCK_SIZE, Attempt, Member, Seal

torch.set_num_threads(1)

ATTEMPT = Attempt(n=4)
#: Raises to make the exchange from a member to another fail, `(sender, receiver) -> None`.
Fault = Callable[[int, int], Awaitable[None]]


def member(number: int) -> Member:
    return Member(peer=f"{number:040x}", incarnation="0" * 16, host="h", port=1)


def seals(num: int) -> list[Seal]:
    return [Seal(member=member(number), version_id="c" * 64) for number in range(num)]


def make_rounds(
    contributions: list[torch.Tensor | None], num_elements: int, dtype: torch.dtype, *, codec: str = "raw", **options: Any
) -> list[Round]:
    names = seals(len(contributions))
    plain = Plain(num_elements, Code(codec))  # type: ignore[arg-type]
    return [
        Round(
            ATTEMPT,
            names,
            names[i].member.key,
            plain.compress(Contribution(contribution, (1,) * len(names), i, 0)),
            dtype=dtype,
            **options,
        )
        for i, contribution in enumerate(contributions)
    ]


def make_exchanges(contributions: list[torch.Tensor], slice_sizes: list[int] | None = None, **options: Any) -> list[Butterfly]:
    """One exchange by itself, without the round around it."""
    members = [member(number) for number in range(len(contributions))]
    return [
        Butterfly(members, i, GroupVector(values.numel(), values), dtype=torch.float32, slice_sizes=slice_sizes or [], **options)
        for i, values in enumerate(contributions)
    ]


def payload(tensor: torch.Tensor, codec: str = "raw") -> CodedChunk:
    return encode_tensor("slice", tensor, codec, "state")  # type: ignore[arg-type]


def on_the_wire(sent: CodedChunk) -> CodedChunk:
    """The same bytes in another place."""
    return sent[0], bytearray(sent[1])


def decoded(received: CodedChunk) -> torch.Tensor:
    return decode_tensor(*received)


def exchange_of(rounds: list[Round], me: int, *, rng: random.Random, fault: Fault | None = None) -> PhaseExchange:
    """Direct calls that take random times; what a member's round fails with reaches its callers as a refusal."""

    async def exchange(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        if fault is not None:
            await fault(me, j)
        try:
            reduced = await rounds[j].reduce(member(me), phase, number, None if part is None else on_the_wire(part))
        except RoundFailed as failure:
            raise RemoteRefused("failed", str(failure)) from None
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        return on_the_wire(reduced)

    return exchange


async def run_all(
    rounds: list[Round], *, seed: int = 0, fault: Fault | None = None, dead: frozenset[int] = frozenset()
) -> list[StageSum | BaseException]:
    """Every member runs, but for the `dead`."""
    rng = random.Random(seed)
    alive = [i for i in range(len(rounds)) if i not in dead]
    return await asyncio.gather(
        *(rounds[i].run(exchange_of(rounds, i, rng=rng, fault=fault)) for i in alive), return_exceptions=True
    )


def averages(
    contributions: list[torch.Tensor | None], num_elements: int, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> list[StageSum]:
    async def main() -> list[StageSum | BaseException]:
        return await run_all(make_rounds(contributions, num_elements, dtype, **options), seed=seed)

    results = run_virtual(main())
    for result in results:
        assert isinstance(result, StageSum), result
    return results  # type: ignore[return-value]


def coded_sum(contributions: list[torch.Tensor | None], slice_sizes: list[int], chunk_elements: int, codec: str) -> torch.Tensor:
    """Chunk by chunk: every part but the reducer's own is coded, summed in order, and the sum is coded once more."""
    expected = torch.empty(sum(slice_sizes))
    for j, (first, last) in enumerate(slice_bounds(slice_sizes)):
        for start in range(first, last, chunk_elements):
            end = min(start + chunk_elements, last)
            total = torch.zeros(end - start)
            for i, contribution in enumerate(contributions):
                part = contribution[start:end]  # type: ignore[index]
                total = total + (part if i == j else decoded(payload(part, codec)))
            expected[start:end] = decoded(payload(total, codec))
    return expected


def plain_sum(contributions: list[torch.Tensor | None], num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(num_elements, dtype=dtype)
    for contribution in contributions:
        if contribution is not None:
            total = total + contribution
    return total


@settings(deadline=None, max_examples=60)
@given(
    holds=st.lists(st.booleans(), min_size=1, max_size=6),
    num_elements=st.integers(0, 40),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    chunk_elements=st.integers(1, 9),
    weights=st.randoms(),
)
def test_every_member_ends_on_the_bits_of_the_plain_sum(
    holds: list[bool], num_elements: int, seed: int, dtype: torch.dtype, chunk_elements: int, weights: random.Random
) -> None:
    """Also with one member, one element, fewer elements than members, unequal slice_sizes, and members with an empty ledger."""
    slice_sizes = hagenbach_bischoff(num_elements, [weights.random() + 1e-9 for _ in holds])
    generator = torch.Generator().manual_seed(seed)
    contributions = [torch.randn(num_elements, generator=generator, dtype=dtype) if held else None for held in holds]
    results = averages(contributions, num_elements, dtype, seed, chunk_elements=chunk_elements, slice_sizes=slice_sizes)
    expected = plain_sum(contributions, num_elements, dtype)
    squares = pytest.approx(float(expected.double().square().sum()), rel=1e-12 if dtype == torch.float64 else 1e-6)
    for result in results:
        assert result.flat.dtype == dtype
        assert torch.equal(result.flat, expected)
        assert result.digest == digest_of([expected])
        assert result.sum_squares == squares
    assert len({(r.digest, r.sum_squares) for r in results}) == 1


@settings(deadline=None, max_examples=40)
@given(
    num=st.integers(2, 5),
    num_elements=st.integers(1, 60),
    seed=st.integers(0, 99),
    chunk_elements=st.integers(1, 20),
    codec=st.sampled_from(["scaled16", "bf16", "scaled8", "int8", "uniform8"]),
)
def test_replicas_are_identical_with_lossy_codecs_and_equal_the_slow_twin(
    num: int, num_elements: int, seed: int, chunk_elements: int, codec: str
) -> None:
    """The twin: each chunk rounded by everyone but its reducer, summed in order, and rounded once more."""
    generator = torch.Generator().manual_seed(seed)
    contributions: list[torch.Tensor | None] = [torch.randn(num_elements, generator=generator) for _ in range(num)]
    results = averages(contributions, num_elements, seed=seed, chunk_elements=chunk_elements, codec=codec)
    expected = coded_sum(contributions, hagenbach_bischoff(num_elements, [1.0] * num), chunk_elements, codec)
    assert len({result.digest for result in results}) == 1, "replicas_identical"
    assert torch.equal(results[0].flat, expected)


def test_the_order_of_the_sum_is_that_of_the_members_and_not_of_arrival() -> None:
    """In fp32 another order gives other bits; whoever comes first must not matter."""
    contributions = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)]
    digests = {averages(contributions, 1, seed=seed)[0].digest for seed in range(10)}
    assert digests == {digest_of([torch.tensor([1.0])])}


def test_nobody_with_a_gradient_gives_zeros() -> None:
    for result in averages([None, None, None], 5):
        assert torch.equal(result.flat, torch.zeros(5))
        assert result.sum_squares == 0.0


def test_the_sum_of_squares_is_taken_in_fp64() -> None:
    result = averages([torch.full((4,), 1e30)], 4)[0]
    assert result.sum_squares == pytest.approx(4e60, rel=1e-6)


def test_the_average_names_the_attempt_and_its_seals() -> None:
    result = averages([torch.ones(2), torch.ones(2)], 2)[0]
    assert result.attempt == ATTEMPT
    assert result.seals == tuple(seals(2))


def test_contributions_are_not_changed() -> None:
    contributions = [torch.arange(7.0), torch.arange(7.0) * 2]
    before = [c.clone() for c in contributions]
    averages(contributions, 7)
    assert all(torch.equal(a, b) for a, b in zip(contributions, before, strict=True))


def test_a_repeated_slice_counts_once() -> None:
    """A lost reply makes the sender send again."""

    async def main() -> None:
        first, second = make_exchanges([torch.ones(4), torch.ones(4)])
        one = decoded(await first.reduce(1, 0, payload(torch.full((2,), 5.0))))
        again = decoded(await first.reduce(1, 0, payload(torch.full((2,), 7.0))))
        assert torch.equal(one, torch.full((2,), 6.0))
        assert torch.equal(again, one)
        del second

    run_virtual(main())


def test_a_chunk_that_does_not_fit_is_refused_and_does_not_count() -> None:
    async def main() -> None:
        first, _ = make_exchanges([torch.ones(10)] * 2, chunk_elements=2, slice_sizes=[5, 5])
        for bad in (torch.ones(1), torch.ones(3), torch.ones(2, dtype=torch.float64)):
            with pytest.raises(ValueError, match="a chunk of 2 elements came as"):
                await first.reduce(1, 0, payload(bad))
        with pytest.raises(ValueError, match="this slice has 3 chunks, not 4"):
            await first.reduce(1, 3, payload(torch.ones(2)))
        assert torch.equal(decoded(await first.reduce(1, 2, payload(torch.ones(1)))), torch.full((1,), 2.0))
        assert torch.equal(decoded(await first.reduce(1, 0, payload(torch.ones(2)))), torch.full((2,), 2.0))

    run_virtual(main())


@pytest.mark.parametrize("slice_sizes", [[3, 3], [4, 4, 4], []])
def test_slice_sizes_that_do_not_fit_are_refused(slice_sizes: list[int]) -> None:
    async def main() -> None:
        if slice_sizes:
            with pytest.raises(ValueError, match="slices of"):
                make_exchanges([torch.ones(9)] * 3, slice_sizes=slice_sizes)
        else:  # none given: equal ones
            assert len(make_exchanges([torch.ones(9)] * 3)) == 3

    run_virtual(main())


def test_an_exchange_that_is_cancelled_at_once_leaves_no_coroutine_unawaited() -> None:
    async def exchange(j: int, number: int, chunk: CodedChunk | None) -> CodedChunk:
        raise AssertionError("cancelled before its first turn")

    async def main() -> None:
        first, *_ = make_exchanges([torch.ones(10)] * 2)
        running = asyncio.create_task(first.run(exchange))
        await asyncio.sleep(0)  # its tasks are made, and none has had a turn
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run_virtual(main())
        gc.collect()
    assert not [str(w.message) for w in warned if "never awaited" in str(w.message)]


@pytest.mark.parametrize(("num_members", "window"), [(2, 4), (8, 4), (12, 3), (16, 2)])
def test_chunks_come_back_while_later_ones_are_still_being_sent(num_members: int, window: int) -> None:
    """A pipeline: with a link that takes a second for each chunk, it is not one after another, nor all at once."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        num_elements = 12 * num_members
        rounds = make_rounds([torch.ones(num_elements)] * num_members, num_elements, torch.float32, chunk_elements=1)
        under_way = most = 0

        def exchange(me: int) -> PhaseExchange:
            async def one(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
                nonlocal under_way, most
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(1.0)
                reduced = await rounds[j].reduce(member(me), phase, number, part)
                under_way -= 1
                return reduced

            return one

        await asyncio.gather(*(rounds[i].run(exchange(i)) for i in range(num_members)))
        assert loop.time() == pytest.approx(12 / window)
        assert most <= num_members * (num_members - 1) * window, "no more than the window is under way"

    run_virtual(main())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_who_sends_no_numbers_is_named(value: float) -> None:
    async def main() -> None:
        bad = torch.ones(9)
        bad[4] = value  # in slice 1
        rounds = make_rounds([torch.ones(9), torch.ones(9), bad], 9, torch.float32)
        results = await run_all(rounds)
        assert all(isinstance(result, RoundFailed) for result in results)
        assert results[1].suspects == (member(2),)  # type: ignore[union-attr]
        assert "is not finite" in str(results[1])
        assert list(rounds[1].blamed) == [member(2).key]

    run_virtual(main())


def test_a_later_accumulate_does_not_change_the_contribution() -> None:
    """Invariant: a contribution is the accumulator as it was sealed."""

    async def main() -> None:
        layout = Layout.of(torch.nn.Linear(2, 3))
        accumulator = Accumulator(0, layout, dtype=torch.float32, device="cpu")

        def add(index: int) -> None:
            accumulator.ledger.grant(index, accumulator.ledger.attempt)
            gradients: list[torch.Tensor | None] = [torch.full(shape, 1.0 + index) for shape in layout.shapes]
            assert accumulator.add(index, LedgerEntry(1, 0.0), gradients) == "accumulated"

        add(0)
        contribution = accumulator.contribution()
        rounds = make_rounds([contribution, torch.zeros(9)], 9, torch.float32)
        add(1)
        results = await run_all(rounds)
        for result in results:
            assert isinstance(result, StageSum)
            assert torch.equal(result.flat, torch.ones(9))
        later = accumulator.contribution()
        assert later is not None
        assert torch.equal(later, torch.full((9,), 3.0))

    run_virtual(main())


def test_a_dead_member_is_named_by_all_and_nobody_waits_on() -> None:
    async def main() -> None:
        rounds = make_rounds([torch.ones(9)] * 4, 9, torch.float32)

        async def fault(sender: int, receiver: int) -> None:
            if receiver == 2:
                await asyncio.sleep(1.0)
                raise Unreachable("no connection")

        async with asyncio.timeout(5.0):  # the round's own deadline is far away
            results = await run_all(rounds, fault=fault, dead=frozenset({2}))
        assert len(results) == 3
        for result in results:
            assert isinstance(result, RoundFailed)
            assert result.suspects == (member(2),)
            assert "no connection" in str(result)

    run_virtual(main())


def test_a_broken_pair_is_named_by_its_ends_only() -> None:
    async def main() -> None:
        rounds = make_rounds([torch.ones(9)] * 4, 9, torch.float32)

        async def fault(sender: int, receiver: int) -> None:
            if {sender, receiver} == {0, 2}:
                raise LinkBroken("reset")

        async with asyncio.timeout(5.0):
            results = await run_all(rounds, fault=fault)
        assert all(isinstance(result, RoundFailed) for result in results)
        named = [{m.peer for m in result.suspects} for result in results]  # type: ignore[union-attr]
        assert named == [{member(2).peer}, set(), {member(0).peer}, set()]

    run_virtual(main())


def test_callers_that_wait_get_an_error_at_once_when_a_round_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        (round_, *_) = make_exchanges([torch.ones(6)] * 3)
        waiting = [asyncio.create_task(round_.reduce(index, 0, payload(torch.ones(2)))) for index in (1,)]
        await asyncio.sleep(1.0)
        assert not waiting[0].done()
        round_.fail(RoundFailed("member 2 is gone", [member(2)]))
        with pytest.raises(RoundFailed, match="member 2 is gone"):
            await waiting[0]
        with pytest.raises(RoundFailed):  # and so do those that come later
            await round_.reduce(2, 0, payload(torch.ones(2)))
        assert loop.time() == pytest.approx(1.0)

    run_virtual(main())


def test_a_caller_that_gives_up_does_not_end_the_round_for_others() -> None:
    async def main() -> None:
        (round_, *_) = make_exchanges([torch.ones(6)] * 3)
        gone = asyncio.create_task(round_.reduce(1, 0, payload(torch.ones(2))))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(1.0)
        assert torch.equal(decoded(await round_.reduce(2, 0, payload(torch.ones(2)))), torch.full((2,), 3.0))

    run_virtual(main())


def test_a_finished_round_cannot_fail() -> None:
    async def main() -> None:
        (round_, *_) = make_exchanges([torch.ones(2)] * 2)
        reduced = decoded(await round_.reduce(1, 0, payload(torch.ones(1))))
        round_.fail(RoundFailed("too late"))
        assert torch.equal(decoded(await round_.reduce(1, 0, payload(torch.ones(1)))), reduced)

    run_virtual(main())


def test_one_that_answers_with_a_refusal_is_not_blamed() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)

        async def refused(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            raise RemoteRefused("wrong_state", "ledger is open")

        async with asyncio.timeout(5.0):  # though the other's slice never comes
            with pytest.raises(RoundFailed, match="ledger is open") as raised:
                await round_.run(refused)
        assert raised.value.suspects == ()

    run_virtual(main())


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(1), torch.ones(2, dtype=torch.float64), torch.ones(2, 1)])
def test_a_slice_of_the_wrong_shape_or_dtype_names_its_sender(bad: torch.Tensor) -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)

        async def lies(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            return payload(bad)

        incoming = asyncio.create_task(round_.reduce(member(1), 0, 0, payload(torch.ones(2))))
        with pytest.raises(RoundFailed, match="wrong shape") as raised:
            await round_.run(lies)
        assert raised.value.suspects == (member(1),)
        await incoming

    run_virtual(main())


def test_a_bug_in_the_exchange_is_no_ones_suspicion() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)

        async def broken(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            raise InternalError("ours")

        with pytest.raises(InternalError, match="ours"):
            await round_.run(broken)

    run_virtual(main())


def test_a_unknown_node_has_no_index() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)
        assert round_.index_of(member(1)) == 1
        assert round_.index_of(member(7)) is None
        restarted = member(1).model_copy(update={"incarnation": "1" * 16})
        assert round_.index_of(restarted) is None

    run_virtual(main())


@pytest.mark.parametrize(
    ("seconds", "num_chunks", "window_of_8"), [(None, 16, 4), (10.0, 16, 4), (1.0, 7, 2), (0.6, 4, 2), (0.0, 4, 2)]
)
def test_a_short_round_is_cut_into_fewer_chunks_and_fewer_of_them_are_under_way(
    seconds: float | None, num_chunks: int, window_of_8: int
) -> None:
    assert num_chunks_of(seconds) == num_chunks
    assert window_of(8, num_chunks) == window_of_8
    assert window_of(30, num_chunks) == 2, "many members share a line"


@given(num_elements=st.integers(1, 2**31), num_chunks=st.integers(1, 128))
def test_chunks_are_neither_many_nor_large(num_elements: int, num_chunks: int) -> None:
    size = chunk_elements_of(num_elements, num_chunks)
    assert MIN_CHUNK_ELEMENTS <= size <= MAX_CHUNK_ELEMENTS
    assert size % BLOCK_SIZE == 0, "no odd block in the middle"
    assert -(-num_elements // size) <= max(num_chunks, -(-num_elements // MAX_CHUNK_ELEMENTS))
