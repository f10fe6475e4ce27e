"""What a candidate does that everybody accepts who is there, while a stage has nobody: it waits in the coordinator's place.

It holds no leadership, leases nothing and decides nothing. Whoever asks learns which stages are waited for. Other candidates
find it and do not out-bid it. It stands again once a member of those stages answers. Must not know what an election asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm.base.ids import Ballot, MemberKey
from swarm.peer.coordinator.run_leadership import Rosters
from swarm.peer.link import Link
from swarm.wire import messages as m

#: What a peer says of itself while it waits in the coordinator's place.
WAITING_STATE = "waiting"
#: Announced peers of one stage that are asked at once whether they are there.
MAX_ASKED = 16
#: A candidacy that fails as the one before did comes so long after it, in seconds, and each time twice as long, to this bound.
FIRST_AGAIN_S = 1.0
LAST_AGAIN_S = 120.0


def in_words(stages: Sequence[int]) -> str:
    """Return what the run waits for while nobody serves `stages`."""
    names = ", ".join(map(str, stages))
    return f"a live member of stage{'s' if len(stages) > 1 else ''} {names}: without one no coordinator is elected"


class BackOff:
    """Tells how long a candidate waits between candidacies that fail for one reason."""

    def __init__(self) -> None:
        self._reason = ""
        self._again_s = FIRST_AGAIN_S

    def failed(self, reason: str = "") -> float:
        """Return the most seconds to wait now; an empty reason is the same as the one before."""
        if reason and reason != self._reason:
            self._reason, self._again_s = reason, FIRST_AGAIN_S
        again_s, self._again_s = self._again_s, min(LAST_AGAIN_S, 2 * self._again_s)
        return again_s

    def forget(self) -> None:
        """Begin with short waits again."""
        self._reason, self._again_s = "", FIRST_AGAIN_S


async def answering_members(link: Link, rosters: Rosters, stages: Sequence[int]) -> dict[int, set[MemberKey]]:
    """Return the announced peers of `stages` that answer and serve them, by stage; a few of each are asked."""
    lists = await rosters()
    asked: dict[MemberKey, m.Member] = {}  # one that has moved may be announced at two stages
    for stage in stages:
        asked |= {x.key: x for x in link.context.rng.sample(lists[stage], min(len(lists[stage]), MAX_ASKED))}
    there: dict[int, set[MemberKey]] = {stage: set() for stage in stages}
    for reply in await asyncio.gather(*map(link.status_of, asked.values())):
        if reply is not None and reply.stage in there:
            there[reply.stage].add(reply.member.key)
    return there


class Candidacy:
    """One candidate's wait, from the election with `ballot` in which nobody answered for the stages `missing`."""

    def __init__(self, link: Link, ballot: Ballot, missing: Sequence[int]) -> None:
        self._coordinator_s = link.context.config.timing.coordinator_s
        self.ballot = ballot
        self.missing = missing
        self.waiting_for = in_words(missing)

    async def on_lease(self, message: m.Lease) -> m.Leased:
        """Answer a trainer: there is nothing to do. It is held open for a while, as by a coordinator that has no tickets."""
        if message.want and not message.leaving:
            await asyncio.sleep(self._coordinator_s / 3)
        return m.Leased(ballot=self.ballot, waiting_for=self.waiting_for)

    def on_join(self) -> m.Joining:
        """Answer a stage peer that wants to be listed: it has to wait."""
        return m.Joining(waiting_for=self.waiting_for)

    def on_place(self) -> m.Placed:
        """Send a newcomer where nobody is."""
        return m.Placed(stage=self.missing[0], reason=f"stage {self.missing[0]} has nobody")
