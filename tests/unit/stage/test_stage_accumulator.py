"""Promise 1 at the peer: the flat sum holds exactly the gradients of the ledger's entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import Accumulator, is_finite
from swarm.stage.layout import Layout
from swarm.wire.messages import Attempt

torch.set_num_threads(1)

LAYOUT = Layout.of(torch.nn.Linear(3, 2))
ENTRY = LedgerEntry(4, 2.5)


def made(dtype: torch.dtype = torch.float64) -> Accumulator:
    return Accumulator(0, LAYOUT, dtype=dtype, device="cpu")


def gradient(value: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor | None]:
    return [torch.full(shape, value, dtype=dtype) for shape in LAYOUT.shapes]


def claimed(accumulator: Accumulator, *indexes: int) -> None:
    for index in indexes:
        accumulator.ledger.grant(index, accumulator.ledger.attempt)


def test_gradients_are_summed_and_ledgered() -> None:
    accumulator = made()
    claimed(accumulator, 0, 5)
    assert accumulator.contribution() is None
    assert accumulator.add(0, ENTRY, gradient(1.0)) == "accumulated"
    assert accumulator.add(5, ENTRY, gradient(0.5)) == "accumulated"
    contribution = accumulator.contribution()
    assert contribution is not None
    assert torch.equal(contribution, torch.full((8,), 1.5, dtype=torch.float64))
    assert set(accumulator.ledger.entries) == {0, 5}


def test_a_contribution_is_a_copy() -> None:
    accumulator = made()
    claimed(accumulator, 0, 1)
    accumulator.add(0, ENTRY, gradient(1.0))
    contribution = accumulator.contribution()
    accumulator.add(1, ENTRY, gradient(1.0))
    assert torch.equal(contribution, torch.ones(8, dtype=torch.float64))


def test_without_a_claim_nothing_is_added() -> None:
    accumulator = made()
    claimed(accumulator, 0)
    assert accumulator.add(1, ENTRY, gradient(1.0)) == "denied"
    assert accumulator.contribution() is None
    assert 1 not in accumulator.ledger


def test_exactly_once_a_ticket_that_comes_twice_is_added_once() -> None:
    accumulator = made()
    claimed(accumulator, 0)
    accumulator.add(0, ENTRY, gradient(1.0))
    claimed(accumulator, 0)
    assert accumulator.add(0, ENTRY, gradient(1.0)) == "denied"
    assert torch.equal(accumulator.contribution(), torch.ones(8, dtype=torch.float64))


def test_after_a_freeze_a_late_backward_is_denied() -> None:
    accumulator = made()
    claimed(accumulator, 0, 1)
    accumulator.add(0, ENTRY, gradient(1.0))
    accumulator.ledger.collect(Attempt(n=1), freeze=True)
    claimed(accumulator, 1)
    assert accumulator.add(1, ENTRY, gradient(1.0)) == "denied"
    assert torch.equal(accumulator.contribution(), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_is_ledgered_and_not_added(bad: float, where: int) -> None:
    accumulator = made()
    claimed(accumulator, 0, 1)
    accumulator.add(0, ENTRY, gradient(1.0))
    gradients = gradient(1.0)
    gradients[where].view(-1)[-1] = bad  # type: ignore[union-attr]
    assert accumulator.add(1, ENTRY, gradients) == "overflow"
    assert accumulator.ledger.overflow == {1}
    assert torch.equal(accumulator.contribution(), torch.ones(8, dtype=torch.float64))
    claimed(accumulator, 1)
    assert accumulator.add(1, ENTRY, gradient(1.0)) == "denied", "an overflow counts as held"


def test_only_overflows_contribute_nothing() -> None:
    accumulator = made()
    claimed(accumulator, 0)
    assert accumulator.add(0, ENTRY, gradient(float("nan"))) == "overflow"
    assert accumulator.contribution() is None


def test_a_large_gradient_is_added_unless_its_square_is_infinite_in_fp32() -> None:
    accumulator = made(torch.float32)
    claimed(accumulator, 0, 1)
    assert accumulator.add(0, ENTRY, gradient(1e18, torch.float32)) == "accumulated"
    assert accumulator.add(1, ENTRY, gradient(1e30, torch.float32)) == "overflow"
    assert torch.isfinite(accumulator.contribution()).all()


def test_an_unused_parameter_adds_nothing() -> None:
    accumulator = made()
    claimed(accumulator, 0)
    assert accumulator.add(0, ENTRY, [None, torch.ones(2)]) == "accumulated"
    assert accumulator.contribution().tolist() == [0.0] * 6 + [1.0] * 2


def test_lower_precision_gradients_are_summed_in_the_masters_dtype() -> None:
    accumulator = made(torch.float32)
    claimed(accumulator, *range(300))
    for index in range(300):
        accumulator.add(index, ENTRY, gradient(1.0, torch.bfloat16))
    contribution = accumulator.contribution()
    assert contribution.dtype == torch.float32
    assert contribution.tolist() == [300.0] * 8, "a sum in bf16 would stop at 256"


@pytest.mark.parametrize(
    "broken", [[torch.ones(2, 3), torch.ones(5)], [torch.ones(2, 3)], [torch.ones(2, 3), torch.ones(2), torch.ones(2)]]
)
def test_a_job_that_fails_halfway_discards_everything(broken: list[torch.Tensor | None]) -> None:
    """Some of it was added before the exception: the sum is of no use, and no seal may list its tickets."""
    accumulator = made()
    claimed(accumulator, 0, 1, 2)
    accumulator.add(0, ENTRY, gradient(1.0))
    with pytest.raises((RuntimeError, ValueError)):
        accumulator.add(1, ENTRY, broken)
    assert accumulator.contribution() is None
    assert not accumulator.ledger.entries
    assert accumulator.add(2, ENTRY, gradient(1.0)) == "denied", "claims from before are void"
    claimed(accumulator, 0)
    assert accumulator.add(0, ENTRY, gradient(3.0)) == "accumulated"
    assert torch.equal(accumulator.contribution(), torch.full((8,), 3.0, dtype=torch.float64))


def test_out_of_memory_halfway_discards_everything() -> None:
    accumulator = made()
    claimed(accumulator, 0, 1)
    accumulator.add(0, ENTRY, gradient(1.0))

    class Refusing(torch.Tensor):
        """Behaves until it is added to something."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.add_:
                raise torch.OutOfMemoryError("out of memory")
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.raises(torch.OutOfMemoryError):
        accumulator.add(1, ENTRY, [torch.ones(2, 3), torch.ones(2).as_subclass(Refusing)])
    assert accumulator.contribution() is None
    assert not accumulator.ledger.entries


def test_the_loss_scale_is_divided_out_without_rounding_to_half_precision() -> None:
    """fp16 gradients that only the scale made representable keep their value in the masters' dtype."""
    accumulator = made(torch.float32)
    claimed(accumulator, 0)
    assert accumulator.add(0, ENTRY, gradient(2.0**-20, torch.float16), loss_scale=2.0**14) == "accumulated"
    assert accumulator.contribution().tolist() == [2.0**-34] * 8


def test_the_callers_gradients_are_not_kept() -> None:
    accumulator = made()
    claimed(accumulator, 0)
    gradients = gradient(1.0)
    accumulator.add(0, ENTRY, gradients)
    gradients[0].fill_(9.0)  # type: ignore[union-attr]
    assert torch.equal(accumulator.contribution(), torch.ones(8, dtype=torch.float64))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["good", "nan", "unclaimed", "fails"])), max_size=15))
def test_the_sum_is_exactly_that_of_the_entries(jobs: list[tuple[int, str]]) -> None:
    """Values are powers of two, one for each ticket, so the sum shows who is in it."""
    accumulator = made()
    for index, kind in jobs:
        if kind != "unclaimed":
            claimed(accumulator, index)
        else:
            accumulator.ledger.revoke(index)
        gradients = gradient(2.0**index)
        if kind == "nan":
            gradients[1] = torch.full((2,), float("nan"))
        if kind == "fails" and accumulator.ledger.may_add(index):
            with pytest.raises(RuntimeError):
                accumulator.add(index, ENTRY, [gradients[0], torch.ones(7)])
        else:
            accumulator.add(index, ENTRY, gradients)
        contribution = accumulator.contribution()
        expected = sum(2.0**i for i in accumulator.ledger.entries)
        assert (0.0 if contribution is None else contribution[0].item()) == expected
        assert contribution is None or torch.equal(contribution, torch.full((8,), expected, dtype=torch.float64))


def test_what_is_as_good_as_infinite_is_found_beside_the_fast_way() -> None:
    """Sums of squares tell most tensors apart from those that must be looked at."""
    bound = 2.0**60
    for value, expected in ((bound, True), (-bound, True), (bound * 1.001, False), (float("nan"), False), (3e38, False)):
        gradient = torch.ones(10_000)
        gradient[77] = value
        assert is_finite(gradient) is expected
        assert is_finite(gradient.double()) is expected
    assert is_finite(torch.full((10_000,), bound)), "their squares' sum overflows, but none is beyond the bound"
