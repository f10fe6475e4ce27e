"""Who coordinates: watches the coordinator, stands for election when there is none, and serves its requests.

Runs in every backbone and trainer. An election asks one member of each stage to promise its ballot; no majority is needed, and
what a partition then does is in `lifecycle/PROTOCOL.md`. What was decided before comes from the members. While a
stage has nobody, one candidate waits in the coordinator's place (`candidacy.py`) instead of all out-bidding each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm.base.errors import LinkError, RemoteError
from swarm.base.ids import Ballot, MemberKey
from swarm.lifecycle.coverage import torn_tie
from swarm.net.transport import Progress
from swarm.peer.announcing import find_coordinators, keep_announcing, member_of, record_of, withdraw
from swarm.peer.context import coordinator_key, stage_key
from swarm.peer.coordinator.candidacy import WAITING_STATE, BackOff, Candidacy, answering_members, in_words
from swarm.peer.coordinator.coordinator import Coordinator
from swarm.peer.coordinator.rebalancing import Planner
from swarm.peer.coordinator.run_leadership import Demoted
from swarm.peer.link import Link, Refuse, RefusedBy, Tasks, together
from swarm.policy.rebalance import plan_moves
from swarm.wire import messages as m
from swarm.wire.framing import Frame
from swarm.wire.peer_records import MAX_RECORD_BALLOT, PeerRecord

logger = logging.getLogger(__name__)


class Election:
    """One candidate. `rank` delays its candidacy: backbones (0) stand before trainers (1)."""

    def __init__(self, link: Link, tasks: Tasks, *, rank: int, plan: Planner = plan_moves) -> None:
        self._link = link
        self._tasks = tasks
        self.context = link.context
        self._timing = link.context.config.timing
        self._rank = rank
        self._plan = plan
        self.coordinator: Coordinator | None = None
        self._highest = 0
        self._retiring = False
        #: While a stage has nobody and this candidate waits for one.
        self.candidacy: Candidacy | None = None
        self._pause = BackOff()
        #: No candidacy before this time of the loop.
        self._stand_at = 0.0
        #: Looks in a row at which this peer saw every stage, while another candidate waits for one.
        self._times_seen_more = 0
        #: Members that answered before an election that failed all the same.
        self._answered_before: set[MemberKey] = set()
        #: Warnings that were logged since this peer was elected last.
        self._warned: set[str] = set()
        #: The coordinator as far as this peer knows; trainers lease from it.
        self.known: m.Member | None = None
        self.changed = asyncio.Event()
        #: What the coordinator, or the candidate that waits, answered last.
        self.heard: m.StatusReply | None = None
        link.register(m.Lease, self._on_lease)
        link.register(m.Join, self._on_join)
        link.register(m.Place, self._on_place)
        link.register(m.Elect, self._on_elect)
        link.register(m.Operate, self._on_operate)

    @property
    def ballot(self) -> int:
        """Counter of the ballot with which this peer coordinates or waits in the coordinator's place; -1 if it does neither."""
        holder = self.coordinator or self.candidacy
        return -1 if holder is None else holder.ballot.counter

    @property
    def waiting_for(self) -> str:
        """What the run waits for, if this peer coordinates or waits in the coordinator's place."""
        holder = self.coordinator or self.candidacy
        return "" if holder is None else holder.waiting_for

    def _require_coordinator(self) -> Coordinator:
        if self.coordinator is None:
            waits = f": the run waits for {self.candidacy.waiting_for}" if self.candidacy is not None else ""
            raise Refuse("unknown", f"this peer is not the coordinator{waits}")
        return self.coordinator

    async def _on_lease(self, message: m.Lease, frame: Frame, progress: Progress) -> m.Leased:
        if self.candidacy is not None:
            return await self.candidacy.on_lease(message)
        return await self._require_coordinator().leasing.on_lease(message)

    async def _on_join(self, message: m.Join, frame: Frame, progress: Progress) -> m.Joining:
        if self.candidacy is not None and not message.leaving:
            return self.candidacy.on_join()
        return await self._require_coordinator().on_join(message)

    async def _on_place(self, message: m.Place, frame: Frame, progress: Progress) -> m.Placed:
        if self.candidacy is not None:
            return self.candidacy.on_place()
        return self._require_coordinator().on_place(message)

    async def _on_operate(self, message: m.Operate, frame: Frame, progress: Progress) -> m.Operated:
        return await self._require_coordinator().on_operate(message, progress.remote)

    async def _on_elect(self, message: m.Elect, frame: Frame, progress: Progress) -> m.Elected:
        raise Refuse("wrong_stage", "this peer serves no stage")

    def _know(self, member: m.Member | None) -> None:
        if member != self.known:
            self.known = member
            self.changed.set()

    async def run(self) -> None:
        """Watch the coordinator, and stand when there is none, until this peer retires."""
        silent = 0
        while not self._retiring:
            now = asyncio.get_running_loop().time()
            if await self._look_for_coordinator():
                silent = 0
                if not await self._count_fuller_looks() or now < self._stand_at:
                    await asyncio.sleep(self._timing.coordinator_s / 3)
                    continue
            elif now < self._stand_at:
                await asyncio.sleep(min(self._stand_at - now, self._timing.coordinator_s / 3))
                continue
            else:
                silent, self._times_seen_more = silent + 1, 0
                if silent <= self._rank:
                    await asyncio.sleep(self._timing.coordinator_s / 2)
                    continue
            # Candidates of equal rank draw lots, so that they rarely stand at once.
            await asyncio.sleep(self.context.rng.uniform(0.0, 0.3 if silent == 1 and self._rank == 0 else 1.0))
            if not self._times_seen_more and await self._look_for_coordinator():
                continue
            self._times_seen_more = 0
            try:
                await self._stand()
            except Demoted as demoted:
                logger.log(logging.INFO if self.coordinator is not None else logging.DEBUG, "no longer coordinator: %s", demoted)
            except (LinkError, RemoteError) as error:
                self._warn(f"election failed: {error}")
            finally:
                if self.coordinator is None:
                    self._back_off()
                self.coordinator = None

    def _back_off(self, reason: str = "") -> None:
        """A candidacy failed: the next ones come at random times, and ever later while nothing changes."""
        again_s = self._pause.failed(reason)
        self._stand_at = asyncio.get_running_loop().time() + again_s * self.context.rng.uniform(0.5, 1.0)

    def _warn(self, text: str) -> None:
        """Warn of the same thing once, until this peer is elected."""
        logger.log(logging.DEBUG if text in self._warned else logging.WARNING, "%s", text)
        self._warned.add(text)

    async def retire(self, until: float) -> None:
        """Stand no more. If this peer coordinates others, steps under way end first, until the loop's time `until`."""
        self._retiring = True
        coordinator = self.coordinator
        if coordinator is None:
            return
        if coordinator.is_under_way and coordinator.leasing.trainers.keys() - {self.context.member().key}:
            await coordinator.retire()
            while self.coordinator is coordinator and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await withdraw(self._link, coordinator_key(self.context.run), lambda: self._record(coordinator.ballot))

    async def _look_for_coordinator(self, *, above: Ballot | None = None) -> bool:
        """Look for a live coordinator, or a candidate that waits for a stage; True if there is one.

        The last known one is asked first, then those in the DHT. With `above` only one of a higher ballot counts. What is
        found is noted in `known` and `heard`.
        """
        announced = await find_coordinators(self._link)
        candidates = ([self.known] if self.known is not None else []) + announced
        for member in candidates:
            if member.key == self.context.member().key:
                continue
            try:
                async with asyncio.timeout(self._timing.coordinator_s):
                    reply, _ = await self._link.ask(member, m.Status(), m.StatusReply)
            except (LinkError, RemoteError, TimeoutError):
                continue
            if reply.ballot >= 0 and (above is None or (reply.ballot, member.peer) > above):
                self._highest = max(self._highest, reply.ballot)
                self._know(member)
                self.heard = reply
                return True
        if above is None:
            self._know(None)
        return False

    async def _count_fuller_looks(self) -> bool:
        """Count the looks at which this peer sees every stage while another candidate waits for one, which may be cut off.

        True after a few of them in a row: then this peer should stand.
        """
        if self.heard is None or self.heard.state != WAITING_STATE:
            self._times_seen_more, self._stand_at = 0, 0.0  # somebody leads: what kept this peer from it is over
            self._pause.forget()
            return False
        by_stage = await answering_members(self._link, self._live_rosters, range(self.context.config.num_stages))
        self._times_seen_more = self._times_seen_more + 1 if all(by_stage.values()) else 0
        return self._times_seen_more > 3

    async def _wait_for_members(self, ballot: Ballot, missing: list[int]) -> bool:
        """Wait until the `missing` stages have somebody; False if a higher ballot is found, or this peer goes."""
        loop = asyncio.get_running_loop()
        self._warn(f"not elected: the run waits for {in_words(missing)}")
        self._back_off(str(missing))
        self.candidacy = Candidacy(self._link, ballot, missing)
        self._know(self.context.member())
        announcing = self._announce_coordinator(ballot)
        try:
            while not self._retiring:
                await asyncio.sleep(self._timing.coordinator_s / 3)
                if await self._look_for_coordinator(above=ballot):
                    return False
                by_stage = await answering_members(self._link, self._live_rosters, missing)
                keys = set().union(*by_stage.values())
                if all(by_stage.values()) and (loop.time() >= self._stand_at or not keys <= self._answered_before):
                    self._answered_before = keys
                    return True
            return False
        finally:
            announcing.cancel()
            self.candidacy = None
            if self.known == self.context.member():
                self._know(None)

    async def _stand(self) -> None:
        """One candidacy, and the leadership that follows if it is elected: a leadership ends by an exception only."""
        elected = await self._win_election()
        if elected is None:
            return
        ballot, replies = elected
        record = _newest_record(replies)
        prepared = {} if record is None else _prepared_results(replies, record)
        self._warned.clear()
        self._answered_before.clear()
        self._pause.forget()
        self.coordinator = coordinator = Coordinator(
            self._link,
            self._tasks,
            ballot,
            self._live_rosters,
            record=record,
            attempt_n=max((r.attempt.n for r in replies), default=0),
            plan=self._plan,
        )
        self._know(self.context.member())
        logger.info("coordinator with ballot %d, newest record: %s", ballot.counter, record.step if record else "none")
        await self._coordinate(coordinator, prepared)

    async def _win_election(self) -> tuple[Ballot, list[m.Elected]] | None:
        """Ask with ever higher ballots until every stage has answered; None if another candidate is found meanwhile."""
        while True:
            ballot = Ballot(self._highest + 1, self.context.peer)
            self._highest += 1
            replies = await self._elect(ballot)
            missing = sorted(set(range(self.context.config.num_stages)) - {reply.stage for reply in replies})
            # Before the first record there need not be a member of every stage.
            if not missing or _newest_record(replies) is None:
                return ballot, replies
            if not await self._wait_for_members(ballot, missing):
                return None

    async def _coordinate(self, coordinator: Coordinator, prepared: dict[int, m.StageResult]) -> None:
        """Announce the coordinator and run it, with what it does beside, until its leadership ends."""
        background = [self._announce_coordinator(coordinator.ballot), self._tasks.start(coordinator.survey(), "survey")]
        if coordinator.record is None:
            background.append(self._tasks.start(coordinator.look_for_record(), "look for a record"))
        try:
            await coordinator.run(prepared)
        finally:
            for task in background:
                task.cancel()

    def _announce_coordinator(self, ballot: Ballot) -> asyncio.Task[None]:
        """Announce this peer as the coordinator, or as who waits in its place, until the task is cancelled."""
        key = coordinator_key(self.context.run)
        return self._tasks.start(keep_announcing(self._link, key, lambda: self._record(ballot)), "announce coordinator")

    async def _live_rosters(self) -> list[list[m.Member]]:
        return [[member_of(record) for record in roster] for roster in await self._rosters()]

    async def _rosters(self) -> list[list[PeerRecord]]:
        run, num_stages = self.context.run, self.context.config.num_stages
        return await asyncio.gather(*(self.context.dht.lookup(stage_key(run, stage)) for stage in range(num_stages)))

    async def _elect(self, ballot: Ballot) -> list[m.Elected]:
        """Ask every announced stage peer to accept `ballot`.

        Raises:
            Demoted: somebody accepted a higher one.
        """
        rosters = await self._rosters()
        request = m.Elect(run=self.context.run, ballot=ballot, coordinator=self.context.member())

        async def ask(record: PeerRecord) -> m.Elected | None:
            member = member_of(record)
            try:
                return (await self._link.ask(member, request, m.Elected))[0]
            except RefusedBy as refused:
                if refused.code == "lower_ballot":
                    accepted = refused.refusal.ballot
                    self._highest = max(self._highest, accepted.counter if accepted is not None else 0)
                    raise Demoted(refused.reason) from None
                return None
            except (LinkError, RemoteError):
                return None

        # One that has moved may be announced at two stages: asked once, since it answers for the one that it serves.
        announced = {(record.peer, record.incarnation): record for roster in rosters for record in roster}
        try:
            replies = await together(*(ask(record) for record in announced.values()))
        except Demoted:
            self._highest += 1
            raise
        return [reply for reply in replies if reply is not None]

    def _record(self, ballot: Ballot) -> PeerRecord:
        return record_of(self.context, "coordinator", ballot=min(ballot.counter, MAX_RECORD_BALLOT))


def _newest_record(replies: Sequence[m.Elected]) -> m.CommitRecord | None:
    newest: m.CommitRecord | None = None
    for reply in replies:
        if reply.record is not None and reply.record.newer_than(newest):
            newest = reply.record
    return newest


def _prepared_results(replies: Sequence[m.Elected], record: m.CommitRecord) -> dict[int, m.StageResult]:
    """By stage, the average of the step after `record` that members hold: of each stage that of its highest attempt."""
    prepared: dict[int, m.StageResult] = {}
    for reply in replies:
        if reply.record is None or reply.record.version_id != record.version_id:
            continue
        for result in [result for step, result in reply.prepared if step == record.step + 1]:
            known = prepared.get(reply.stage)
            if known is None or result.attempt.order > known.attempt.order:
                prepared[reply.stage] = result
            elif result.attempt == known.attempt:
                prepared[reply.stage] = known.model_copy(update={"holders": (*known.holders, *result.holders)})
    torn = torn_tie(prepared.values())
    if torn:
        # They are of different attempts, so nobody can have decided on them together.
        logger.info("prepared attempts disagree on the tied parameter %s; averaging again", torn)
        return {}
    return prepared
