"""What a stage's leader knows of its members' links, and the shares of each round that follow from it.

Owns the last measurements and shares; the decision is `policy/shares.py`. A new leader hears the measurements with the
seals that it collects, so nothing is lost with an old one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from swarm.policy.shares import Report, choose_shares, hagenbach_bischoff
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

Key = tuple[str, str]


class RoundShares:
    """Of one stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._links: dict[Key, tuple[float | None, float | None]] = {}
        self._last: dict[Key, float] = {}
        #: Why the shares are what they are.
        self.reason = ""

    def heard(self, reply: m.Collected) -> None:
        """A member told, with its seal, what its link carries."""
        self._links[reply.seal.member.key] = (reply.upload, reply.download)

    def keep(self, members: Sequence[m.Member]) -> None:
        """Forget everyone else."""
        keys = {x.key for x in members}
        self._links = {key: link for key, link in self._links.items() if key in keys}

    def of(self, seals: Sequence[m.Seal], num_elements: int) -> tuple[int, ...]:
        """Elements that each sealed member reduces in the round to come."""
        keys = [seal.member.key for seal in seals]
        reports = [
            Report(seal.member.peer[:8], *self._links.get(seal.member.key, (None, None)), computes=bool(seal.ledger))
            for seal in seals
        ]
        previous = [self._last[key] for key in keys] if set(self._last) == set(keys) else None
        weights, reason = choose_shares(reports, previous)
        if previous is None or list(weights) != previous:
            if reason != self.reason:
                logger.info("stage %d: shares of the average are %s", self._stage, reason)
            self.reason = reason
        self._last = dict(zip(keys, weights, strict=True))
        return tuple(hagenbach_bischoff(num_elements, weights))
