"""The coordinator: leases tickets to trainers and ends steps. Any backbone or trainer can be it; `seat` decides who is.

Its state is soft: tickets are re-leased at will, because claims and seals count each one once. It must not hold anything
that members could not tell a successor. The decision itself is pure: `lifecycle/record.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.base.ids import Ballot
from swarm.lifecycle.coverage import Coverage, coverage_of
from swarm.lifecycle.record import decide, genesis_record, restoring_record
from swarm.lifecycle.tickets import TicketPool
from swarm.peer.link import Link, Refuse, RefusedBy, Tasks, together
from swarm.policy.restore import Holding, newest_complete
from swarm.policy.schedule import learning_rate
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: Records kept for trainers that lag.
MAX_RECORDS = 256

Key = tuple[str, str]


#: Finds the announced peers of every stage: a hint for where to look.
Rosters = Callable[[], Awaitable[list[list[m.Member]]]]


class Demoted(SwarmError):
    """A coordinator with a higher ballot was accepted, or the run goes on in another lineage."""


class StageLost(SwarmError):
    """A stage has had no live member for `stage_lost_s`."""


class Rivalry(SwarmError):
    """Somebody holds a record that is newer than this coordinator's and not its own."""

    def __init__(self, record: m.CommitRecord) -> None:
        super().__init__(f"a record of step {record.step} in era {record.era} exists")
        self.record = record


@dataclass
class _Joiner:
    stage: int
    member: m.Member
    head: str | None
    seen: float


@dataclass
class _StageLead:
    """Who leads one stage in the step being ended, and the next number for its term."""

    struck: dict[Key, m.Member] = field(default_factory=dict)
    leader: m.Member | None = None
    n: int = 0


class Coordinator:
    """One reign: from election with `ballot` until the run is finished or a higher ballot appears."""

    def __init__(self, link: Link, tasks: Tasks, ballot: Ballot, rosters: Rosters) -> None:
        self._link = link
        self._rosters = rosters
        self._tasks = tasks
        self.context = link.context
        self.config = link.context.config
        self.ballot = ballot
        self.record: m.CommitRecord | None = None
        self.records: list[m.CommitRecord] = []
        self._pools: dict[int, TicketPool] = {}
        self._joiners: dict[Key, _Joiner] = {}
        self._leaving: set[Key] = set()
        self._last_join = 0.0
        self._changed = asyncio.Condition()
        self._leads = [_StageLead() for _ in range(self.config.num_stages)]
        self._evaluation_due: int | None = None
        self._evaluator: tuple[Key, float] | None = None
        self._doubt: set[int] = set()
        self._checked = 0.0
        self.waiting_for = "peers"
        self.finished = asyncio.Event()
        self._demoted: Demoted | None = None
        self._rival: m.CommitRecord | None = None
        #: Stages that have no live member now; while there are any this lineage is not pushed on others.
        self._lost: set[int] = set()
        #: Trainers seen, with the time of their last word.
        self.trainers: dict[Key, float] = {}

    # ------------------------------------------------------------------------------------------------ requests

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def on_join(self, message: m.Join) -> m.Ack:
        """A stage peer wants to be listed in the next record, or to leave."""
        if message.stage >= self.config.num_stages:
            raise Refuse("wrong_stage", f"the run has {self.config.num_stages} stages")
        member = message.member
        if message.leaving:
            self._leaving.add(member.key)
            self._joiners.pop(member.key, None)
        else:
            if member.key not in self._joiners:
                self._last_join = self._now
                for key in [k for k in self._joiners if k[0] == member.peer]:
                    del self._joiners[key]  # an earlier incarnation
            self._joiners[member.key] = _Joiner(message.stage, member, message.head, self._now)
        await self._notify()
        return m.Ack()

    async def on_lease(self, message: m.Lease) -> m.Leased:
        """A trainer reports and asks; held open for a while if there is nothing to tell."""
        if self.config.data_digest and message.data_digest != self.config.data_digest:
            raise Refuse("bad_request", "the trainer's data differ from the run's")
        trainer, now = message.trainer.key, self._now
        lease_s = self.config.timing.lease_s
        if message.leaving:
            self.trainers.pop(trainer, None)
            for pool in self._pools.values():
                pool.drop_trainer(trainer)
            if self._evaluator is not None and self._evaluator[0] == trainer:
                self._evaluator = None
            await self._notify()
            return m.Leased(ballot=self.ballot)
        self.trainers[trainer] = now
        for ticket, accumulated in message.done:
            if ticket.step in self._pools:
                self._pools[ticket.step].done(ticket.index)
                if not accumulated:
                    self._doubt.add(ticket.step)
        for step, held in self._pools.items():
            held.renew(trainer, [t.index for t in message.holding if t.step == step], now=now, lease_s=lease_s)
        if message.evaluated is not None and message.evaluated[0] == self._evaluation_due:
            self._evaluation_due = self._evaluator = None
        if message.done or message.evaluated:
            await self._notify()
        until = now + self.config.timing.coordinator_s / 3
        while True:
            reply = self._lease(message)
            if reply is not None or message.want == 0 or self._now >= until:
                return reply or self._leased(message)
            try:
                async with asyncio.timeout_at(until):
                    async with self._changed:
                        await self._changed.wait()
            except TimeoutError:
                continue

    def _leased(self, message: m.Lease, **extra: object) -> m.Leased:
        known = (message.known_era, message.known_step)
        records = tuple(r for r in self.records if (r.era, r.step) > known)
        return m.Leased(ballot=self.ballot, records=records, waiting_for=self.waiting_for, **extra)

    def _lease(self, message: m.Lease) -> m.Leased | None:
        """What there is to tell `message.trainer` now, or None."""
        if self._demoted is not None:
            raise Refuse("lower_ballot", str(self._demoted))
        trainer, now = message.trainer.key, self._now
        if self._evaluation_due is not None:
            free = self._evaluator is None or self._evaluator[1] <= now
            mine = self._evaluator is not None and self._evaluator[0] == trainer
            if message.want and (free or mine):
                self._evaluator = (trainer, now + 4 * self.config.timing.lease_s)
                if free and not mine:
                    return self._leased(message, evaluate=True)
            return self._leased(message) if self._has_news(message) else None
        if self.finished.is_set():
            return self._leased(message, finished=True)
        tickets: list[tuple[int, int]] = []
        for step in sorted(self._pools):
            want = message.want - len(tickets)
            if want > 0:
                taken = self._pools[step].lease(trainer, want, now=now, lease_s=self.config.timing.lease_s)
                tickets += [(step, index) for index in taken]
        if tickets or self._has_news(message):
            avoid = [((s, i), sorted(self._pools[s].avoid[i])) for s, i in tickets if i in self._pools[s].avoid]
            return self._leased(message, tickets=tuple(tickets), avoid=tuple(avoid))
        return None

    def _has_news(self, message: m.Lease) -> bool:
        record = self.record
        return record is not None and (message.known_era, message.known_step) < (record.era, record.step)

    @property
    def _newest_step(self) -> int:
        return self.record.step if self.record is not None else -2

    # ------------------------------------------------------------------------------------------------ the reign

    def demote(self, reason: str) -> None:
        self._demoted = Demoted(reason)

    def adopt(self, record: m.CommitRecord | None, term_n: int = 0) -> None:
        """Begin from the newest record that the members know."""
        self.record = record
        if record is not None:
            self.records.append(record)
        for lead in self._leads:
            lead.n = term_n

    async def run(self, prepared: dict[int, m.StageResult] | None = None) -> None:
        """Reign until the run is finished.

        Args:
            prepared: for each stage the prepared attempt of the next step that a live member holds; if every stage has
                one, the step is decided on them first.

        Raises:
            Demoted: a higher ballot was accepted somewhere.
        """
        surveying = self._tasks.start(self._survey_loop(), "survey")
        try:
            await self._reign(prepared)
        finally:
            surveying.cancel()

    async def _reign(self, prepared: dict[int, m.StageResult] | None) -> None:
        if self.record is None:
            await self._genesis()
        assert self.record is not None
        if prepared is not None and len(prepared) == self.config.num_stages:
            logger.info("step %d: deciding on the prepared attempts found", self.record.step + 1)
            results = [prepared[stage] for stage in range(self.config.num_stages)]
            await self._commit(results, reopened=0)
        self._open_pools()
        await self._recover()
        while self.record.step + 1 < self.config.total_steps:
            try:
                await self._end_step(self.record.step + 1)
            except StageLost as lost:
                logger.error("%s", lost)
                await self._set_back()
            except Rivalry as rivalry:
                await self._settle(rivalry.record)
        self.finished.set()
        self.waiting_for = "nothing: the run is finished"
        await self._notify()

    async def _genesis(self) -> None:
        """Wait until every stage has enough peers and nobody new has come for a while, then write the first record."""
        config = self.config
        while True:
            now = self._now
            for key in [k for k, j in self._joiners.items() if now - j.seen > config.timing.record_ttl_s]:
                del self._joiners[key]
            counts = [0] * config.num_stages
            for joiner in self._joiners.values():
                counts[joiner.stage] += 1
            short = [k for k, count in enumerate(counts) if count < config.min_peers_per_stage]
            quiet = now - self._last_join
            if not short and quiet >= config.timing.genesis_quiet_s:
                break
            self.waiting_for = f"peers of stages {short}" if short else "more peers"
            wait = config.timing.genesis_quiet_s - quiet if not short else config.timing.request_s
            await self._wait(max(0.01, wait))
        peers = [[j.member for j in self._joiners.values() if j.stage == k] for k in range(config.num_stages)]
        self._joiners.clear()
        await self._publish(await self._starting_record(peers, era=0), ())

    # ------------------------------------------------------------------------------------------------ old heads

    async def _starting_record(self, peers: list[list[m.Member]], *, era: int) -> m.CommitRecord:
        """The record to go on from: the newest head that the peers hold complete, else the initial values.

        Args:
            peers: of each stage, all of whom become members; those that do not hold the head are not ready.
            era: the lowest that the record may have.
        """
        run = self.context.run
        records: dict[str, m.CommitRecord] = {}
        stages: list[dict[Key, list[Holding]]] = []
        for stage, candidates in enumerate(peers):
            held = await together(*(self._holdings(stage, member) for member in candidates))
            stages.append({})
            for member, found in zip(candidates, held, strict=True):
                records |= {r.head: r for r in found}
                stages[-1][member.key] = [Holding(r.head, r.era, r.step) for r in found]
        best, reason = newest_complete(stages)
        if best is None:
            members = tuple(tuple(x.model_copy(update={"ready": True}) for x in xs) for xs in peers)
            genesis = genesis_record(self.config, run, self.ballot, members)
            return genesis if not era else restoring_record(genesis, era=era, ballot=self.ballot, members=members)
        logger.info("going on from an earlier head: %s", reason)
        members = tuple(
            tuple(sorted(
                (x.model_copy(update={"ready": best in stages[k][x.key]}) for x in xs), key=lambda x: not x.ready
            ))
            for k, xs in enumerate(peers)
        )  # fmt: skip
        return restoring_record(
            records[best.head], era=max(era, best.era + 1), ballot=self.ballot, members=members
        )

    async def _holdings(self, stage: int, member: m.Member) -> tuple[m.CommitRecord, ...]:
        try:
            request = m.Holdings(run=self.context.run, stage=stage)
            return (await self._link.ask(member, request, m.Held))[0].records
        except (LinkError, RemoteError):
            return ()

    async def _live_peers(self) -> list[list[m.Member]]:
        """Announced peers of every stage that answer."""

        async def live(member: m.Member) -> m.Member | None:
            try:
                reply, _ = await self._link.ask(member, m.Status(), m.StatusReply)
            except (LinkError, RemoteError):
                return None
            return reply.member if reply.member.key == member.key else None

        rosters = await self._rosters()
        answers = await together(*(together(*(live(x) for x in roster)) for roster in rosters))
        return [[x for x in stage if x is not None] for stage in answers]

    async def _set_back(self) -> None:
        """A stage was lost: go on from the newest head that is complete over all stages, or wait for peers."""
        assert self.record is not None
        peers = await self._live_peers()
        empty = [k for k, xs in enumerate(peers) if not xs]
        if empty:
            self.waiting_for = f"a peer of stages {empty}: nobody serves them"
            logger.error("stages %s have no live peer: the run waits for one", empty)
            await self._wait(self.config.timing.coordinator_s)
            return
        record = await self._starting_record(peers, era=self.record.era + 1)
        logger.error(
            "the run is set back from step %d to step %d: %d committed steps are discarded",
            self.record.step + 1, record.step + 1, self.record.step - record.step,
        )  # fmt: skip
        self._pools.clear()
        self._lost.clear()
        await self._publish(record, tuple(x for xs in self.record.members for x in xs))

    async def _settle(self, rival: m.CommitRecord) -> None:
        """Two lineages met. One that lacks a live holder of some stage loses; else the newer record wins.

        Raises:
            Demoted: the other one goes on.
        """
        assert self.record is not None
        self._rival = None

        async def holds(member: m.Member) -> bool:
            try:
                info, _ = await self._link.ask(member, m.Hello(), m.RunInfo)
            except (LinkError, RemoteError):
                return False
            return info.record is not None and (info.record.era, info.record.step) >= (rival.era, rival.step)

        answers = await together(*(together(*(holds(x) for x in xs)) for xs in rival.members))
        missing = [k for k, found in enumerate(answers) if not any(found)]
        if not missing or self._lost:
            raise Demoted(f"the run goes on from a record of step {rival.step}")
        logger.error("the other lineage at step %d has nobody for stages %s: this one goes on", rival.step, missing)
        record = restoring_record(
            self.record, era=rival.era + 1, ballot=self.ballot, members=self.record.members
        )
        await self._publish(record, tuple(x for xs in rival.members for x in xs))

    async def _survey_loop(self) -> None:
        """Tell the newest record to announced peers that it does not list: they may have missed it, or follow another."""
        while True:
            await asyncio.sleep(self.config.timing.coordinator_s)
            record = self.record
            if record is None or self._lost:
                continue
            listed = {x.key for xs in record.members for x in xs}
            for member in [x for roster in await self._rosters() for x in roster]:
                if member.key in listed or member.key in self._joiners:
                    continue
                try:
                    await self._link.ask(member, m.Commit(record=record), m.Ack)
                except RefusedBy as refused:
                    theirs = refused.refusal.record
                    if theirs is not None and theirs.newer_than(self.record):
                        self._rival = theirs
                        await self._notify()
                except (LinkError, RemoteError):
                    continue

    def _check(self) -> None:
        """
        Raises:
            Demoted, Rivalry: this reign is over, or in doubt.
        """
        if self._demoted is not None:
            raise self._demoted
        if self._rival is not None:
            raise Rivalry(self._rival)

    # ------------------------------------------------------------------------------------------------ waiting

    async def _wait(self, seconds: float) -> None:
        """Until something changes, for at most `seconds`."""
        self._check()
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait()
        except TimeoutError:
            pass
        self._check()

    def _open_pools(self) -> None:
        assert self.record is not None
        commits = self.record.step + 1
        for step in [s for s in self._pools if s < commits]:
            del self._pools[step]
        for step in range(commits, min(commits + self.config.delay_steps + 1, self.config.total_steps)):
            self._pools.setdefault(step, TicketPool(step, self.config.tickets_per_step))

    async def _recover(self) -> None:
        """After an election: ask the members what they hold of the open steps, so that nothing is computed twice."""
        for step in sorted(self._pools):
            if self.ballot.counter > 1:
                gathered = await self._gather_all(step, freeze=False)
                for index in _covered_by_all([coverage_of(seals) for seals in gathered]):
                    self._pools[step].done(index)
        await self._notify()

    # ------------------------------------------------------------------------------------------------ one step

    async def _end_step(self, step: int) -> None:
        """From open tickets to the commit record: collect, seal, average, decide; any failure raises the attempt."""
        pool = self._pools[step]
        all_tickets = set(range(self.config.tickets_per_step))
        reopened = 0
        while True:
            await self._collect_tickets(step, pool)
            self.waiting_for = f"seals of step {step}"
            gathered = await self._gather_all(step, freeze=True)
            coverages = [coverage_of(seals) for seals in gathered]
            missing = all_tickets - _covered_by_all(coverages)
            if missing:
                logger.info("step %d: tickets %s are missing; reopened", step, sorted(missing))
                reopened += 1
                for coverage in coverages:
                    for index, peers in coverage.unconfirmed.items():
                        pool.avoid[index] = pool.avoid.get(index, frozenset()) | peers
                await self._gather_all(step, freeze=False)
                pool.free(missing)
                await self._notify()
                continue
            self.waiting_for = f"averages of step {step}"
            for peer in sorted({peer for coverage in coverages for peer in coverage.blamed}):
                logger.error("step %d: %s called a ticket overflow that another peer found finite", step, peer[:8])
            results = await self._average_all(step, gathered)
            if results is None or not self._enough(results):
                reopened += 1
                await self._wait(0.05)
                continue
            await self._commit(results, reopened=reopened)
            return

    async def _collect_tickets(self, step: int, pool: TicketPool) -> None:
        """Until every ticket of `step` was reported done; leases of silent trainers expire meanwhile."""
        self.waiting_for = f"tickets of step {step}"
        while not pool.complete or self._evaluation_due is not None:
            late = pool.expire(self._now)
            if late:
                logger.info("step %d: leases of tickets %s expired", step, late)
                await self._notify()
            if self._now - self._checked > (1.0 if self._doubt else self.config.timing.coordinator_s):
                self._checked = self._now
                self._doubt.clear()
                await self._check_leaders(step)
            await self._wait(self.config.timing.lease_s / 8)

    async def _check_leaders(self, step: int) -> None:
        """A leader that is gone is replaced now, not at the seal; sooner if some ticket was not accumulated."""

        async def check(stage: int) -> None:
            leader = self._leader(stage)
            try:
                if leader is not None:
                    await self._link.ask(leader, m.Status(), m.StatusReply)
            except (LinkError, RemoteError) as error:
                logger.info("stage %d: leader %s is gone: %s", stage, leader and leader.peer[:8], error)
                self._strike(stage, leader)
                await self._gather(step, stage, freeze=False)

        await together(*(check(stage) for stage in range(self.config.num_stages)))

    def _enough(self, results: list[m.StageResult]) -> bool:
        """With `min_peers_per_stage` above 1 a step needs that many holders of each stage, and most of its last members.

        The operator chose that the run stops rather than split: of two halves of a partition at most one goes on.
        """
        if self.config.min_peers_per_stage == 1:
            return True
        for stage, result in enumerate(results):
            members = [x for x in self._members(stage) if x.ready]
            need = max(self.config.min_peers_per_stage, len(members) // 2 + 1)
            if len(result.holders) < need:
                self.waiting_for = f"{need} peers of stage {stage} ({len(result.holders)} are here)"
                self._leads[stage].struck.clear()
                return False
        return True

    def _members(self, stage: int) -> list[m.Member]:
        assert self.record is not None
        return list(self.record.members[stage])

    def _leader(self, stage: int) -> m.Member | None:
        """The stage's leader: the first ready member that is not struck, unless another was told to lead."""
        lead = self._leads[stage]
        if lead.leader is None or lead.leader.key in lead.struck:
            lead.leader = next((x for x in self._members(stage) if x.ready and x.key not in lead.struck), None)
        return lead.leader

    def _strike(self, stage: int, member: m.Member | None) -> None:
        if member is not None:
            self._leads[stage].struck[member.key] = member

    async def _gather_all(self, step: int, *, freeze: bool) -> list[tuple[m.Seal, ...]]:
        return await together(
            *(self._gather(step, stage, freeze=freeze) for stage in range(self.config.num_stages))
        )

    async def _gather(self, step: int, stage: int, *, freeze: bool) -> tuple[m.Seal, ...]:
        """Seals of one stage under a new term; a leader that does not answer is replaced until one does."""
        lead = self._leads[stage]
        backoff = 0.1
        lost_since: float | None = None
        while True:
            self._check()
            leader = self._leader(stage)
            if leader is None:
                # Nobody is left: everyone is tried again, for a stopped or isolated peer may come back.
                self.waiting_for = f"a live member of stage {stage}"
                lost_since = self._now if lost_since is None else lost_since
                if self._now - lost_since > self.config.timing.stage_lost_s:
                    raise StageLost(f"stage {stage} has had no live member for {self.config.timing.stage_lost_s:g} s")
                logger.warning("step %d: stage %d has no live member; waiting", step, stage)
                self._lost.add(stage)
                lead.struck.clear()
                await asyncio.sleep(backoff)
                backoff = min(2.0, 2 * backoff)
                continue
            lead.n += 1
            term = m.Term(ballot=self.ballot, n=lead.n)
            request = m.Gather(
                run=self.context.run, stage=stage, step=step, term=term, freeze=freeze,
                members=tuple(self._members(stage)), struck=tuple(lead.struck.values()),
            )  # fmt: skip
            try:
                reply, _ = await self._link.ask(leader, request, m.Gathered, stall_s=3 * self.config.timing.request_s)
            except RefusedBy as refused:
                self._heed(refused)
                if refused.code == "wrong_state":
                    continue  # a higher n was used; the next try has another
                self._strike(stage, leader)
                await asyncio.sleep(backoff)
            except (LinkError, RemoteError) as error:
                logger.info("step %d, stage %d: leader %s: %s", step, stage, leader.peer[:8], error)
                self._strike(stage, leader)
            else:
                lead.struck |= {x.key: x for x in reply.struck}
                self._lost.discard(stage)
                return reply.seals

    def _heed(self, refused: RefusedBy) -> None:
        """A refusal that says that another coordinator reigns, or that a record exists which this one lacks."""
        if refused.code == "lower_ballot":
            self.demote(refused.reason)
            assert self._demoted is not None
            raise self._demoted
        record = refused.refusal.record
        if record is not None and record.newer_than(self.record):
            raise Rivalry(record)

    async def _average_all(self, step: int, gathered: list[tuple[m.Seal, ...]]) -> list[m.StageResult] | None:
        replies = await together(
            *(self._average(step, stage, gathered[stage]) for stage in range(self.config.num_stages))
        )
        results = [reply for reply in replies if reply is not None]
        return results if len(results) == len(replies) else None

    async def _average(self, step: int, stage: int, seals: tuple[m.Seal, ...]) -> m.StageResult | None:
        """One stage's average, or None after striking whoever made it fail."""
        lead, leader = self._leads[stage], self._leader(stage)
        assert leader is not None
        request = m.Average(
            run=self.context.run, stage=stage, step=step, term=m.Term(ballot=self.ballot, n=lead.n), seals=seals
        )
        try:
            reply, _ = await self._link.ask(leader, request, m.Averaged, stall_s=2 * self.config.timing.average_s)
        except RefusedBy as refused:
            self._heed(refused)
            logger.info("step %d, stage %d: no average: %s", step, stage, refused)
            self._strike(stage, leader if refused.code not in ("wrong_state",) else None)
            return None
        except (LinkError, RemoteError) as error:
            logger.info("step %d, stage %d: leader %s: %s", step, stage, leader.peer[:8], error)
            self._strike(stage, leader)
            return None
        if reply.result is None:
            logger.info("step %d, stage %d: no average: %s", step, stage, reply.reason)
            if reply.suspects:
                self._strike(stage, reply.suspects[0])
            return None
        return reply.result

    # ------------------------------------------------------------------------------------------------ decision

    async def _commit(self, results: list[m.StageResult], *, reopened: int) -> None:
        assert self.record is not None
        step = self.record.step + 1
        members = tuple(self._next_members(stage, results[stage]) for stage in range(self.config.num_stages))
        record = decide(
            self.config, self.record, results, ballot=self.ballot, members=members,
            learning_rate=learning_rate(self.config, step), reopened=reopened,
        )  # fmt: skip
        struck = tuple(x for lead in self._leads for x in lead.struck.values())
        if self._evaluates_after(step):
            self._evaluation_due = step
        await self._publish(record, struck)

    def _evaluates_after(self, step: int) -> bool:
        config = self.config
        last = step + 1 == config.total_steps
        return config.eval_samples > 0 and (last or (config.eval_every > 0 and (step + 1) % config.eval_every == 0))

    def _next_members(self, stage: int, result: m.StageResult) -> tuple[m.Member, ...]:
        """Who holds the average stays (the leader first); joiners come; who leaves or was struck goes."""
        assert self.record is not None
        lead = self._leads[stage]
        listed = {x.key: x for x in self.record.members[stage]}
        holders = [listed[x.key] for x in result.holders if x.key in listed]
        staying = [x for x in holders if x.key not in self._leaving]
        if not any(x.ready for x in staying):
            staying = holders  # never empty a stage
        if lead.leader is not None:
            staying.sort(key=lambda x: x.key != lead.leader.key)  # type: ignore[union-attr]
        present = {x.key for x in staying}
        now = self._now
        for key in list(self._joiners):
            joiner = self._joiners[key]
            if joiner.stage != stage or key in self._leaving:
                continue
            if now - joiner.seen > self.config.timing.record_ttl_s:
                del self._joiners[key]
            elif key in present:
                # It takes part in averages already; once it says that it holds the state it is ready.
                if joiner.member.ready:
                    staying = [joiner.member if x.key == key else x for x in staying]
                    del self._joiners[key]
            elif key not in lead.struck:
                ready = joiner.member.ready and joiner.head == self.record.head
                staying.append(joiner.member.model_copy(update={"ready": ready}))
                del self._joiners[key]
        return tuple(staying)

    async def _publish(self, record: m.CommitRecord, others: tuple[m.Member, ...]) -> None:
        """Write the record and hand it to everyone; goes on once a member of every stage has it.

        Invariant: the record is complete before anyone hears of it, and never changes afterwards.
        """
        previous = self.record.members if self.record is not None else ()
        self.record = record
        self.records.append(record)
        del self.records[:-MAX_RECORDS]
        for lead in self._leads:
            lead.struck.clear()
            lead.leader = None
        self._open_pools()
        targets = {x.key: (stage, x) for stage, xs in enumerate(record.members) for x in xs}
        extra = {x.key: x for xs in previous for x in xs} | {x.key: x for x in others}
        heard: set[int] = set()
        told = asyncio.Event()

        async def tell(stage: int, member: m.Member) -> None:
            try:
                await self._link.ask(member, m.Commit(record=record), m.Ack)
            except (LinkError, RemoteError) as error:
                logger.debug("record %d not taken by %s: %s", record.step, member.peer[:8], error)
                return
            heard.add(stage)
            if len(heard - {-1}) == self.config.num_stages:
                told.set()

        for stage, member in targets.values():
            self._tasks.start(tell(stage, member), f"record {record.step}")
        for key, member in extra.items():
            if key not in targets:
                self._tasks.start(tell(-1, member), f"record {record.step}")
        try:
            async with asyncio.timeout(self.config.timing.request_s):
                await told.wait()
        except TimeoutError:
            logger.warning("record of step %d: only stages %s took it so far", record.step, sorted(heard - {-1}))
        await self._notify()


def _covered_by_all(coverages: list[Coverage]) -> frozenset[int]:
    return coverages[0].covered.intersection(*(c.covered for c in coverages[1:]))
