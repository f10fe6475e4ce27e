"""Who coordinates: watches the coordinator, stands for election when there is none, and serves its requests.

Runs in every backbone and trainer. Elections order coordinators by ballot; what was decided comes from the members.
"""

from __future__ import annotations

import asyncio
import logging

from swarm.base.errors import LinkError, RemoteError
from swarm.base.ids import Ballot
from swarm.lifecycle.coverage import torn_tie
from swarm.net.transport import Progress
from swarm.peer.announcing import find_coordinators, keep_announcing, member_of, withdraw
from swarm.peer.context import coordinator_key, stage_key
from swarm.peer.coordinator import Coordinator
from swarm.peer.link import Link, Refuse, RefusedBy, Tasks, together
from swarm.peer.reign import Demoted
from swarm.wire import messages as m
from swarm.wire.framing import Frame
from swarm.wire.records import MAX_RECORD_BALLOT, PeerRecord

logger = logging.getLogger(__name__)


class Seat:
    """One candidate. `rank` delays its candidacy: backbones (0) stand before trainers (1)."""

    def __init__(self, link: Link, tasks: Tasks, *, rank: int) -> None:
        self._link = link
        self._tasks = tasks
        self.context = link.context
        self._timing = link.context.config.timing
        self._rank = rank
        self.coordinator: Coordinator | None = None
        self._highest = 0
        self._retiring = False
        #: The last failure to be elected that was logged.
        self._told = ""
        #: The coordinator as far as this peer knows; trainers lease from it.
        self.known: m.Member | None = None
        self.changed = asyncio.Event()
        #: What a coordinator last said of itself and the run.
        self.heard: m.StatusReply | None = None
        link.register(m.Lease, self._on_lease)
        link.register(m.Join, self._on_join)
        link.register(m.Place, self._on_place)
        link.register(m.Elect, self._on_elect)
        link.register(m.Operate, self._on_operate)

    def _reigning(self) -> Coordinator:
        if self.coordinator is None:
            raise Refuse("unknown", "this peer is not the coordinator")
        return self.coordinator

    async def _on_lease(self, message: m.Lease, frame: Frame, progress: Progress) -> m.Leased:
        return await self._reigning().leasing.on_lease(message)

    async def _on_join(self, message: m.Join, frame: Frame, progress: Progress) -> m.Joining:
        return await self._reigning().on_join(message)

    async def _on_place(self, message: m.Place, frame: Frame, progress: Progress) -> m.Placed:
        return self._reigning().on_place(message)

    async def _on_operate(self, message: m.Operate, frame: Frame, progress: Progress) -> m.Operated:
        return await self._reigning().on_operate(message, progress.remote)

    async def _on_elect(self, message: m.Elect, frame: Frame, progress: Progress) -> m.Elected:
        raise Refuse("wrong_stage", "this peer serves no stage")

    def _know(self, member: m.Member | None) -> None:
        if member != self.known:
            self.known = member
            self.changed.set()

    async def run(self) -> None:
        """Watch and stand until this peer retires."""
        silent = 0
        while not self._retiring:
            if await self._find():
                silent = 0
                await asyncio.sleep(self._timing.coordinator_s / 3)
                continue
            silent += 1
            # Candidates of equal rank draw lots, so that they rarely stand at once.
            if silent <= self._rank:
                await asyncio.sleep(self._timing.coordinator_s / 2)
                continue
            await asyncio.sleep(self.context.rng.uniform(0.0, 0.3 if silent == 1 and self._rank == 0 else 1.0))
            if await self._find():
                continue
            try:
                await self._stand()
            except Demoted as demoted:
                logger.info("no longer coordinator: %s", demoted)
            except (LinkError, RemoteError) as error:
                self._warn(f"election failed: {error}")
            finally:
                self.coordinator = None

    def _warn(self, text: str) -> None:
        """Candidates stand every second: what is the matter is said once, until it is something else."""
        logger.log(logging.DEBUG if text == self._told else logging.WARNING, "%s", text)
        self._told = text

    async def retire(self, until: float) -> None:
        """Stand no more. If this peer coordinates others, steps under way end first, until the loop's time `until`."""
        self._retiring = True
        coordinator = self.coordinator
        if coordinator is None:
            return
        if coordinator.is_under_way and coordinator.trainers.keys() - {self.context.member().key}:
            await coordinator.retire()
            while self.coordinator is coordinator and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await withdraw(self._link, coordinator_key(self.context.run), lambda: self._record(coordinator.ballot))

    async def _find(self) -> bool:
        """Is there a live coordinator? The last known is asked first, then those in the DHT."""
        found = await find_coordinators(self._link)
        candidates = ([self.known] if self.known is not None else []) + found
        for member in candidates:
            if member.key == self.context.member().key:
                continue
            try:
                async with asyncio.timeout(self._timing.coordinator_s):
                    reply, _ = await self._link.ask(member, m.Status(), m.StatusReply)
            except (LinkError, RemoteError, TimeoutError):
                continue
            if reply.ballot >= 0:
                self._highest = max(self._highest, reply.ballot)
                self._know(member)
                self.heard = reply
                return True
        self._know(None)
        return False

    async def _stand(self) -> None:
        """One candidacy, and the reign that follows if it is elected: a reign ends by an exception only."""
        ballot = Ballot(self._highest + 1, self.context.peer)
        self._highest += 1
        replies = await self._elect(ballot)
        record: m.CommitRecord | None = None
        for reply in replies:
            if reply.record is not None and reply.record.newer_than(record):
                record = reply.record
        stages = {reply.stage for reply in replies}
        if record is not None and len(stages) < self.context.config.num_stages:
            missing = sorted(set(range(self.context.config.num_stages)) - stages)
            self._warn(f"not elected: no member of stages {missing} answers")
            return
        self._told = ""
        coordinator = Coordinator(
            self._link, self._tasks, ballot, self._live_rosters, record=record,
            term_n=max((r.term.n for r in replies), default=0),
        )  # fmt: skip
        prepared: dict[int, m.StageResult] = {}
        if record is not None:
            for reply in [r for r in replies if r.record is not None and r.record.head == record.head]:
                for step, result in reply.prepared:
                    known = prepared.get(reply.stage)
                    if step == record.step + 1 and (known is None or result.attempt.order > known.attempt.order):
                        prepared[reply.stage] = result
                    elif step == record.step + 1 and known is not None and result.attempt == known.attempt:
                        holders = (*known.holders, *result.holders)
                        prepared[reply.stage] = known.model_copy(update={"holders": holders})
        if torn_tie(prepared.values()):
            # They are of different attempts, so nobody can have decided on them together.
            logger.info("prepared attempts disagree on the tied parameter %s; averaging again", torn_tie(prepared.values()))
            prepared.clear()
        self.coordinator = coordinator
        self._know(self.context.member())
        logger.info("coordinator with ballot %d, newest record: %s", ballot.counter, record.step if record else "none")
        helpers = [
            self._tasks.start(
                keep_announcing(self._link, coordinator_key(self.context.run), lambda: self._record(ballot)),
                "announce coordinator",
            ),
            self._tasks.start(coordinator.survey(), "survey"),
        ]
        if record is None:
            helpers.append(self._tasks.start(self._doubt(coordinator), "look for a record"))
        try:
            await coordinator.run(prepared)
            await asyncio.Event().wait()  # goes on answering trainers and newcomers
        finally:
            for helper in helpers:
                helper.cancel()

    async def _doubt(self, coordinator: Coordinator) -> None:
        """A candidate that nobody could tell of a record goes on looking: the run may have begun without it."""
        while coordinator.record is None:
            await asyncio.sleep(self._timing.request_s / 2)
            for roster in await self._rosters():
                for peer in roster[:2]:
                    try:
                        info, _ = await self._link.ask(member_of(peer), m.Hello(), m.RunInfo)
                    except (LinkError, RemoteError):
                        continue
                    if info.record is not None and coordinator.record is None:
                        await coordinator.demote(f"a record of step {info.record.step} exists already")
                        return

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
        context = self.context
        return PeerRecord(
            peer=context.peer, incarnation=context.incarnation, role="coordinator", host=context.address.host,
            port=context.address.port, ttl_s=self._timing.record_ttl_s,
            sequence=context.identity.next_sequence(), ballot=min(ballot.counter, MAX_RECORD_BALLOT),
        )  # fmt: skip
