"""A stage peer for `recovery.py` that dies (SIGKILL) at a chosen point of one averaging round.

It is `launch_stage` with a transport that watches what passes, and so knows how far the round is; the peer itself does not
know of it. Every peer of the stage is started alike: which of them dies is decided by its part in the round.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch import stage
from launch.processes.reports import NO_REPORTS, Reports
from launch.run import composing
from swarm.base.ids import Address
from swarm.net.http.transport import HttpTransport
from swarm.net.transport import Handler, Progress
from swarm.wire import messages as m
from swarm.wire.framing import Frame, encode_head

OPTION = "--die"
BEFORE, SENDING, SENT, HOLDING = "before its round", "slices go out", "slices out, sums not in", "holds the average"
PHASES = (BEFORE, SENDING, SENT, HOLDING)
LEADER, MEMBER = "leader", "member"


@dataclass(frozen=True)
class Death:
    """When, and who: the stage's leader, or the last in order of the others."""

    step: int
    phase: str
    who: str
    #: Gets one JSON line with the time (of the system's monotonic clock) and how far the round was.
    note: str
    #: Only notes it.
    is_survived: bool = False

    def words(self) -> list[str]:
        """For the peer's command line."""
        return [OPTION, json.dumps(asdict(self))]

    def write(self, **values: Any) -> bool:
        """False if somebody has: one dies, and not who then takes its part."""
        try:
            with open(self.note, "x") as note:
                note.write(json.dumps({"at": time.monotonic(), **values}))
        except FileExistsError:
            return False
        return True

    def read(self) -> dict[str, Any] | None:
        """None if nobody came to that point."""
        note = Path(self.note)
        return json.loads(note.read_text()) if note.exists() else None


class MortalTransport(HttpTransport):
    """Dies as `death` says. A leader's own messages to itself do not pass here: it is told to average, and tells the end."""

    def __init__(self, death: Death, **options: Any) -> None:
        super().__init__(**options)
        self._death = death
        self._leader: m.Member | None = None
        self._is_victim = False
        self._own_bytes = 0  # of this member's slices, from the moment that their number is known
        self._slices = {"asked": 0, "written": 0, "answered": 0}
        self._written_bytes = 0

    async def start(self, handler: Handler) -> None:
        async def watched(frame: Frame, progress: Progress) -> Frame:
            message = frame.message
            if getattr(message, "step", None) == self._death.step:
                self._comes(message)
            reply = await handler(frame, progress)
            is_end = isinstance(reply.message, m.Reduced) and reply.message.sum_digest
            if self._is_victim and (is_end or (isinstance(reply.message, m.AllReduced) and reply.message.result)):
                self._at(HOLDING)
            return reply

        await super().start(watched)

    def _comes(self, message: m.Message) -> None:
        if isinstance(message, m.Collect):
            self._leader = message.leader
        elif isinstance(message, m.AllReduce) and self._death.who == LEADER:
            self._take_part()
        elif isinstance(message, m.Reduce) and self._death.who == MEMBER:
            others = [x.member for x in message.seals if self._leader is None or x.member.key != self._leader.key]
            last = max(others, key=lambda member: member.key)
            if self._is_me(last):
                self._sees_shares(message)
                self._take_part()

    def _is_me(self, member: m.Member) -> bool:
        return (member.host, member.port) == tuple(self.address)

    def _take_part(self) -> None:
        self._is_victim = True
        self._at(BEFORE)

    def _sees_shares(self, message: m.Reduce) -> None:
        mine = next(i for i, seal in enumerate(message.seals) if self._is_me(seal.member))
        self._own_bytes = 4 * (sum(message.shares) - message.shares[mine])

    async def call(self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None) -> Frame:
        message = request.message
        if not self._is_victim or getattr(message, "step", None) != self._death.step:
            return await super().call(address, request, stall_s=stall_s, progress=progress)
        if isinstance(message, m.Reduce):
            self._sees_shares(message)
        if not isinstance(message, m.Slice):
            return await super().call(address, request, stall_s=stall_s, progress=progress)
        self._slices["asked"] += 1
        num_bytes = sum(memoryview(buffer).nbytes for buffer in request.buffers)
        watching = _Watching(len(encode_head(request)) + num_bytes, lambda: self._written(num_bytes), progress or Progress())
        reply = await super().call(address, request, stall_s=stall_s, progress=watching)
        self._slices["answered"] += 1
        return reply

    def _written(self, num_bytes: int) -> None:
        self._slices["written"] += 1
        self._written_bytes += num_bytes
        if 2 * self._written_bytes >= self._own_bytes:
            self._at(SENDING)
        if self._written_bytes >= self._own_bytes:
            self._at(SENT)

    def _at(self, phase: str) -> None:
        if phase != self._death.phase:
            return
        if self._death.write(peer=self.address.port, **self._slices) and not self._death.is_survived:
            os.kill(os.getpid(), signal.SIGKILL)


class _Watching(Progress):
    """Passes on what moves for a request, and tells when all of the request has been written."""

    def __init__(self, request_bytes: int, on_written: Any, progress: Progress) -> None:
        super().__init__()
        self._left = request_bytes
        self._on_written = on_written
        self._progress = progress

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(amount)

    def moved(self, num_bytes: int) -> None:
        self._progress.moved(num_bytes)
        if self._left > 0:
            self._left -= num_bytes
            if self._left <= 0:
                self._on_written()


def main(argv: Sequence[str], reports: Reports = NO_REPORTS) -> int:
    words = list(argv)
    at = words.index(OPTION)
    death = Death(**json.loads(words[at + 1]))
    composing.HttpTransport = functools.partial(MortalTransport, death)  # type: ignore[assignment,misc]
    return stage.main(words[:at] + words[at + 2 :], reports)
