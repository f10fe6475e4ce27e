"""What seals cover: a ticket is held once, an overflow needs a second opinion, and who was wrong is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import InternalError
from swarm.lifecycle.coverage import coverage_of
from swarm.wire.messages import Member, Seal

HEAD = "c" * 64


def peer(number: int) -> str:
    return f"{number:040x}"


def seal(number: int, *ledger: int, overflow: tuple[int, ...] = (), ready: bool = True) -> Seal:
    who = Member(peer=peer(number), incarnation="0" * 16, host="h", port=1, ready=ready)
    return Seal(member=who, ledger=ledger, overflow=overflow, version_id=HEAD)


def test_exactly_once_a_ticket_in_two_ledgers_is_never_averaged() -> None:
    with pytest.raises(InternalError, match=r"\[1\] are in two ledgers"):
        coverage_of([seal(0, 0, 1), seal(1, 1, 2)])


def test_ledgers_cover_their_tickets() -> None:
    coverage = coverage_of([seal(0, 0, 3), seal(1, 2), seal(2)])
    assert coverage.held == coverage.covered == {0, 2, 3}
    assert (coverage.overflow, coverage.unconfirmed, coverage.blamed) == (frozenset(), {}, frozenset())


def test_an_overflow_needs_a_second_opinion() -> None:
    coverage = coverage_of([seal(0, 0, overflow=(1,)), seal(1, 2)])
    assert coverage.covered == {0, 2}
    assert coverage.unconfirmed == {1: {peer(0)}}
    assert coverage.blamed == frozenset()


def test_two_that_agree_confirm_an_overflow() -> None:
    coverage = coverage_of([seal(0, overflow=(1,)), seal(1, overflow=(1,)), seal(2)])
    assert coverage.overflow == coverage.covered == {1}
    assert (coverage.unconfirmed, coverage.blamed) == ({}, frozenset())


@pytest.mark.parametrize("others", [[], [seal(1, 5, ready=False)]])
def test_where_nobody_else_can_be_asked_one_is_enough(others: list[Seal]) -> None:
    coverage = coverage_of([seal(0, 0, overflow=(1,)), *others])
    assert coverage.overflow == {1}


def test_one_that_called_a_finite_ticket_overflow_is_to_blame() -> None:
    """The other's gradient counts; the ticket is covered once."""
    for seals in ([seal(0, overflow=(1,)), seal(1, 1)], [seal(1, 1), seal(0, overflow=(1,))]):
        coverage = coverage_of(seals)
        assert (coverage.held, coverage.overflow, coverage.blamed) == ({1}, frozenset(), {peer(0)})


STATES = st.lists(st.lists(st.sampled_from(["", "held", "overflow"]), min_size=4, max_size=4), min_size=1, max_size=4)


@given(STATES)
def test_every_ticket_that_anyone_saw_is_in_exactly_one_place(states: list[list[str]]) -> None:
    """`states[peer][ticket]`, with the definitions spelled out ticket by ticket."""
    seals = []
    for number, row in enumerate(states):
        held = [i for i, s in enumerate(row) if s == "held"]
        seals.append(seal(number, *held, overflow=tuple(i for i, s in enumerate(row) if s == "overflow")))
    columns = list(zip(*states, strict=True))
    if any(column.count("held") > 1 for column in columns):
        with pytest.raises(InternalError):
            coverage_of(seals)
        return
    coverage = coverage_of(seals)
    blamed = set()
    for index, column in enumerate(columns):
        places = [index in coverage.held, index in coverage.overflow, index in coverage.unconfirmed]
        assert sum(places) == (1 if any(column) else 0)
        said = {peer(number) for number, s in enumerate(column) if s == "overflow"}
        if "held" in column:
            assert index in coverage.held
            blamed |= said
        elif said:
            enough = len(said) >= 2 or len(states) == 1
            assert (index in coverage.overflow) is enough
            assert coverage.unconfirmed.get(index, said) == said
    assert coverage.blamed == blamed
