"""A stage leader's shell: grants claims, collects ledgers, runs the all-reduce. Any member may be told to lead.

Owns the claim books; the rules are pure and live in `lifecycle/claims.py`. Must not decide a step: the coordinator does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from swarm.averaging.reduction import num_chunks_of
from swarm.base.errors import LinkError, RemoteError, Stalled
from swarm.base.ids import MemberKey
from swarm.lifecycle.claims import ClaimBook
from swarm.lifecycle.coverage import stage_result
from swarm.net.transport import Progress
from swarm.peer.link import Refuse, RefusedBy, together
from swarm.peer.stage.auxiliaries import Auxiliaries
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.round_shares import RoundShares
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.stage_member import StageMember
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


class StageLeader:
    """Serves `Claim`, `Gather` and `AllReduce`."""

    def __init__(self, context: StageContext, committed: CommittedState, member: StageMember) -> None:
        self._context = context
        self._committed = committed
        self._member = member
        self._books: dict[int, ClaimBook] = {}
        self.shares = RoundShares(context.stage, try_every_s=context.config.timing.rebalance_every_s)
        self._auxiliaries = Auxiliaries(context)
        #: Of the newest round that all completed.
        self._round_s: float | None = None
        #: Set, and replaced, when a collection has ended.
        self._collection_ended = asyncio.Event()
        context.link.register(m.Claim, self._on_claim)
        context.link.register(m.Gather, self._on_gather)
        context.link.register(m.AllReduce, self._on_all_reduce)

    def forget(self, record: m.CommitRecord) -> None:
        """Close the books up to the step of `record`, which has committed: nobody claims its tickets any more."""
        for step in [s for s in self._books if s <= record.step]:
            del self._books[step]

    def _book(self, step: int) -> ClaimBook:
        """Return the book of `step`; the record's first ready member leads without being told, at the zero attempt."""
        book = self._books.get(step)
        if book is None:
            leader = self._member.leader_of(step)
            if leader is None or leader.key != self._context.me.key:
                raise Refuse("wrong_state", "this peer does not lead the stage")
            book = self._books[step] = ClaimBook(step, m.Attempt(), self._member.members_for(step))
        return book

    async def _on_claim(self, message: m.Claim, frame: Frame, progress: Progress) -> m.Claimed:
        self._context.require_stage(message.stage)
        self._member.at_work.follow(progress, waits_s=self._context.config.timing.request_s)
        await self._committed.caught_up(message.step)  # the sender may have heard of the newest record first
        self._member.step_state(message.step)  # refuses steps that are over or too far ahead
        book = await self._collected_book(message.step)
        if message.attempt.order != book.attempt.order:
            raise Refuse("wrong_state", f"claims are granted at attempt {book.attempt.order}, not {message.attempt.order}")
        granted = []
        reason = ""
        for index in message.indexes:
            if index >= self._context.config.tickets_per_step:
                raise Refuse("bad_request", f"a step has {self._context.config.tickets_per_step} tickets")
            answer = book.ask(message.member, index)
            if answer.verdict == "conflict" and answer.holder is not None:
                await self._take_back(book, index, answer.holder, progress)
                answer = book.ask(message.member, index)
            if answer.verdict == "granted":
                granted.append(index)
            else:
                reason = answer.reason
        return m.Claimed(attempt=book.attempt, granted=tuple(granted), reason=reason)

    async def _collected_book(self, step: int) -> ClaimBook:
        """Return the book once a collection under way has ended. One that was given up, with its coordinator, never does."""
        try:
            async with asyncio.timeout(self._context.config.timing.request_s):
                while not (book := self._book(step)).is_collected:
                    await self._collection_ended.wait()
        except TimeoutError:
            raise Refuse("wrong_state", "the ledgers are being collected") from None
        return book

    async def _take_back(self, book: ClaimBook, index: int, holder: m.Member, progress: Progress) -> None:
        """Ask the holder for its unused claim; one that does not answer, or refuses, is excluded for this step."""
        request = m.Revoke(
            run=self._context.link.context.run, stage=self._context.stage, step=book.step, attempt=book.attempt, index=index
        )
        try:
            reply, _ = await self._context.link.ask(holder, request, m.Revoked, progress=progress)
        except (LinkError, RemoteError) as error:
            self._exclude(book, holder, str(error))
            if isinstance(error, LinkError):
                await self._exclude_silent(book)
            return
        if reply.held:
            book.mark_held(index, holder)
        else:
            book.give_back(index, holder)

    def _exclude(self, book: ClaimBook, holder: m.Member, reason: str) -> None:
        freed = book.exclude(holder)
        logger.info("step %d: %s excluded, %d tickets freed: %s", book.step, holder.peer[:8], len(freed), reason)

    async def _exclude_silent(self, book: ClaimBook) -> None:
        """Look at all members at once, as others may be gone with the holder that does not answer, not at one for each ticket."""
        me, presence = self._context.me.key, self._context.link.presence
        others = [x for x in book.members.values() if x.key not in book.excluded and x.key != me]
        there = {x.key for x in await presence.answering(others)}
        for member in others:
            if member.key not in there and member.key not in book.excluded:
                self._exclude(book, member, presence.liveness.why(member.key))

    async def _on_gather(self, message: m.Gather, frame: Frame, progress: Progress) -> m.Gathered:
        context, member = self._context, self._member
        context.require_stage(message.stage)
        if not any(x.key == context.me.key for x in message.members):
            raise Refuse("not_member", "another incarnation of this peer was meant")
        member.accept_ballot(message.attempt.ballot)
        member.step_state(message.step)
        known = self._books.get(message.step)
        if known is not None and message.attempt.order < known.attempt.order:
            raise Refuse("wrong_state", f"attempt {known.attempt.order} has begun")
        excluded = {x.key: x for x in message.excluded}
        if known is not None and context.me.key not in known.excluded:
            excluded |= known.excluded  # for the whole step, unless the coordinator has nobody left and tries everyone again
        book = ClaimBook(message.step, message.attempt, message.members, excluded=excluded, is_collected=False)
        self._books[message.step] = book
        self.shares.keep(message.members, now=asyncio.get_running_loop().time())
        self._auxiliaries.ask(message)
        asked = [x for x in message.members if x.key not in book.excluded]
        replies = [r for r in await together(*(self._collect(message, book, x, progress) for x in asked)) if r is not None]
        seals = [reply.seal for reply in replies]
        if self._books.get(message.step) is not book:
            raise Refuse("wrong_state", "a newer attempt began")
        self._compare(book, seals)
        seals = [s for s in seals if s.member.key not in book.excluded]
        book.load(seals)
        self._collection_ended.set()
        self._collection_ended = asyncio.Event()
        return m.Gathered(
            seals=tuple(s for s in seals if s.member.key not in book.excluded),
            excluded=tuple(book.excluded.values()),
            loads=tuple(reply.load for reply in replies if reply.load is not None),
        )

    async def _collect(self, message: m.Gather, book: ClaimBook, target: m.Member, progress: Progress) -> m.Collected | None:
        request = m.Collect(
            run=message.run,
            stage=message.stage,
            step=message.step,
            attempt=message.attempt,
            freeze=message.freeze,
            leader=self._context.me,
        )
        try:
            reply, _ = await self._context.link.ask(target, request, m.Collected, progress=progress)
        except RefusedBy as refused:
            if refused.code in ("lower_ballot", "stale"):
                raise  # the coordinator, or this leader, is what is out of date
            error: Exception = refused
        except (LinkError, RemoteError) as failure:
            error = failure
        else:
            if reply.seal.member.key == target.key:
                self.shares.heard(reply)
                return reply
            error = RemoteError("another incarnation answers there")
        book.exclude(target)
        logger.info("step %d: %s excluded: %s", message.step, target.peer[:8], error)
        return None

    def _compare(self, book: ClaimBook, seals: list[m.Seal]) -> None:
        """Exclude replicas whose state differs from their peers': they must not contribute, and will resynchronise."""
        digests = [s.state_digest for s in seals if s.state_digest and s.version_id == self._committed.versions.newest.version_id]
        if len(set(digests)) < 2:
            return
        mine = self._committed.state_digest
        most, count = Counter(digests).most_common(1)[0]
        agreed = most if count * 2 > len(digests) or not mine else mine
        for seal in seals:
            if (
                seal.state_digest
                and seal.version_id == self._committed.versions.newest.version_id
                and seal.state_digest != agreed
            ):
                logger.error("step %d: state of %s differs from its peers'; excluded", book.step, seal.member.peer[:8])
                book.exclude(seal.member)

    async def _on_all_reduce(self, message: m.AllReduce, frame: Frame, progress: Progress) -> m.AllReduced:
        self._context.require_stage(message.stage)
        self._member.accept_ballot(message.attempt.ballot)
        progress.follow(lambda: self._context.background.finished)
        targets = [seal.member for seal in message.seals]
        offers = await self._auxiliaries.offers(message.attempt)
        shares, auxiliaries = self.shares.of(
            message.seals,
            self._context.compute.layout.num_elements,
            offers,
            now=asyncio.get_running_loop().time(),
            most=self._context.config.auxiliaries,
            why_none=self._auxiliaries.why_none,
        )
        request = m.Reduce(
            run=message.run,
            stage=message.stage,
            step=message.step,
            attempt=message.attempt,
            seals=message.seals,
            shares=shares,
            num_chunks=num_chunks_of(None if auxiliaries else self._round_s),
            attempts=message.attempts,
            auxiliaries=auxiliaries,
        )
        began = asyncio.get_running_loop().time()
        replies = await self._reduce_all(request, targets, progress)
        holders: dict[str, list[m.Member]] = {}
        suspects: Counter[MemberKey] = Counter()
        reasons: list[str] = []
        stalled: list[m.Member] = []
        squares = 0.0
        tied: m.TiedDigests = ()
        for target, reply in zip((*targets, *auxiliaries), replies, strict=True):
            if isinstance(reply, m.Reduced):
                if reply.sum_digest and target not in auxiliaries:
                    holders.setdefault(reply.sum_digest, []).append(target)
                    squares, tied = reply.sum_squares, reply.tied
                suspects.update(x.key for x in reply.suspects)
                if reply.reason:
                    reasons.append(f"{target.peer[:8]}: {reply.reason}")
            else:
                if not isinstance(reply, Stalled):  # that may only mean that it waited for a suspect
                    suspects[target.key] += len(targets)
                stalled += [target] if isinstance(reply, Stalled) else []
                reasons.append(f"{target.peer[:8]}: {reply}")
        if len(holders) > 1:
            reasons.append("members hold different averages")
        everyone_holds = [len(who) for who in holders.values()] == [len(targets)]
        if everyone_holds:
            self._round_s = asyncio.get_running_loop().time() - began
        if not suspects and not everyone_holds:
            suspects.update(x.key for x in stalled)
        for_their_sake = self._auxiliaries.judge(message.step, auxiliaries, suspects, everyone_holds=everyone_holds)
        if len(holders) == 1 and not for_their_sake:
            digest, who = next(iter(holders.items()))
            result = stage_result(message.attempt, message.seals, digest, squares, tuple(who), tied=tied)
            return m.AllReduced(result=result, reason="; ".join(reasons)[:2000])
        ordered = [x for x in targets if x.key in suspects and not for_their_sake]
        ordered.sort(key=lambda x: -suspects[x.key])
        return m.AllReduced(suspects=tuple(ordered), reason="; ".join(reasons)[:2000])

    async def _reduce_all(self, request: m.Reduce, members: list[m.Member], progress: Progress) -> list[m.Reduced | Exception]:
        """Return every member's and then every auxiliary's reply.

        Once one has failed the others get `request_s` to end, since most cannot any more; and nobody waits for an auxiliary
        once all members have ended.
        """
        tasks = [asyncio.ensure_future(self._reduce(request, x, progress)) for x in (*members, *request.auxiliaries)]
        needed = tasks[: len(members)]
        try:
            waiting = set(tasks)
            while not all(t.done() for t in needed) and not any(t.done() and not _did_its_part(t.result()) for t in tasks):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not all(t.done() for t in needed):
                await asyncio.wait(waiting, timeout=self._context.config.timing.request_s)
            late = Stalled("did not end with the round")
            return [t.result() if t.done() else late for t in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reduce(self, request: m.Reduce, target: m.Member, progress: Progress) -> m.Reduced | Exception:
        try:
            timing = self._context.config.timing
            reply, _ = await self._context.link.ask(target, request, m.Reduced, stall_s=timing.stall_s, progress=progress)
        except (LinkError, RemoteError) as error:
            return error
        return reply


def _did_its_part(reply: m.Reduced | Exception) -> bool:
    return isinstance(reply, m.Reduced) and not reply.reason
