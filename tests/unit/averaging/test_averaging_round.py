"""One all-reduce round among members in one process: the plain sum, the same bits everywhere, and failures that name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.all_reduce import Average, Round, RoundFailed
from swarm.base.errors import InternalError, LinkBroken, RemoteRefused, Unreachable
from swarm.base.virtual_time import run_virtual
from swarm.lifecycle.step import Entry
from swarm.stage.accumulator import Accumulator
from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout
from swarm.wire.messages import Member, Seal, Term

torch.set_num_threads(1)

TERM = Term(n=4)
#: Raises to make the exchange from a member to another fail, `(sender, receiver) -> None`.
Fault = Callable[[int, int], Awaitable[None]]


def member(number: int) -> Member:
    return Member(peer=f"{number:040x}", incarnation="0" * 16, host="h", port=1)


def seals(num: int) -> list[Seal]:
    return [Seal(member=member(number), head="c" * 64) for number in range(num)]


def make_rounds(contributions: list[torch.Tensor | None], num_elements: int, dtype: torch.dtype) -> list[Round]:
    names = seals(len(contributions))
    return [
        Round(TERM, names, names[i].member.key, contribution, num_elements=num_elements, dtype=dtype)
        for i, contribution in enumerate(contributions)
    ]


def exchange_of(
    rounds: list[Round], me: int, *, rng: random.Random, fault: Fault | None = None
) -> Callable[[int, torch.Tensor | None], Awaitable[torch.Tensor]]:
    """Direct calls that take random times; what a member's round fails with reaches its callers as a refusal."""

    async def exchange(j: int, part: torch.Tensor | None) -> torch.Tensor:
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        if fault is not None:
            await fault(me, j)
        try:
            reduced = await rounds[j].reduce(me, None if part is None else part.clone())
        except RoundFailed as failure:
            raise RemoteRefused("failed", str(failure)) from None
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        return reduced.clone()

    return exchange


async def run_all(
    rounds: list[Round], *, seed: int = 0, fault: Fault | None = None, dead: frozenset[int] = frozenset()
) -> list[Average | BaseException]:
    """Every member runs, but for the `dead`."""
    rng = random.Random(seed)
    alive = [i for i in range(len(rounds)) if i not in dead]
    return await asyncio.gather(
        *(rounds[i].run(exchange_of(rounds, i, rng=rng, fault=fault)) for i in alive), return_exceptions=True
    )


def averages(
    contributions: list[torch.Tensor | None], num_elements: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Average]:
    async def main() -> list[Average | BaseException]:
        return await run_all(make_rounds(contributions, num_elements, dtype), seed=seed)

    results = run_virtual(main())
    for result in results:
        assert isinstance(result, Average), result
    return results  # type: ignore[return-value]


def plain_sum(contributions: list[torch.Tensor | None], num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(num_elements, dtype=dtype)
    for contribution in contributions:
        if contribution is not None:
            total = total + contribution
    return total


@settings(deadline=None, max_examples=60)
@given(
    holds=st.lists(st.booleans(), min_size=1, max_size=6), num_elements=st.integers(0, 23), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_every_member_ends_on_the_bits_of_the_plain_sum(
    holds: list[bool], num_elements: int, seed: int, dtype: torch.dtype
) -> None:
    """Also with one member, one element, fewer elements than members, and members with an empty ledger."""
    generator = torch.Generator().manual_seed(seed)
    contributions = [torch.randn(num_elements, generator=generator, dtype=dtype) if held else None for held in holds]
    results = averages(contributions, num_elements, dtype, seed)
    expected = plain_sum(contributions, num_elements, dtype)
    for result in results:
        assert result.flat.dtype == dtype
        assert torch.equal(result.flat, expected)
        assert result.digest == digest_of([expected])
        assert result.sum_squares == pytest.approx(float(expected.double().square().sum()), rel=1e-12)
    assert len({(r.digest, r.sum_squares) for r in results}) == 1


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
    assert result.term == TERM
    assert result.seals == tuple(seals(2))


def test_contributions_are_not_changed() -> None:
    contributions = [torch.arange(7.0), torch.arange(7.0) * 2]
    before = [c.clone() for c in contributions]
    averages(contributions, 7)
    assert all(torch.equal(a, b) for a, b in zip(contributions, before, strict=True))


def test_a_repeated_slice_counts_once() -> None:
    """A lost reply makes the sender send again."""

    async def main() -> None:
        first, second = make_rounds([torch.ones(4), torch.ones(4)], 4, torch.float32)
        one = await first.reduce(1, torch.full((2,), 5.0))
        again = await first.reduce(1, torch.full((2,), 7.0))
        assert torch.equal(one, torch.full((2,), 6.0))
        assert torch.equal(again, one)
        del second

    run_virtual(main())


def test_a_later_accumulate_does_not_change_the_contribution() -> None:
    """Invariant: a contribution is the accumulator as it was sealed."""

    async def main() -> None:
        layout = Layout.of(torch.nn.Linear(2, 3))
        accumulator = Accumulator(0, layout, dtype=torch.float32, device="cpu")

        def add(index: int) -> None:
            accumulator.ledger.grant(index, accumulator.ledger.term)
            gradients: list[torch.Tensor | None] = [torch.full(shape, 1.0 + index) for shape in layout.shapes]
            assert accumulator.add(index, Entry(1, 0.0), gradients) == "accumulated"

        add(0)
        contribution = accumulator.contribution()
        rounds = make_rounds([contribution, torch.zeros(9)], 9, torch.float32)
        add(1)
        results = await run_all(rounds)
        for result in results:
            assert isinstance(result, Average)
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
        (round_, *_) = make_rounds([torch.ones(6)] * 3, 6, torch.float32)
        waiting = [asyncio.create_task(round_.reduce(index, torch.ones(2))) for index in (1,)]
        await asyncio.sleep(1.0)
        assert not waiting[0].done()
        round_.fail(RoundFailed("member 2 is gone", [member(2)]))
        with pytest.raises(RoundFailed, match="member 2 is gone"):
            await waiting[0]
        with pytest.raises(RoundFailed):  # and so do those that come later
            await round_.reduce(2, torch.ones(2))
        assert loop.time() == pytest.approx(1.0)

    run_virtual(main())


def test_a_caller_that_gives_up_does_not_end_the_round_for_others() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(6)] * 3, 6, torch.float32)
        gone = asyncio.create_task(round_.reduce(1, torch.ones(2)))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(1.0)
        assert torch.equal(await round_.reduce(2, torch.ones(2)), torch.full((2,), 3.0))

    run_virtual(main())


def test_a_finished_round_cannot_fail() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(2)] * 2, 2, torch.float32)
        reduced = await round_.reduce(1, torch.ones(1))
        round_.fail(RoundFailed("too late"))
        assert torch.equal(await round_.reduce(1, torch.ones(1)), reduced)

    run_virtual(main())


def test_one_that_answers_with_a_refusal_is_not_blamed() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)

        async def refused(j: int, part: torch.Tensor | None) -> torch.Tensor:
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

        async def lies(j: int, part: torch.Tensor | None) -> torch.Tensor:
            return bad

        incoming = asyncio.create_task(round_.reduce(1, torch.ones(2)))
        with pytest.raises(RoundFailed, match="wrong shape") as raised:
            await round_.run(lies)
        assert raised.value.suspects == (member(1),)
        await incoming

    run_virtual(main())


def test_a_bug_in_the_exchange_is_no_ones_suspicion() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)

        async def broken(j: int, part: torch.Tensor | None) -> torch.Tensor:
            raise InternalError("ours")

        with pytest.raises(InternalError, match="ours"):
            await round_.run(broken)

    run_virtual(main())


def test_a_stranger_has_no_index() -> None:
    async def main() -> None:
        (round_, *_) = make_rounds([torch.ones(4)] * 2, 4, torch.float32)
        assert round_.index_of(member(1)) == 1
        assert round_.index_of(member(7)) is None
        restarted = member(1).model_copy(update={"incarnation": "1" * 16})
        assert round_.index_of(restarted) is None

    run_virtual(main())
