"""What a stage's leader knows of its members' links, and the shares and auxiliaries of each round that follow from it.

Owns the last measurements and shares; the decision is `policy/shares.py`. A new leader hears the measurements with the
seals that it collects, so nothing is lost with an old one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from swarm.base.ids import MemberKey
from swarm.policy.shares import Report, choose_auxiliaries, choose_shares, hagenbach_bischoff
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: The steps with trials take at most this part of the time.
TRIAL_PART = 0.05


def _report(offer: m.Assisting) -> Report:
    name, bandwidth = offer.member.peer[:8], offer.bandwidth
    return Report(name, bandwidth, bandwidth, is_auxiliary=True, is_limit=offer.is_limit)


class RoundShares:
    """Chooses the shares of one stage's rounds."""

    def __init__(self, stage: int, *, try_every_s: float) -> None:
        self._stage = stage
        self._try_every_s = try_every_s
        self._links: dict[MemberKey, tuple[float | None, float | None]] = {}
        self._last: dict[MemberKey, float] = {}
        #: Members that only compute, as the newest record has it.
        self._computing: set[MemberKey] = set()
        #: When each that only aggregates is next tried, and since when it is: with a small slice a good line looks bad.
        self._trials: dict[MemberKey, tuple[float, float | None]] = {}
        #: The last auxiliaries, or why there were none.
        self._told = ""
        #: Why the shares, and the auxiliaries, are what they are.
        self.reason = self.auxiliaries_reason = ""

    def heard(self, reply: m.Collected) -> None:
        """Note what a member told, with its seal, that its link carries."""
        self._links[reply.seal.member.key] = (reply.upload, reply.download)

    def keep(self, members: Sequence[m.Member], *, now: float) -> None:
        """Forget everyone but `members`, and note what each does."""
        keys = {x.key for x in members}
        self._computing = {x.key for x in members if x.role == "compute"}
        aggregating = [x.key for x in members if x.role == "aggregate"]
        self._trials = {key: self._trials.get(key, (now + self._try_every_s, None)) for key in aggregating}
        self._links = {key: link for key, link in self._links.items() if key in keys}

    def _line(self, key: MemberKey, now: float) -> tuple[float | None, float | None]:
        """Return what a member's line carries; one that is tried is taken for twice as good as the best."""
        upload, download = self._links.get(key, (None, None))
        due, since = self._trials.get(key, (math.inf, None))
        if since is not None:  # that round is over
            self._trials[key] = now + max(self._try_every_s, (now - since) / TRIAL_PART), None
        elif now >= due:
            self._trials[key] = due, now
            known = [(up, down) for up, down in self._links.values() if up and down]
            return (2 * max(up for up, _ in known), 2 * max(down for _, down in known)) if known else (None, None)
        return upload, download

    def of(
        self,
        seals: Sequence[m.Seal],
        num_elements: int,
        offers: Sequence[m.Assisting] = (),
        *,
        now: float,
        most: int = 0,
        why_none: str = "",
    ) -> tuple[tuple[int, ...], tuple[m.Member, ...]]:
        """Choose how many elements each sealed member and then each auxiliary reduces in the round to come; and the auxiliaries.

        These are chosen among those that made `offers`, at most so many; `why_none` says why there are none.
        """
        members = [
            Report(
                seal.member.peer[:8],
                *self._line(seal.member.key, now),
                computes=bool(seal.ledger),
                reduces=seal.member.key not in self._computing,
            )
            for seal in seals
        ]
        auxiliaries = self._chosen(members, offers, most, why_none)
        keys = [*(seal.member.key for seal in seals), *(offer.member.key for offer in auxiliaries)]
        reports = [*members, *map(_report, auxiliaries)]
        previous = [self._last[key] for key in keys] if set(self._last) == set(keys) else None
        weights, reason = choose_shares(reports, previous)
        if previous is None or list(weights) != previous:
            if reason != self.reason:
                logger.info("stage %d: shares of the average are %s", self._stage, reason)
            self.reason = reason
        self._last = dict(zip(keys, weights, strict=True))
        return tuple(hagenbach_bischoff(num_elements, weights)), tuple(offer.member for offer in auxiliaries)

    def _chosen(self, members: Sequence[Report], offers: Sequence[m.Assisting], most: int, why_none: str) -> list[m.Assisting]:
        before = [offer.member.peer[:8] for offer in offers if offer.member.key in self._last]
        used, reason = choose_auxiliaries(members, [_report(offer) for offer in offers], most=most, before=before)
        reason = reason if offers else f"none: {why_none}"
        auxiliaries = [offers[i] for i in used]
        what = ", ".join(offer.member.peer for offer in auxiliaries) or reason
        if most and what != self._told:
            logger.info("stage %d: auxiliaries: %s", self._stage, reason)
        self._told, self.auxiliaries_reason = what, reason
        return auxiliaries
