"""The coordinator: ends steps and decides records. Any backbone or trainer can be it; `election` decides who is.

Its parts: `run_leadership` (what they share), `leasing` (tickets to trainers), `chosen_leaders` (ledgers and averages from
stages), `next_members` (who the next record lists), `lineage` (which version the run goes on from), `rebalancing` (who
moves, and who only aggregates) and `operating` (what an operator asked). It holds nothing that members could not tell a
successor; the decision itself is pure: `lifecycle/commit_record.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from itertools import pairwise
from typing import Any

from swarm.base.ids import Ballot
from swarm.lifecycle.commit_record import checkpoint_writers, decide, is_checkpoint_due
from swarm.lifecycle.coverage import coverage_of, covered_by_all
from swarm.lifecycle.tickets import TicketPool
from swarm.peer.coordinator.chosen_leaders import ChosenLeaders, StageLost
from swarm.peer.coordinator.leasing import Leasing
from swarm.peer.coordinator.lineage import NUM_ASKED_AT_START, Lineage
from swarm.peer.coordinator.next_members import NextMembers
from swarm.peer.coordinator.operating import Operating
from swarm.peer.coordinator.rebalancing import Planner, Rebalancing
from swarm.peer.coordinator.run_leadership import Demoted, Rivalry, Rosters, RunLeadership
from swarm.peer.link import Link, Refuse, Tasks
from swarm.policy.schedule import learning_rate
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


class Coordinator:
    """One leadership: from election with `ballot` until the run is finished or a higher ballot appears.

    Args:
        link: asks and is asked.
        tasks: owns what runs in the background.
        ballot: that it was elected with.
        rosters: finds announced peers.
        record: the newest that the members know; None before the run has begun.
        attempt_n: highest number of an attempt that they have seen.
        plan: decides who moves to another stage.
    """

    def __init__(
        self,
        link: Link,
        tasks: Tasks,
        ballot: Ballot,
        rosters: Rosters,
        *,
        record: m.CommitRecord | None,
        attempt_n: int,
        plan: Planner,
    ) -> None:
        self._tasks = tasks
        self._leadership = RunLeadership(link, ballot, rosters)
        self._config = link.context.config
        self._timing = self._config.timing
        self.leasing = Leasing(self._leadership)
        self.rebalancing = Rebalancing(self._leadership, plan)
        self._chosen_leaders = ChosenLeaders(self._leadership, attempt_n, self.rebalancing.hear)
        self._lineage = Lineage(self._leadership)
        self.next_members = NextMembers(self._leadership, self._chosen_leaders, tasks)
        self._checked = 0.0
        #: Stages of which no member keeps checkpoints, as they were told last.
        self._unsaved: list[int] = []
        self._operating = Operating(self._leadership, record.order if record is not None else m.Order())
        if record is not None:
            self._leadership.take(record)

    @property
    def ballot(self) -> Ballot:
        """The ballot of this leadership."""
        return self._leadership.ballot

    @property
    def record(self) -> m.CommitRecord | None:
        """The newest record; None before the run has begun."""
        return self._leadership.record

    @property
    def waiting_for(self) -> str:
        """What the run waits for, in words."""
        return self._leadership.waiting_for

    @property
    def is_under_way(self) -> bool:
        """The run has begun and has not ended."""
        return self.record is not None and not self.leasing.finished

    async def demote(self, reason: str) -> None:
        """End the leadership: whoever waits in it learns of it now."""
        self._leadership.demote(reason)
        await self._leadership.notify()

    async def look_for_record(self) -> None:
        """Look for a record, as a candidate that nobody could tell of one, until this coordinator has written the first."""
        while self.record is None:
            await asyncio.sleep(self._timing.request_s / 2)
            try:
                await self._lineage.require_not_begun(4)
            except Demoted as demoted:
                if self.record is None:
                    await self.demote(str(demoted))
                return

    async def retire(self) -> None:
        """End the steps that tickets were leased of, and then the leadership: the next coordinator finds nothing under way."""
        self.leasing.close()
        await self._leadership.notify()

    async def on_operate(self, message: m.Operate, remote: str) -> m.Operated:
        """An operator pauses, resumes or stops the run.

        Raises:
            Refuse: as `Operating.take`.
        """
        operated = self._operating.take(message, remote)
        self.leasing.pause(self._operating.is_paused)
        self.leasing.finish(self._operating.is_stopped)
        await self._leadership.notify()
        return operated

    async def on_join(self, message: m.Join) -> m.Joining:
        """Note that a stage peer wants to be listed in the next record, or to leave."""
        if message.stage >= self._config.num_stages:
            raise Refuse("wrong_stage", f"the run has {self._config.num_stages} stages")
        own_reason = ""
        if message.leaving:
            self.next_members.leave(message.stage, message.member)
            self.leasing.lost(message.lost)
        else:
            own_reason = self.next_members.join(message.stage, message.member, message.version_id)
        await self._leadership.notify()
        return m.Joining(waiting_for=(own_reason or self.waiting_for)[:2000])

    def on_place(self, message: m.Place) -> m.Placed:
        """Tell a newcomer which stage it should serve; whoever asks next finds it there."""
        listed = self.record.members if self.record is not None else ((),) * self._config.num_stages
        return self.rebalancing.place(message, listed, self.next_members.coming)

    # ------------------------------------------------------------------------------------------------ the leadership

    async def run(self, prepared: dict[int, m.StageResult]) -> None:
        """Lead, also once the run is finished: the leadership ends by an exception only.

        Args:
            prepared: for each stage the prepared attempt of the next step that a live member holds; if every stage has
                one, the step is decided on them first.

        Raises:
            Demoted: a higher ballot was accepted somewhere, or another lineage goes on.
        """
        if self._leadership.record is None:
            await self._begin()
        if len(prepared) == self._config.num_stages:
            logger.info("step %d: deciding on the prepared attempts found", self._leadership.newest.step + 1)
            await self._commit([prepared[stage] for stage in range(self._config.num_stages)], reopened=0)
        self.leasing.pause(self._operating.is_paused)
        self.leasing.open_pools()
        await self._or_set_back(self._recover())
        told = False
        while True:
            step = self._leadership.newest.step + 1
            is_over = step == self._config.total_steps
            self.leasing.finish(is_over or self._operating.is_stopped)
            if is_over:
                self._leadership.tell_waiting("nothing: the run is finished")
                if not told:
                    logger.info("the run is done: its %d steps have committed", self._config.total_steps)
                    await self._leadership.notify()
                told = True
                await self._or_set_back(self._watch_over_the_end())
            elif self._operating.is_stopped:
                self._leadership.tell_waiting(f"an operator: the run was stopped after step {step}")
                await self._leadership.wait(self._timing.record_ttl_s)
            else:
                await self._or_set_back(self._end_step(step))

    async def _watch_over_the_end(self) -> None:
        """Look after the last step: no other follows in which it would show that nobody holds what the last one made.

        Raises:
            StageLost: those who should do not.
        """
        await asyncio.sleep(self._timing.coordinator_s)
        self.next_members.require_state()

    async def survey(self) -> None:
        """Tell the newest record to those who were cut off meanwhile, for the whole leadership, also once the run is finished."""
        await self._lineage.survey_loop(lambda: self.next_members.joining)

    async def _begin(self) -> None:
        """Wait until every stage has enough peers and nobody new has come for a while, then write the first record."""
        config, leadership = self._config, self._leadership
        ready_since: float | None = None
        while True:
            peers = self.next_members.could_begin()
            short = [k for k, xs in enumerate(peers) if len(xs) < config.min_peers_per_stage]
            quiet = self.next_members.quiet_s
            if short or quiet < self._timing.genesis_quiet_s:
                leadership.tell_waiting(f"peers of stages {short}" if short else "more peers")
                await leadership.wait(self._timing.request_s if short else max(0.01, self._timing.genesis_quiet_s - quiet))
                continue
            ready_since = leadership.now if ready_since is None else ready_since
            record, reason = await self._lineage.starting_record(peers, era=0, waited_s=leadership.now - ready_since)
            if record is not None:
                await self._lineage.require_not_begun(NUM_ASKED_AT_START)
                break
            if leadership.waiting_for != reason:
                logger.warning("waiting for %s", reason)
            leadership.tell_waiting(reason)
            await leadership.wait(self._timing.request_s / 2)
        self.next_members.began(record)
        await self._publish(record, ())

    async def _recover(self) -> None:
        """Ask the members, after an election, what they hold of the open steps, so that nothing is computed twice."""
        if self.ballot.counter > 1:  # before the first ballot nobody has begun a step
            with self.leasing.recovering():
                for step, pool in self.leasing.pools.items():
                    gathered = await self._chosen_leaders.gather_all(step, freeze=False)
                    for index in covered_by_all([coverage_of(seals) for seals in gathered]):
                        pool.done(index)
        await self._leadership.notify()

    async def _or_set_back(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` with the stages; what they lost or what a rival holds is resolved, and the run goes on from there."""
        try:
            await work
        except StageLost as lost:
            logger.error("%s", lost)
            await self._or_set_back(self._set_back())
        except Rivalry as rivalry:
            record = await self._lineage.resolve_rivalry(rivalry.record)
            await self._publish(record, (x for xs in rivalry.record.members for x in xs))

    async def _set_back(self) -> None:
        record = await self._lineage.set_back()
        self.leasing.pools.clear()
        self._leadership.lost.clear()
        await self._publish(record, (x for xs in self._leadership.newest.members for x in xs))

    # ------------------------------------------------------------------------------------------------ one step

    async def _end_step(self, step: int) -> None:
        """Take `step` from open tickets to its record: gather seals, average, decide; after any failure a higher attempt begins.

        Nothing is done if an operator stops the run while it is paused before `step`.
        """
        leadership, pool = self._leadership, self._pool(step)
        all_tickets = set(range(self._config.tickets_per_step))
        reopened = 0
        while True:
            await self._collect_tickets(step)
            if self._operating.is_stopped:
                return
            times = [leadership.now]
            leadership.tell_waiting(f"seals of step {step}")
            gathered = await self._chosen_leaders.gather_all(step, freeze=True)
            coverages = [coverage_of(seals) for seals in gathered]
            missing = all_tickets - covered_by_all(coverages)
            if missing:
                logger.info("step %d: tickets %s are missing; reopened", step, sorted(missing))
                reopened += 1
                for coverage in coverages:
                    for index, peers in coverage.unconfirmed.items():
                        pool.avoid_peers(index, peers)
                excluded = frozenset(x.peer for x in self._chosen_leaders.excluded())
                for index in missing:
                    pool.avoid_peers(index, excluded)
                await self._chosen_leaders.gather_all(step, freeze=False)
                pool.free(missing)
                await leadership.notify()
                continue
            for peer in sorted({peer for coverage in coverages for peer in coverage.blamed}):
                logger.error("step %d: %s called a ticket overflow that another peer found finite", step, peer[:8])
            leadership.tell_waiting(f"averages of step {step}")
            times.append(leadership.now)
            results = await self._chosen_leaders.average_all(step, gathered)
            if results is None or self._chosen_leaders.readmit_if_few_hold(results):
                reopened += 1
                await leadership.wait(0.05)
                continue
            times.append(leadership.now)
            await self._commit(results, reopened=reopened)
            seconds = [end - begin for begin, end in pairwise((*times, leadership.now))]
            logger.debug("step %d: sealed in %.3f s, averaged in %.3f s, told in %.3f s", step, *seconds)
            return

    def _pool(self, step: int) -> TicketPool:
        """Return the tickets of `step`.

        Raises:
            Demoted: this coordinator leaves, and does not begin `step` any more.
        """
        pool = self.leasing.pools.get(step)
        if pool is None:
            raise Demoted(f"this peer leaves after step {step}")
        return pool

    async def _collect_tickets(self, step: int) -> None:
        """Wait until every ticket of `step` was reported done, or the run is stopped; leases of silent trainers expire."""
        leadership, leasing = self._leadership, self.leasing
        while not self._operating.is_stopped and (not (pool := self._pool(step)).complete or leasing.evaluation_due is not None):
            leadership.tell_waiting("an operator: the run is paused" if leasing.paused else f"tickets of step {step}")
            late = pool.expire(leadership.now)
            if late:
                logger.info("step %d: leases of tickets %s expired", step, late)
                await leadership.notify()
            if leadership.now - self._checked > (1.0 if leasing.is_uncertain else self._timing.coordinator_s):
                leasing.leaders_are_looked_at()
                await self._chosen_leaders.check(step, None if leasing.paused else (pool.num_done, pool.num_free))
                self.next_members.require_state()
                self._checked = leadership.now
            await leadership.wait(self._timing.lease_s / 8)

    # ------------------------------------------------------------------------------------------------ decision

    async def _commit(self, results: list[m.StageResult], *, reopened: int) -> None:
        step = self._leadership.newest.step + 1
        members = self.rebalancing.roles.of(self.next_members.next_members(results))
        moves: tuple[m.Move, ...] = ()
        if step + 1 < self._config.total_steps:
            moves = self.rebalancing.decide(members, set(self.next_members.leaving))
        moving = {move.member.key for move in moves}  # listed last, so that they lead no step from here on
        record = decide(
            self._config,
            self._leadership.newest,
            results,
            ballot=self.ballot,
            members=tuple(tuple(sorted(xs, key=lambda x: x.key in moving)) for xs in members),
            learning_rate=learning_rate(self._config, step),
            reopened=reopened,
            moves=moves,
        )
        self._tell_of_unsaved(record)
        self.next_members.committed(record)
        self.leasing.commit_evaluates(step)
        await self._publish(record, self._chosen_leaders.excluded())

    def _tell_of_unsaved(self, record: m.CommitRecord) -> None:
        """Warn once of stages that nobody keeps checkpoints of: those of the others are of no use then."""
        if is_checkpoint_due(self._config, record):
            unsaved = [k for k in range(self._config.num_stages) if not checkpoint_writers(self._config, record, k)]
            if unsaved not in ([], self._unsaved):
                logger.warning(
                    "no member of stages %s has a --state-dir: step %d is not kept (the newest that all stages have on disk: %d)",
                    unsaved,
                    record.step + 1,
                    record.saved,
                )
            self._unsaved = unsaved

    async def _publish(self, record: m.CommitRecord, others: Iterable[m.Member]) -> None:
        """Hand a record to everyone; goes on once a member of every stage has it.

        Invariant: the record is complete before anyone hears of it, and never changes afterwards.
        """
        leadership = self._leadership
        record = record.model_copy(update={"order": self._operating.order})
        previous = leadership.record.members if leadership.record is not None else ()
        extra = {x.key: x for xs in previous for x in xs} | {x.key: x for x in others}
        leadership.take(record)
        self._chosen_leaders.begin_step()
        self.leasing.pause(self._operating.is_paused)
        self.leasing.open_pools()
        heard: set[int] = set()
        told = asyncio.Event()

        async def tell(stage: int | None, member: m.Member) -> None:
            if not await leadership.link.tell(member, m.Commit(record=record)):
                return
            if stage is not None:
                heard.add(stage)
            if len(heard) == self._config.num_stages:
                told.set()

        listed = {x.key: (stage, x) for stage, xs in enumerate(record.members) for x in xs}
        for stage, member in listed.values():
            self._tasks.start(tell(stage, member), f"record {record.step}")
        for key, member in extra.items():
            if key not in listed:
                self._tasks.start(tell(None, member), f"record {record.step}")
        try:
            async with asyncio.timeout(self._timing.request_s):
                await told.wait()
        except TimeoutError:
            logger.warning("record of step %d: only stages %s took it so far", record.step, sorted(heard))
        await leadership.notify()
