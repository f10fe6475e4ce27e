"""The life of one optimizer step at one stage peer: a table, and the ledger with its claims.

The tickets of a `Ledger` are written by the compute thread alone (`add`, `collect`, `revoke`, `discard` run as its jobs),
so that "check the claim, add the gradient, mark the ticket" and "freeze" never interleave. `grant` may come from any
thread: a claim carries the attempt that granted it and is void once the ledger has been collected for another. So may
`transition_in`: the event loop knows how an attempt goes on, and says of which.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from swarm.base.errors import InternalError
from swarm.lifecycle.table import Table
from swarm.wire.messages import Attempt, Member, Seal

#: open: tickets may be accumulated. frozen: sealed for an attempt. averaging: the all-reduce runs. prepared: the average
#: of the attempt is held. committed: the record decided.
STEP = Table(
    "step",
    "open",
    {
        ("open", "open"): "open",
        ("open", "freeze"): "frozen",
        ("frozen", "open"): "open",
        ("frozen", "freeze"): "frozen",
        ("frozen", "reduce"): "averaging",
        ("averaging", "open"): "open",
        ("averaging", "freeze"): "frozen",
        ("averaging", "fail"): "frozen",
        ("averaging", "hold"): "prepared",
        ("prepared", "open"): "open",
        ("prepared", "freeze"): "frozen",
        ("open", "commit"): "committed",
        ("frozen", "commit"): "committed",
        ("averaging", "commit"): "committed",
        ("prepared", "commit"): "committed",
    },
)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What one ticket added: its token count and the sum of its losses (0 except at the last stage)."""

    tokens: int
    loss_sum: float


class Ledger:
    """The tickets whose gradient is inside a peer's accumulator of one step, and the claims it may still use.

    Invariant: a ticket is in `entries` or in `overflow`, never in both, and at most once.
    Invariant: nothing is added unless the state is open and the ticket's claim is of the current attempt.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.state = STEP.initial
        self.attempt = Attempt()
        self.entries: dict[int, LedgerEntry] = {}
        self.overflow: set[int] = set()
        self._claims: dict[int, tuple[int, str, int]] = {}
        #: Revocations so far, and for each ticket the number of its last one.
        self.num_revocations = 0
        self._revoked: dict[int, int] = {}
        self._moving = threading.Lock()

    def __contains__(self, index: int) -> bool:
        return index in self.entries or index in self.overflow

    def grant(self, index: int, attempt: Attempt, *, asked_at: int | None = None) -> None:
        """Note the leader's permission; it counts only while `attempt` is the ledger's.

        Args:
            index: the ticket.
            attempt: the leader's.
            asked_at: `num_revocations` when the claim was asked for. A reply that was overtaken by the claim's revocation
                grants nothing: the leader has given the ticket to another since.
        """
        if asked_at is None or self._revoked.get(index, 0) <= asked_at:
            self._claims[index] = attempt.order

    def may_add(self, index: int) -> bool:
        """Tell whether `index` may be accumulated now."""
        return self.state == "open" and index not in self and self._claims.get(index) == self.attempt.order

    def add(self, index: int, entry: LedgerEntry, *, overflow: bool = False) -> None:
        """Mark `index` as accumulated (or as overflow), in the same job that added its gradient."""
        if not self.may_add(index):
            raise InternalError(f"step {self.step}: ticket {index} may not be added in state {self.state}")
        if overflow:
            self.overflow.add(index)
        else:
            self.entries[index] = entry
        self._claims.pop(index, None)

    def resolve(self, index: int, entry: LedgerEntry, *, overflow: bool) -> None:
        """Note what a device told later of a ticket that `add` marked; nothing if it is not held any more."""
        if index in self.entries:
            self.entries[index] = entry
            if overflow:
                del self.entries[index]
                self.overflow.add(index)

    def revoke(self, index: int) -> bool:
        """Void an unused claim; True if the ticket is already held, so that the claim stays. An overflow is no holding."""
        self.num_revocations += 1
        self._revoked[index] = self.num_revocations
        self._claims.pop(index, None)
        return index in self.entries

    def collect(self, attempt: Attempt, *, freeze: bool) -> None:
        """Void unused claims and move to the attempt `attempt`, open or frozen.

        Raises:
            InternalError: if the attempt is lower than one seen before, or the step has committed.
        """
        if attempt.order < self.attempt.order:
            raise InternalError(f"step {self.step}: attempt {attempt.order} is below {self.attempt.order}")
        with self._moving:
            self.state = STEP.next(self.state, "freeze" if freeze else "open")
            self.attempt = attempt
        self._claims.clear()

    def spoil(self) -> None:
        """Count every ticket of the sum as overflow: their gradients are finite, but the sum is not."""
        self.overflow.update(self.entries)
        self.entries.clear()

    def discard(self) -> None:
        """Forget all tickets and claims: a backward failed halfway, and nothing of this accumulator counts."""
        self.entries.clear()
        self.overflow.clear()
        self._claims.clear()

    def transition(self, event: str) -> None:
        """Move along the table; an event that it does not list raises `InternalError`."""
        with self._moving:
            self.state = STEP.next(self.state, event)

    def transition_in(self, attempt: Attempt, event: str) -> bool:
        """Move along the table if the ledger is still of `attempt`, in a state where `event` may come; False if it is not."""
        with self._moving:
            may = attempt.order == self.attempt.order and STEP.allows(self.state, event)
            if may:
                self.state = STEP.next(self.state, event)
            return may

    def seal(self, member: Member, version_id: str, state_digest: str, saved: tuple[int, ...] = ()) -> Seal:
        """Return what this ledger holds, as the member's part of the attempt."""
        return Seal(
            member=member,
            ledger=tuple(sorted(self.entries)),
            overflow=tuple(sorted(self.overflow)),
            tokens=sum(entry.tokens for entry in self.entries.values()),
            loss_sum=sum(self.entries[index].loss_sum for index in sorted(self.entries)),
            version_id=version_id,
            state_digest=state_digest,
            saved=saved,
        )
