"""What the seals of one stage cover. Pure; used by the leader for its result and by the coordinator for its decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.base.errors import InternalError
from swarm.wire.messages import MAX_SAVED, Attempt, Member, Seal, StageResult, TiedDigests


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is known of the tickets at one stage.

    Invariant: `held` and `overflow` are disjoint; each held ticket is in exactly one ledger (promise 1).
    """

    held: frozenset[int]
    #: Not finite according to two members, or to the only one that could be asked.
    overflow: frozenset[int]
    #: Not finite according to one member; another should be asked. Ticket -> peer ids that said so.
    unconfirmed: dict[int, frozenset[str]]
    #: Peers that called a ticket overflow which another found finite: one of them, or one after them on the route, is to blame.
    blamed: frozenset[str]

    @property
    def covered(self) -> frozenset[int]:
        """The tickets that need not be computed again."""
        return self.held | self.overflow


def coverage_of(seals: Iterable[Seal]) -> Coverage:
    """Compare the seals of one stage.

    Raises:
        InternalError: if a ticket is in two ledgers.
    """
    seals = list(seals)
    held: set[int] = set()
    said: dict[int, set[str]] = {}
    for seal in seals:
        twice = held.intersection(seal.ledger)
        if twice:
            raise InternalError(f"tickets {sorted(twice)} are in two ledgers of one stage")
        held.update(seal.ledger)
        for index in seal.overflow:
            said.setdefault(index, set()).add(seal.member.peer)
    could_be_asked = sum(seal.member.ready for seal in seals)
    open_ = {index: peers for index, peers in said.items() if index not in held}
    confirmed = {index for index, peers in open_.items() if len(peers) >= min(2, could_be_asked)}
    return Coverage(
        held=frozenset(held),
        overflow=frozenset(confirmed),
        unconfirmed={index: frozenset(peers) for index, peers in open_.items() if index not in confirmed},
        blamed=frozenset(peer for index, peers in said.items() if index in held for peer in peers),
    )


def covered_by_all(stages: Sequence[Coverage]) -> frozenset[int]:
    """Return the tickets that every one of `stages` covers."""
    return stages[0].covered.intersection(*(stage.covered for stage in stages[1:]))


def stage_result(
    attempt: Attempt,
    seals: tuple[Seal, ...],
    digest: str,
    sum_squares: float,
    holders: tuple[Member, ...],
    *,
    tied: TiedDigests = (),
) -> StageResult:
    """Return what a stage contributes to the commit record, from the seals of the attempt that was averaged."""
    coverage = coverage_of(seals)
    return StageResult(
        attempt=attempt,
        sum_digest=digest,
        sum_squares=sum_squares,
        num_tickets=len(coverage.covered),
        num_overflow=len(coverage.overflow),
        tokens=sum(seal.tokens for seal in seals),
        loss_sum=sum(seal.loss_sum for seal in seals),
        holders=holders,
        tied=tied,
        saved=tuple(sorted({step for seal in seals for step in seal.saved})[-MAX_SAVED:]),
    )


def torn_tie(results: Iterable[StageResult]) -> str:
    """Return the name of a tied parameter whose sums differ between stages, or "".

    Copies of one parameter stay the same bits only if every stage takes the same sum: averages of different attempts
    do not belong together.
    """
    known: dict[str, str] = {}
    for result in results:
        for name, digest in result.tied:
            if known.setdefault(name, digest) != digest:
                return name
    return ""
