"""Looks at peers in parallel: who does not answer is found in one look's time, however many they are, and remembered.

The shell around `policy/liveness.py`; each `Link` has one, and tells it what becomes of its calls. A call with long patience
that stands still has its peer looked at, and ends when that does not answer either: who is gone is not waited for as who
works slowly is. Must not exclude, ban or choose anybody: those who call do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.base.config import Timing
from swarm.base.errors import LinkBroken, LinkError, RemoteError, Unreachable
from swarm.base.ids import MemberKey
from swarm.net.transport import Progress
from swarm.policy.liveness import Liveness, Stillness
from swarm.wire.framing import Frame
from swarm.wire.messages import Member, StatusReply

#: Looks under way at once, by one peer.
MAX_LOOKS = 128


#: A call that stood still for this part of `stall_s` has its peer looked at.
STILL_PART = 0.25


class _Counted(Progress):
    """Counts what one call moved; whoever waits for it counts too."""

    def __init__(self, counted: Progress | None) -> None:
        super().__init__(among=counted)
        self._counted = counted

    def advance(self, amount: int = 1) -> None:
        super().advance(amount)
        if self._counted is not None:
            self._counted.advance(amount)


@dataclass(eq=False)
class _Call:
    member: Member
    progress: Progress
    stillness: Stillness
    scope: asyncio.Timeout


class Presence:
    """Knows which peers are there, as far as one peer can tell.

    Args:
        status_of: asks a peer how it is; raises as `Link.ask`.
        timing: of the run. A look takes `request_s` at most, and no longer than `stall_s`.
    """

    def __init__(self, status_of: Callable[[Member], Awaitable[StatusReply]], timing: Timing) -> None:
        self._status_of = status_of
        self._look_s = min(timing.request_s, timing.stall_s)
        self._still_s = STILL_PART * timing.stall_s
        self.liveness = Liveness(max_look_s=timing.record_ttl_s)
        self._calls: dict[_Call, None] = {}
        #: Under way: who is looked at already is not looked at twice.
        self._looks: dict[MemberKey, asyncio.Task[bool]] = {}
        self._slots = asyncio.Semaphore(MAX_LOOKS)
        self._woken = asyncio.Event()
        #: Set, and replaced, when a look has ended.
        self._looked = asyncio.Event()

    def failed(self, member: Member, error: LinkError) -> None:
        """Note that a call to `member` failed."""
        now, reason = asyncio.get_running_loop().time(), f"{type(error).__name__}: {error}"[:300]
        if isinstance(error, Unreachable):
            self.liveness.fell_silent(member, reason, now=now)
        else:
            self.liveness.failed(member, reason, now=now)
        self._woken.set()

    def suspect(self, member: Member, reason: str) -> None:
        """Have `member` looked at, which somebody else could not use."""
        self.liveness.suspect(member, reason, now=asyncio.get_running_loop().time())
        self._woken.set()

    def heard(self, member: Member) -> None:
        """Note that `member` did what was asked of it, or that others say so."""
        self.liveness.answered(member.key, now=asyncio.get_running_loop().time())

    async def look(self, member: Member) -> bool:
        """Tell whether this incarnation answers at its address."""
        task = self._begin_look(member)
        await asyncio.wait([task])
        return not task.cancelled() and task.result()

    def _begin_look(self, member: Member) -> asyncio.Task[bool]:
        task = self._looks.get(member.key)
        if task is None:
            name = f"look at {member.peer[:8]}"
            task = self._looks[member.key] = asyncio.get_running_loop().create_task(self._look(member), name=name)
            task.add_done_callback(lambda _: self._looks.pop(member.key, None))
        return task

    async def _look(self, member: Member) -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with self._slots, asyncio.timeout(self._look_s):
                reply = await self._status_of(member)
            reason = "" if reply.member.key == member.key else "another incarnation answers there"
        except TimeoutError:
            reason = f"no answer within {self._look_s:g} s"
        except (LinkError, RemoteError) as error:
            reason = str(error)[:300]
        if reason:
            self.liveness.fell_silent(member, reason, now=loop.time())
            self._give_up_on(member)
        else:
            self.liveness.answered(member.key, now=loop.time())
        self._woken.set()
        self._looked.set()
        self._looked = asyncio.Event()
        return not reason

    async def watched(self, member: Member, call: Callable[[Progress], Awaitable[Frame]], progress: Progress | None) -> Frame:
        """Return the result of `call` to `member`, whose patience is long.

        Raises:
            LinkBroken: it stood still, and `member` did not answer a look.
        """
        counted = _Counted(progress)
        scope = asyncio.timeout(None)
        watched = _Call(member, counted, Stillness(self._still_s, asyncio.get_running_loop().time()), scope)
        self._calls[watched] = None
        try:
            async with scope:
                return await call(counted)
        except TimeoutError:
            if not scope.expired():
                raise
            raise LinkBroken(f"{member.host}:{member.port}: {self.liveness.why(member.key)}") from None
        finally:
            del self._calls[watched]

    def _suspect_still_ones(self, now: float) -> None:
        for call in self._calls:
            if call.stillness.take_due(call.progress.count, now=now):
                self.liveness.suspect(call.member, "a call stands still", now=now)

    def _give_up_on(self, member: Member) -> None:
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if call.member.key == member.key and call.stillness.observe(call.progress.count, now=now):
                call.scope.reschedule(now)

    async def look_ended(self) -> None:
        """Wait until somebody was looked at; for so long at most as a look takes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_s):
                await self._looked.wait()

    async def answering(self, members: Sequence[Member]) -> list[Member]:
        """Return those of `members` that answer now, in the same order."""
        answers = await asyncio.gather(*(self.look(member) for member in members))
        return [member for member, answers_now in zip(members, answers, strict=True) if answers_now]

    async def keep_looking(self) -> None:
        """Look at whoever is suspected, and again at those that are silent, for ever."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._woken.clear()
                self._suspect_still_ones(loop.time())
                room = max(0, MAX_LOOKS - len(self._looks))
                for member in self.liveness.due(now=loop.time(), limit=room, timeout_s=2 * self._look_s):
                    self._begin_look(member)
                next_at = min(self.liveness.next_look_at, loop.time() + self._still_s / 2)
                try:
                    async with asyncio.timeout_at(max(next_at, loop.time() + 0.01)):
                        await self._woken.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._looks.values():
                task.cancel()


class Candidates:
    """Peers of which one is enough, in order: silent ones are left out, and after one that fails all others are looked at."""

    def __init__(self, presence: Presence, members: Sequence[Member]) -> None:
        self._presence = presence
        self._members = members
        liveness = presence.liveness
        heard = [x for x in members if not liveness.is_silent(x.key)]
        self._left = sorted(heard or members, key=lambda x: liveness.is_suspected(x.key))
        self._tried: list[Member] = []

    async def next(self, also: Sequence[Member] = ()) -> Member | None:
        """Return whom to ask now; None if nobody is left. A call to the one before has failed, by its own or by the link's fault.

        When the others are looked at, those of `also` that are not silent are, too.
        """
        is_suspected, is_silent = self._presence.liveness.is_suspected, self._presence.liveness.is_silent
        if self._tried and is_suspected(self._tried[-1].key):
            self._left = [x for x in self._left if not is_silent(x.key)]
            if self._left:
                await self._presence.answering([*self._left, *(x for x in also if not is_silent(x.key))])
            self._left = [x for x in self._left if not is_silent(x.key)]
        elif self._left and is_suspected(self._left[0].key):
            self._left = await self._presence.answering(self._left)
        if not self._left:
            return None
        self._tried.append(self._left.pop(0))
        return self._tried[-1]

    def left_out(self) -> list[tuple[Member, str]]:
        """Return who was not asked, and why not."""
        tried = {x.key for x in self._tried}
        return [(x, self._presence.liveness.why(x.key) or "not asked") for x in self._members if x.key not in tried]
