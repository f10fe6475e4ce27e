"""A stage leader's book of claims for one step and attempt. Pure; the leader's shell asks holders to give claims back.

Invariant: at most one member holds the claim on a ticket, and a ticket in a member's ledger stays that member's until
the member is excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from swarm.base.ids import MemberKey
from swarm.wire.messages import Attempt, Member, Seal


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer to a claim: `granted`, `denied` for good, or `conflict`: ask `holder` to give its unused claim back first."""

    verdict: Literal["granted", "denied", "conflict"]
    reason: str = ""
    holder: Member | None = None


class ClaimBook:
    """Who may accumulate, or has accumulated, each ticket of one step at one stage."""

    def __init__(
        self,
        step: int,
        attempt: Attempt,
        members: Iterable[Member],
        *,
        excluded: Mapping[MemberKey, Member] | None = None,
        is_collected: bool = True,
    ) -> None:
        self.step = step
        self.attempt = attempt
        self.members: dict[MemberKey, Member] = {member.key: member for member in members}
        self.excluded: dict[MemberKey, Member] = dict(excluded or {})
        self._holder: dict[int, MemberKey] = {}
        self._ledgered: set[int] = set()
        self._overflowed: dict[int, set[MemberKey]] = {}
        #: False from the start of a collection until `load`: a grant meanwhile would be forgotten by `load`, and the
        #: ticket granted twice.
        self.is_collected = is_collected

    def load(self, seals: Iterable[Seal]) -> None:
        """Take over the ledgers that a collection returned; unused claims from before are void.

        A ticket that two ledgers hold would be counted twice, so the later member is excluded. An overflow is no holding:
        another member may claim the ticket, to say whether the numbers or the first member are to blame.
        """
        self.is_collected = True
        self._holder.clear()
        self._ledgered.clear()
        self._overflowed.clear()
        for seal in seals:
            if any(index in self._ledgered for index in seal.ledger):
                self.excluded[seal.member.key] = seal.member
                continue
            for index in seal.ledger:
                self._holder[index] = seal.member.key
                self._ledgered.add(index)
            for index in seal.overflow:
                self._overflowed.setdefault(index, set()).add(seal.member.key)

    def ask(self, member: Member, index: int) -> ClaimAnswer:
        """Answer the claim of one member on one ticket."""
        if not self.is_collected:
            return ClaimAnswer("denied", "the ledgers are being collected")
        if member.key not in self.members:
            return ClaimAnswer("denied", "not a member of this stage in this step")
        if member.key in self.excluded:
            return ClaimAnswer("denied", "excluded for this step")
        if member.key in self._overflowed.get(index, ()):
            return ClaimAnswer("denied", "overflowed at this member before")
        holder = self._holder.get(index)
        if holder is None:
            self._holder[index] = member.key
            return ClaimAnswer("granted")
        if index in self._ledgered:
            return ClaimAnswer("denied", "already in a ledger")
        if holder == member.key:
            return ClaimAnswer("granted")
        return ClaimAnswer("conflict", "claimed by another member", self.members[holder])

    def give_back(self, index: int, holder: Member) -> None:
        """Note that `holder` gave its unused claim back."""
        if self._holder.get(index) == holder.key and index not in self._ledgered:
            del self._holder[index]

    def mark_held(self, index: int, holder: Member) -> None:
        """Note that `holder` said that the ticket is in its ledger."""
        if self._holder.get(index) == holder.key:
            self._ledgered.add(index)

    def exclude(self, member: Member) -> list[int]:
        """Exclude a member for this step and free its tickets; returns them."""
        self.excluded[member.key] = member
        freed = sorted(index for index, key in self._holder.items() if key == member.key)
        for index in freed:
            del self._holder[index]
            self._ledgered.discard(index)
        return freed
