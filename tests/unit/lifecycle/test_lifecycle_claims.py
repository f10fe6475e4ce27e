"""Promise 1 at the leader: one holder for each ticket, against a slow twin that keeps every fact in plain sets."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.lifecycle.claims import ClaimBook
from swarm.wire.messages import Attempt, Member, Seal

HEAD = "c" * 64


def member(number: int, incarnation: int = 0) -> Member:
    return Member(peer=f"{number:040x}", incarnation=f"{incarnation:016x}", host="h", port=1)


MEMBERS = [member(number) for number in range(3)]
UNKNOWN_NODES = [member(9), member(0, incarnation=1)]  # nobody, and member 0 after a restart
INDEXES = st.integers(0, 4)


def seal(who: Member, *ledger: int, overflow: tuple[int, ...] = ()) -> Seal:
    return Seal(member=who, ledger=ledger, overflow=overflow, version_id=HEAD)


class Twin:
    """Facts: (ticket, member) pairs that may be used, that are used, and that were not finite."""

    def __init__(self) -> None:
        self.unused: set[tuple[int, str]] = set()
        self.used: set[tuple[int, str]] = set()
        self.overflowed: set[tuple[int, str]] = set()
        self.excluded: set[str] = set()

    def holders(self, index: int) -> set[str]:
        return {who for i, who in self.unused | self.used if i == index}

    def ask(self, who: Member, index: int) -> str:
        if who not in MEMBERS or who.peer in self.excluded:
            return "denied"
        if any(i == index for i, _ in self.used) or (index, who.peer) in self.overflowed:
            return "denied"
        if not self.holders(index) - {who.peer}:
            self.unused.add((index, who.peer))
            return "granted"
        return "conflict"

    def load(self, seals: list[Seal]) -> None:
        self.unused, self.used, self.overflowed = set(), set(), set()
        for one in seals:
            if set(one.ledger) & {i for i, _ in self.used}:
                self.excluded.add(one.member.peer)
            else:
                self.used |= {(index, one.member.peer) for index in one.ledger}
                self.overflowed |= {(index, one.member.peer) for index in one.overflow}

    def exclude(self, who: Member) -> list[int]:
        self.excluded.add(who.peer)
        freed = sorted(i for i, holder in self.unused | self.used if holder == who.peer)
        self.unused = {pair for pair in self.unused if pair[1] != who.peer}
        self.used = {pair for pair in self.used if pair[1] != who.peer}
        return freed


class ClaimsAgainstTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = ClaimBook(0, Attempt(), MEMBERS)
        self.twin = Twin()

    @rule(who=st.sampled_from(MEMBERS + UNKNOWN_NODES), index=INDEXES)
    def ask(self, who: Member, index: int) -> None:
        before = self.twin.holders(index)
        answer = self.book.ask(who, index)
        assert answer.verdict == self.twin.ask(who, index)
        assert answer.verdict == "granted" or answer.reason, "a refusal must say why"
        assert (answer.holder is not None) is (answer.verdict == "conflict")
        if answer.holder is not None:
            assert {answer.holder.peer} == before
            assert answer.holder != who

    @rule(who=st.sampled_from(MEMBERS), index=INDEXES)
    def give_back(self, who: Member, index: int) -> None:
        """Also by members that hold nothing, and after the ticket was used: that must change nothing."""
        self.book.give_back(index, who)
        self.twin.unused.discard((index, who.peer))

    @rule(who=st.sampled_from(MEMBERS), index=INDEXES)
    def mark_held(self, who: Member, index: int) -> None:
        self.book.mark_held(index, who)
        if (index, who.peer) in self.twin.unused:
            self.twin.unused.remove((index, who.peer))
            self.twin.used.add((index, who.peer))

    @rule(who=st.sampled_from(MEMBERS))
    def exclude(self, who: Member) -> None:
        assert self.book.exclude(who) == self.twin.exclude(who)

    @rule(ledgers=st.lists(st.tuples(st.sets(INDEXES, max_size=3), st.sets(INDEXES, max_size=1)), min_size=3, max_size=3))
    def load(self, ledgers: list[tuple[set[int], set[int]]]) -> None:
        """A collection from everyone who is not excluded."""
        seals = [
            seal(who, *sorted(ledger), overflow=tuple(sorted(overflow - ledger)))
            for who, (ledger, overflow) in zip(MEMBERS, ledgers, strict=True)
            if who.peer not in self.twin.excluded
        ]
        self.book.load(seals)
        self.twin.load(seals)

    @invariant()
    def no_ticket_has_two_holders(self) -> None:
        for index in range(5):
            assert len(self.twin.holders(index)) <= 1

    @invariant()
    def the_same_members_are_excluded(self) -> None:
        assert {key[0] for key in self.book.excluded} == self.twin.excluded


ClaimsAgainstTwin.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestClaimsAgainstTwin = ClaimsAgainstTwin.TestCase


def test_a_excluded_member_is_never_granted_again() -> None:
    book = ClaimBook(0, Attempt(), MEMBERS)
    book.exclude(MEMBERS[0])
    assert book.ask(MEMBERS[0], 0).verdict == "denied"
    book.load([seal(MEMBERS[1], 1)])
    assert book.ask(MEMBERS[0], 0).verdict == "denied", "a collection must not pardon"
    assert book.ask(MEMBERS[1], 0).verdict == "granted"


def test_a_conflict_names_the_holder_and_ends_when_it_gives_back() -> None:
    book = ClaimBook(0, Attempt(), MEMBERS)
    assert book.ask(MEMBERS[0], 3).verdict == "granted"
    answer = book.ask(MEMBERS[1], 3)
    assert (answer.verdict, answer.holder) == ("conflict", MEMBERS[0])
    book.give_back(3, MEMBERS[0])
    assert book.ask(MEMBERS[1], 3).verdict == "granted"
    assert book.ask(MEMBERS[0], 3).holder == MEMBERS[1]


def test_a_used_claim_cannot_be_given_back() -> None:
    book = ClaimBook(0, Attempt(), MEMBERS)
    book.ask(MEMBERS[0], 3)
    book.mark_held(3, MEMBERS[0])
    book.give_back(3, MEMBERS[0])
    assert book.ask(MEMBERS[1], 3).verdict == "denied"


def test_a_late_give_back_does_not_free_the_new_holder() -> None:
    book = ClaimBook(0, Attempt(), MEMBERS)
    book.ask(MEMBERS[0], 3)
    book.exclude(MEMBERS[0])
    book.ask(MEMBERS[1], 3)
    book.give_back(3, MEMBERS[0])
    assert book.ask(MEMBERS[2], 3).holder == MEMBERS[1]


def test_a_excluded_members_ledger_is_as_if_it_had_never_been() -> None:
    """Its tickets are claimed anew: granted, in conflict, given back and granted again."""
    book = ClaimBook(0, Attempt(), MEMBERS)
    book.load([seal(MEMBERS[0], 3)])
    assert book.exclude(MEMBERS[0]) == [3]
    assert book.ask(MEMBERS[1], 3).verdict == "granted"
    assert book.ask(MEMBERS[2], 3).verdict == "conflict"
    book.give_back(3, MEMBERS[1])
    assert book.ask(MEMBERS[2], 3).verdict == "granted"


def test_an_overflow_may_be_claimed_by_another_and_never_again_by_the_same() -> None:
    """Another member says whether the numbers or the first member are to blame."""
    book = ClaimBook(0, Attempt(), MEMBERS)
    book.load([seal(MEMBERS[0], 0, overflow=(1,)), seal(MEMBERS[1], 2)])
    assert book.ask(MEMBERS[0], 1).verdict == "denied"
    assert book.ask(MEMBERS[1], 1).verdict == "granted"
    assert book.ask(MEMBERS[2], 1).holder == MEMBERS[1]


def test_a_ticket_in_two_ledgers_excludes_the_later_member_and_frees_its_others() -> None:
    book = ClaimBook(0, Attempt(), MEMBERS)
    book.load([seal(MEMBERS[0], 0, 1), seal(MEMBERS[1], 1, 2)])
    assert set(book.excluded) == {MEMBERS[1].key}
    assert book.ask(MEMBERS[2], 2).verdict == "granted"
    assert book.ask(MEMBERS[2], 1).verdict == "denied"


def test_a_restarted_member_is_not_what_it_was() -> None:
    book = ClaimBook(0, Attempt(), MEMBERS)
    answer = book.ask(UNKNOWN_NODES[1], 0)
    assert (answer.verdict, answer.reason) == ("denied", "not a member of this stage in this step")
