"""What a trainer asks and tells the stage peers about their lines: what newcomers know of theirs, and what it has seen.

Owns those messages and when they are sent. What is measured and decided is in `policy/occupancy.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from swarm.base.errors import LinkError, RemoteError
from swarm.base.ids import Address, MemberKey
from swarm.peer.link import Link, Tasks
from swarm.peer.trainer.wiring import Wiring
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: A peer is told at most once in so many seconds, and only if its line seems to carry so much more or less than it was told,
#: or if it gets tickets now and got none before, or the other way round.
TELL_EVERY_S = 10.0
CHANGED = 0.2


@dataclass(frozen=True, slots=True)
class _Note:
    bytes_per_s: float
    reason: str
    at: float

    def is_news_after(self, other: _Note | None) -> bool:
        if other is None:
            return bool(self.bytes_per_s or self.reason)
        if self.at - other.at < TELL_EVERY_S:
            return False
        is_other_line = abs(self.bytes_per_s - other.bytes_per_s) > CHANGED * other.bytes_per_s
        return is_other_line or bool(self.reason) != bool(other.reason)


class PeerNotes:
    """Asks and tells for one trainer, each time that a step has committed."""

    def __init__(self, link: Link, tasks: Tasks, wiring: Wiring) -> None:
        self._link = link
        self._tasks = tasks
        self._wiring = wiring
        self._sent: dict[tuple[int, MemberKey], _Note] = {}
        self._asked: set[tuple[int, MemberKey]] = set()
        #: Why each peer that got no ticket of the newest step got none, for the operator.
        self.left_out: dict[str, str] = {}

    def set_record(self, record: m.CommitRecord) -> None:
        """Take over the newest record: its newcomers are asked, and everyone is told what is new to it."""
        wiring = self._wiring
        wiring.set_record(record)
        now = asyncio.get_running_loop().time()
        left_out: dict[str, str] = {}
        listed: set[tuple[int, MemberKey]] = set()
        for stage in range(self._link.context.config.num_stages):
            members = wiring.members(stage)
            listed |= {(stage, key) for key in members}
            reasons = wiring.occupancy.take_reasons(stage)
            left_out |= {f"{key[0][:8]} of stage {stage}": reason for key, reason in reasons.items()}
            for key, member in members.items() if len(members) > 1 else ():
                if (stage, key) not in self._asked:
                    self._tasks.start(self._ask(stage, member), f"line of {key[0][:8]}")
                note = _Note(wiring.occupancy.bytes_per_s(stage, key) or 0.0, reasons.get(key, ""), now)
                if note.is_news_after(self._sent.get((stage, key))):
                    self._sent[stage, key] = note
                    self._tasks.start(self._tell(stage, member, note), f"note to {key[0][:8]}")
        self._asked = listed
        self._sent = {place: note for place, note in self._sent.items() if place in listed}
        for who in left_out.keys() - self.left_out.keys():
            logger.info("%s gets no tickets: %s", who, left_out[who])
        self.left_out = left_out

    async def _ask(self, stage: int, member: m.Member) -> None:
        """Learn what a newcomer knows of its line, from averages or from other trainers."""
        try:
            reply, _ = await self._link.ask(Address(member.host, member.port), m.Status(), m.StatusReply)
        except (LinkError, RemoteError):
            return  # it is not known then: the first ticket tells
        told = reply.detail.get("line_bytes_per_s")
        if reply.member.key == member.key and isinstance(told, (int, float)):
            self._wiring.occupancy.expect(stage, member.key, float(told), now=asyncio.get_running_loop().time())

    async def _tell(self, stage: int, member: m.Member, note: _Note) -> None:
        me = self._link.context
        message = m.SeenLine(run=me.run, stage=stage, trainer=me.peer, bytes_per_s=note.bytes_per_s, reason=note.reason)
        try:
            await self._link.ask(Address(member.host, member.port), message, m.Ack)
        except (LinkError, RemoteError) as error:
            logger.debug("%s was not told of its line: %s", member.peer[:8], error)
