"""What a step that takes long is at, in words for the trainer's operator: which stages and peers have its tickets, in which job.

Owns the questions and the words; must not know leases or routes.
"""

from __future__ import annotations

import asyncio

from swarm.peer.link import Link
from swarm.wire import messages as m

#: The operator is told after so many seconds without a commit, or twice what the last step took, but `MOST_S` at most, and
#: each time that the wait has become twice as long.
TOLD_AFTER_S, MOST_S = 10.0, 60.0
#: What every step waits for, as the coordinator's words begin; of no use to the operator without more.
AWAITED = ("tickets", "seals", "averages")
#: Stage peers that are asked at most, spread over the stages.
MAX_ASKED = 64
#: Peers of a stage that the words name.
MAX_NAMED = 3


async def whereabouts(link: Link, record: m.CommitRecord, awaited: str) -> str:
    """Ask the peers that `record` lists what they are at.

    Args:
        awaited: what the step after `record` lacks: tickets, seals or averages.
    """
    most = max(1, MAX_ASKED // len(record.members))
    asked = [[x for x in members if x.ready][:most] for members in record.members]
    replies = await asyncio.gather(*(_stage(link, members) for members in asked))
    at_stage = [sum(_in_flight(status) for _, status in stage if status is not None) for stage in replies]
    parts = []
    for number, stage in enumerate(replies):
        below = at_stage[number + 1] if number + 1 < len(at_stage) else 0
        words = _words(stage)
        if at_stage[number] > below or words:
            parts.append(f"{max(0, at_stage[number] - below)} at stage {number}{f' ({words})' if words else ''}")
    return f"{awaited} of step {record.step + 2}: {', '.join(parts) or 'no stage has a ticket'}"


_Replies = list[tuple[m.Member, m.StatusReply | None]]


async def _stage(link: Link, members: list[m.Member]) -> _Replies:
    return list(zip(members, await asyncio.gather(*map(link.status_of, members)), strict=True))


def _in_flight(status: m.StatusReply) -> int:
    number = status.detail.get("in_flight")
    return number if isinstance(number, int) else 0


def _words(stage: _Replies) -> str:
    """Return who does what, and who is silent."""
    told = [(x, "no answer" if status is None else str(status.detail.get("job", ""))[:100]) for x, status in stage]
    busy = [f"peer {x.peer[:8]}: {job}" for x, job in told if job]
    return "; ".join([*busy[:MAX_NAMED], *([f"{len(busy) - MAX_NAMED} more"] if len(busy) > MAX_NAMED else [])])
