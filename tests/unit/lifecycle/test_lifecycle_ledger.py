"""The ledger: a ticket is added once, with a claim of the current attempt, while the step is open; else never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import InternalError
from swarm.base.ids import Ballot
from swarm.lifecycle.step import Ledger, LedgerEntry
from swarm.wire.messages import Attempt, Member

ME = Member(peer="a" * 40, incarnation="b" * 16, host="h", port=1)
HEAD = "c" * 64
ATTEMPT_1 = Attempt(ballot=Ballot(1, "a" * 40), n=0)
ATTEMPT_2 = Attempt(ballot=Ballot(1, "a" * 40), n=1)


def entry(tokens: int = 3, loss_sum: float = 1.5) -> LedgerEntry:
    return LedgerEntry(tokens, loss_sum)


def test_nothing_is_added_without_a_claim() -> None:
    ledger = Ledger(5)
    assert not ledger.may_add(0)
    with pytest.raises(InternalError, match="step 5: ticket 0 may not be added"):
        ledger.add(0, entry())
    assert 0 not in ledger


def test_a_ticket_is_added_at_most_once() -> None:
    ledger = Ledger(0)
    ledger.grant(0, Attempt())
    ledger.add(0, entry())
    for _ in range(2):
        assert not ledger.may_add(0)
        with pytest.raises(InternalError):
            ledger.add(0, entry())
        ledger.grant(0, Attempt())  # not even with a second claim
    assert ledger.seal(ME, HEAD, "").tokens == 3


@pytest.mark.parametrize("overflow_first", [True, False])
def test_a_ticket_is_an_entry_or_an_overflow_and_never_both(overflow_first: bool) -> None:
    ledger = Ledger(0)
    ledger.grant(0, Attempt())
    ledger.add(0, entry(), overflow=overflow_first)
    ledger.grant(0, Attempt())
    with pytest.raises(InternalError):
        ledger.add(0, entry(), overflow=not overflow_first)
    assert (0 in ledger.overflow, 0 in ledger.entries) == (overflow_first, not overflow_first)


def test_claims_are_void_after_a_collection() -> None:
    ledger = Ledger(0)
    ledger.grant(0, Attempt())
    ledger.collect(ATTEMPT_1, freeze=False)
    assert not ledger.may_add(0)


def test_what_was_added_stays_after_a_collection() -> None:
    ledger = Ledger(0)
    ledger.grant(0, Attempt())
    ledger.add(0, entry())
    ledger.collect(ATTEMPT_1, freeze=True)
    ledger.collect(ATTEMPT_2, freeze=False)
    assert ledger.seal(ME, HEAD, "").ledger == (0,)


def test_a_late_grant_of_an_old_attempt_is_useless() -> None:
    ledger = Ledger(0)
    ledger.collect(ATTEMPT_2, freeze=False)
    for old in (Attempt(), ATTEMPT_1):
        ledger.grant(0, old)
        assert not ledger.may_add(0)
    ledger.grant(0, ATTEMPT_2)
    assert ledger.may_add(0)


def test_a_grant_of_a_attempt_to_come_counts_only_from_then_on_if_given_again() -> None:
    ledger = Ledger(0)
    ledger.grant(0, ATTEMPT_1)
    assert not ledger.may_add(0)
    ledger.collect(ATTEMPT_1, freeze=False)
    assert not ledger.may_add(0)


def test_nothing_is_added_while_frozen_averaging_prepared_or_committed() -> None:
    ledger = Ledger(0)
    ledger.collect(ATTEMPT_1, freeze=True)
    ledger.grant(0, ATTEMPT_1)
    for event, state in (("freeze", "frozen"), ("reduce", "averaging"), ("hold", "prepared"), ("commit", "committed")):
        ledger.transition(event)
        assert ledger.state == state
        assert not ledger.may_add(0)


def test_a_lower_attempt_is_refused() -> None:
    ledger = Ledger(0)
    ledger.collect(ATTEMPT_2, freeze=False)
    with pytest.raises(InternalError, match="below"):
        ledger.collect(ATTEMPT_1, freeze=False)
    assert ledger.attempt == ATTEMPT_2


def test_attempts_are_ordered_by_ballot_before_number() -> None:
    ledger = Ledger(0)
    ledger.collect(Attempt(ballot=Ballot(1, "a" * 40), n=9), freeze=False)
    ledger.collect(Attempt(ballot=Ballot(2, "0" * 40), n=0), freeze=False)
    with pytest.raises(InternalError):
        ledger.collect(Attempt(ballot=Ballot(1, "f" * 40), n=99), freeze=False)


def test_a_committed_step_is_never_collected() -> None:
    ledger = Ledger(0)
    ledger.transition("commit")
    with pytest.raises(InternalError, match="committed"):
        ledger.collect(ATTEMPT_1, freeze=False)


def test_a_revoked_claim_is_void_unless_the_ticket_is_held() -> None:
    ledger = Ledger(0)
    ledger.grant(0, Attempt())
    ledger.grant(1, Attempt())
    ledger.add(1, entry())
    assert ledger.revoke(0) is False
    assert not ledger.may_add(0)
    assert ledger.revoke(1) is True
    assert ledger.revoke(7) is False
    assert 1 in ledger


def test_discard_leaves_nothing_that_counts() -> None:
    ledger = Ledger(0)
    for index in range(3):
        ledger.grant(index, Attempt())
    ledger.add(0, entry())
    ledger.add(1, entry(), overflow=True)
    ledger.discard()
    seal = ledger.seal(ME, HEAD, "")
    assert (seal.ledger, seal.overflow, seal.tokens, seal.loss_sum) == ((), (), 0, 0.0)
    assert not any(ledger.may_add(index) for index in range(3))


def test_a_seal_says_what_the_ledger_holds() -> None:
    ledger = Ledger(0)
    for index, tokens in ((4, 10), (2, 20), (3, 30)):
        ledger.grant(index, Attempt())
        ledger.add(index, LedgerEntry(tokens, float(tokens)))
    ledger.grant(1, Attempt())
    ledger.add(1, LedgerEntry(5, 5.0), overflow=True)
    seal = ledger.seal(ME, HEAD, "digest")
    assert seal.ledger == (2, 3, 4)
    assert seal.overflow == (1,)
    assert (seal.tokens, seal.loss_sum) == (60, 60.0), "a ticket that overflowed must not be counted in the divisor"
    assert (seal.member, seal.version_id, seal.state_digest) == (ME, HEAD, "digest")


OPERATIONS = st.sampled_from(["grant", "old_grant", "add", "overflow", "revoke", "open", "freeze", "discard"])


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 3)), max_size=40))
def test_a_ticket_is_inside_at_most_once_whatever_happens(operations: list[tuple[str, int]]) -> None:
    """Against a twin that keeps claims as plain facts: (ticket, number of the collection that they belong to)."""
    ledger = Ledger(0)
    attempt, is_open = 0, True
    claims: set[tuple[int, int]] = set()
    inside: dict[int, str] = {}

    def at(n: int) -> Attempt:
        return Attempt(n=n)

    for operation, index in operations:
        if operation == "grant":
            ledger.grant(index, at(attempt))
            claims.add((index, attempt))
        elif operation == "old_grant" and attempt > 0:
            ledger.grant(index, at(attempt - 1))
            claims -= {(index, attempt)}  # the later message overwrites
        elif operation in ("add", "overflow"):
            allowed = is_open and index not in inside and (index, attempt) in claims
            assert ledger.may_add(index) is allowed
            if allowed:
                ledger.add(index, entry(), overflow=operation == "overflow")
                inside[index] = operation
            else:
                with pytest.raises(InternalError):
                    ledger.add(index, entry(), overflow=operation == "overflow")
        elif operation == "revoke":
            assert ledger.revoke(index) is (inside.get(index) == "add")  # an overflow is no holding
            claims -= {(index, attempt)}
        elif operation in ("open", "freeze"):
            attempt += 1
            is_open = operation == "open"
            ledger.collect(at(attempt), freeze=not is_open)
        elif operation == "discard":
            ledger.discard()
            inside.clear()
            claims.clear()
        assert not set(ledger.entries) & ledger.overflow
        assert set(ledger.entries) == {i for i, kind in inside.items() if kind == "add"}
        assert ledger.overflow == {i for i, kind in inside.items() if kind == "overflow"}


def test_a_grant_that_its_revocation_overtook_is_void() -> None:
    """The leader gave the ticket to another member after this one said that it does not hold it."""
    ledger = Ledger(0)
    asked_at = ledger.num_revocations
    assert not ledger.revoke(3)
    ledger.grant(3, Attempt(), asked_at=asked_at)
    assert not ledger.may_add(3)
    ledger.grant(4, Attempt(), asked_at=asked_at)
    assert ledger.may_add(4), "only the revoked ticket's claim is void"
    ledger.grant(3, Attempt(), asked_at=ledger.num_revocations)
    assert ledger.may_add(3), "a claim that was asked for again counts"
