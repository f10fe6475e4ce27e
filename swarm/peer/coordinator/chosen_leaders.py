"""Whom the coordinator chose to lead each stage in the step being ended, and what it asks of them: ledgers and averages.

Owns the excluded members of the step, and the attempts' numbers, which rise over steps. A leader that does not answer is
replaced. Must not decide whether a step ends: that is the coordinator's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.base.ids import MemberKey
from swarm.lifecycle.coverage import torn_tie
from swarm.peer.coordinator.run_leadership import Rivalry, RunLeadership
from swarm.peer.link import RefusedBy, together
from swarm.policy.liveness import Stillness
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


class StageLost(SwarmError):
    """A stage has had no live member for `stage_lost_s`."""


@dataclass
class _LedStage:
    """One stage in the step being ended: its leader, who is excluded, and the number of the stage's last attempt."""

    excluded: dict[MemberKey, m.Member] = field(default_factory=dict)
    leader: m.Member | None = None
    n: int = 0


class ChosenLeaders:
    """The leaders that one coordinator chose; `hear` is called with a stage and the loads that its members report.

    A leader itself is a stage peer: there `StageLeader` answers what is asked here.
    """

    def __init__(self, leadership: RunLeadership, attempt_n: int, hear: Callable[[int, tuple[m.Load, ...]], None]) -> None:
        self._leadership = leadership
        self._hear = hear
        self._stages = [_LedStage(n=attempt_n) for _ in range(leadership.config.num_stages)]
        # A look takes `request_s`: so a silent peer is found `stall_s` after it fell silent.
        still_s = max(leadership.timing.coordinator_s, leadership.timing.stall_s - leadership.timing.request_s)
        self._stillness = Stillness(still_s, leadership.now)

    def begin_step(self) -> None:
        """Begin after a new record: its first ready members lead, and nobody is excluded."""
        for led in self._stages:
            led.excluded.clear()
            led.leader = None

    def excluded(self) -> list[m.Member]:
        """Return the members that this step goes on without."""
        return [x for led in self._stages for x in led.excluded.values()]

    def is_excluded(self, stage: int, key: MemberKey) -> bool:
        """Tell whether this step goes on without that member of `stage`."""
        return key in self._stages[stage].excluded

    def readmit_if_few_hold(self, results: list[m.StageResult]) -> bool:
        """Ask the excluded members of a stage again if too few hold its average; True then: the step must not commit yet.

        With `min_peers_per_stage` above 1 a step needs that many holders of each stage, and most of its last members. The
        operator chose that the run stops rather than split: of two halves of a partition at most one goes on.
        """
        least = self._leadership.config.min_peers_per_stage
        if least == 1:
            return False
        for stage, result in enumerate(results):
            need = max(least, len(self.members(stage)) // 2 + 1)
            if len(result.holders) < need:
                self._leadership.tell_waiting(f"{need} peers of stage {stage} ({len(result.holders)} are here)")
                self._stages[stage].excluded.clear()
                return True
        return False

    async def check(self, step: int, advance: object) -> None:
        """Replace leaders that are gone before the seal shows it.

        If a leader is gone, or `advance` stands still, all members of all stages are looked at, at once: one that is gone may
        hold claims on the missing tickets.

        Args:
            step: the step that is being ended.
            advance: any value that changes while the step goes on; None while it need not go on.
        """
        stages = range(self._leadership.config.num_stages)
        everyone = advance is not None and self._stillness.take_due((step, advance), now=self._leadership.now)
        gone = [] if everyone else await together(*(self._exclude_leader_if_gone(stage) for stage in stages))
        if not everyone and not any(gone):
            return

        async def renew(stage: int) -> None:
            if await self._exclude_silent(stage) or (gone and gone[stage]):
                await self._gather(step, stage, freeze=False)

        await together(*(renew(stage) for stage in stages))

    async def _exclude_leader_if_gone(self, stage: int) -> bool:
        """Exclude the leader if it is gone, and return if it was; tell it the newest record if it lacks that.

        Raises:
            Rivalry: the leader has a newer record.
        """
        leader = self.leader(stage)
        try:
            if leader is None:
                raise RemoteError("no member is left")
            reply, _ = await self._leadership.link.ask(leader, m.Status(), m.StatusReply)
            if reply.member.key != leader.key:
                raise RemoteError("another incarnation answers there")
            if reply.step <= self._leadership.newest.step:
                await self._tell_record(leader)
            elif reply.step > self._leadership.newest.step + 1:
                await self._look_at_its_record(leader)
        except (LinkError, RemoteError) as error:
            logger.info("stage %d: leader %s is gone: %s", stage, leader and leader.peer[:8], error)
            self._exclude(stage, leader)
            return True
        return False

    def members(self, stage: int) -> list[m.Member]:
        """Return who takes part in the step: the newest record's ready members. Nobody waits for one that downloads."""
        return [x for x in self._leadership.newest.members[stage] if x.ready]

    def leader(self, stage: int) -> m.Member | None:
        """Return the stage's leader: the one that was told to lead, else the first ready member that is not excluded."""
        led = self._stages[stage]
        if led.leader is None or led.leader.key in led.excluded:
            led.leader = next((x for x in self.members(stage) if x.key not in led.excluded), None)
        return led.leader

    def _exclude(self, stage: int, member: m.Member | None) -> None:
        if member is not None:
            self._stages[stage].excluded[member.key] = member

    async def _exclude_silent(self, stage: int, level: int = logging.INFO) -> bool:
        """Look at all members at once and exclude those that do not answer: several may have died together."""
        asked = [x for x in self.members(stage) if x.key not in self._stages[stage].excluded]
        there = {x.key for x in await self._leadership.link.presence.answering(asked)}
        silent = [x for x in asked if x.key not in there]
        for member in silent:
            self._exclude(stage, member)
        if silent:
            logger.log(level, "stage %d: %d of %d members do not answer: excluded", stage, len(silent), len(asked))
        return bool(silent)

    async def gather_all(self, step: int, *, freeze: bool) -> list[tuple[m.Seal, ...]]:
        """Gather the seals of every stage from its leader, each under a new attempt."""
        return await together(*(self._gather(step, stage, freeze=freeze) for stage in range(self._leadership.config.num_stages)))

    async def _gather(self, step: int, stage: int, *, freeze: bool) -> tuple[m.Seal, ...]:
        """Gather the seals of one stage under a new attempt; a leader that does not answer is replaced until one does."""
        led = self._stages[stage]
        backoff = 0.1
        lost_since: float | None = None
        told: set[MemberKey] = set()
        while True:
            self._leadership.check()
            leader = self.leader(stage)
            if leader is None:
                # Nobody is left: everyone is tried again, for a stopped or isolated peer may come back.
                lost_s = self._leadership.timing.stage_lost_s
                self._leadership.tell_waiting(
                    f"a live member of stage {stage}; without one for {lost_s:g} s the run goes back to a checkpoint, once "
                    "there are peers that have one"
                )
                if lost_since is None:
                    lost_since = self._leadership.now
                    logger.warning("step %d: stage %d has no live member; waiting for one", step, stage)
                if self._leadership.now - lost_since > self._leadership.timing.stage_lost_s:
                    raise StageLost(f"stage {stage} has had no live member for {self._leadership.timing.stage_lost_s:g} s")
                if await self._have_restarted(stage):
                    raise StageLost(f"every member of stage {stage} has ended; they are here again without their memory")
                self._leadership.lost.add(stage)
                led.excluded.clear()
                await asyncio.sleep(backoff)
                backoff = min(2.0, 2 * backoff)
                continue
            level = logging.INFO if lost_since is None else logging.DEBUG  # while nobody is there they are tried for ever
            led.n += 1
            attempt = m.Attempt(ballot=self._leadership.ballot, n=led.n)
            request = m.Gather(
                run=self._leadership.context.run,
                stage=stage,
                step=step,
                attempt=attempt,
                freeze=freeze,
                members=tuple(self.members(stage)),
                excluded=tuple(led.excluded.values()),
            )
            try:
                reply, _ = await self._leadership.link.ask(
                    leader, request, m.Gathered, stall_s=3 * self._leadership.timing.request_s
                )
            except RefusedBy as refused:
                self._leadership.raise_if_newer(refused)
                if refused.code == "wrong_state":
                    continue  # an attempt with a higher number began; the next one has a higher number still
                if refused.code == "behind" and leader.key not in told and await self._tell_record(leader):
                    told.add(leader.key)
                    continue
                logger.log(level, "step %d, stage %d: leader %s: %s", step, stage, leader.peer[:8], refused)
                self._exclude(stage, leader)
                await asyncio.sleep(backoff)
            except (LinkError, RemoteError) as error:
                logger.log(level, "step %d, stage %d: leader %s: %s", step, stage, leader.peer[:8], error)
                self._exclude(stage, leader)
                await self._exclude_silent(stage, level)
            else:
                led.excluded |= {x.key: x for x in reply.excluded}
                self._leadership.lost.discard(stage)
                self._hear(stage, reply.loads)
                return reply.seals

    async def _have_restarted(self, stage: int) -> bool:
        """Tell whether every member of the stage announces itself in another incarnation: what they held is gone for certain."""
        roster = (await self._leadership.rosters())[stage]
        now = {x.peer: x.incarnation for x in roster}
        members = self.members(stage)
        return bool(members) and all(now.get(x.peer, x.incarnation) != x.incarnation for x in members)

    async def _look_at_its_record(self, leader: m.Member) -> None:
        """Ask a leader that has a newer record for it: the run went on under another coordinator, and may have ended.

        Raises:
            Rivalry: that record is newer.
        """
        info, _ = await self._leadership.link.ask(leader, m.Hello(), m.RunInfo)
        if info.record is not None and info.record.newer_than(self._leadership.newest):
            raise Rivalry(info.record)

    async def _tell_record(self, leader: m.Member) -> bool:
        """Tell a leader the newest record, which it missed: as its stage's only holder it has nobody to hear it from."""
        return await self._leadership.link.tell(leader, m.Commit(record=self._leadership.newest))

    async def average_all(self, step: int, gathered: list[tuple[m.Seal, ...]]) -> list[m.StageResult] | None:
        """Have every stage average its attempt, tied sums included; None if one failed."""
        attempts = tuple(m.Attempt(ballot=self._leadership.ballot, n=led.n) for led in self._stages)
        replies = await together(
            *(self._average(step, stage, gathered[stage], attempts) for stage in range(self._leadership.config.num_stages))
        )
        results = [reply for reply in replies if reply is not None]
        if len(results) < len(replies):
            return None
        torn = torn_tie(results)
        if torn:
            logger.error("step %d: stages hold different sums of the tied parameter %s; averaging again", step, torn)
            return None
        return results

    async def _average(
        self, step: int, stage: int, seals: tuple[m.Seal, ...], attempts: tuple[m.Attempt, ...]
    ) -> m.StageResult | None:
        """Have one stage average; if that fails, exclude whoever is to blame and return None."""
        leader = self.leader(stage)
        assert leader is not None
        request = m.AllReduce(
            run=self._leadership.context.run, stage=stage, step=step, attempt=attempts[stage], seals=seals, attempts=attempts
        )
        try:
            reply, _ = await self._leadership.link.ask(leader, request, m.AllReduced, stall_s=self._leadership.timing.stall_s)
        except RefusedBy as refused:
            self._leadership.raise_if_newer(refused)
            logger.info("step %d, stage %d: no average: %s", step, stage, refused)
            self._exclude(stage, leader if refused.code != "wrong_state" else None)
            return None
        except (LinkError, RemoteError) as error:
            logger.info("step %d, stage %d: leader %s: %s", step, stage, leader.peer[:8], error)
            self._exclude(stage, leader)
            await self._exclude_silent(stage)
            return None
        if reply.result is None:
            logger.info("step %d, stage %d: no average: %s", step, stage, reply.reason)
            if reply.suspects:
                self._exclude(stage, reply.suspects[0])
            return None
        return reply.result
