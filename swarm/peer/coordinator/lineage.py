"""Finds the version from which the run goes on: at its start, when a stage was lost, and when two lineages meet.

Owns the search (who lives, who holds what) and the rules of docs/design.md, "Lineage"; `policy/restore.py` chooses, the
coordinator publishes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from swarm.base.errors import LinkError, RemoteError
from swarm.base.ids import MemberKey
from swarm.lifecycle.commit_record import checkpoint_writers, fault_of, genesis_record, is_checkpoint_due, restoring_record
from swarm.peer.coordinator.run_leadership import Demoted, RunLeadership
from swarm.peer.link import RefusedBy, together
from swarm.policy.restore import Holding, newest_complete, worth_waiting_for
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


#: Announced peers that no record lists are told the newest record, so many at once.
MAX_TOLD = 64
#: Announced peers of each stage that are asked, before the run begins, whether it has begun.
NUM_ASKED_AT_START = 32
#: The peer has nothing for this run's stage; any other refusal says nothing of what it holds.
_HOLDS_NOTHING = {"wrong_run", "wrong_stage"}


@dataclass(frozen=True)
class _Holdings:
    """What peers could go on from."""

    #: By version.
    records: dict[str, m.CommitRecord]
    #: Those, and others that are known though nobody holds them (`peer/checkpoint_record.py`).
    known: dict[str, m.CommitRecord]
    #: For each stage, what each peer holds.
    stages: list[dict[MemberKey, list[Holding]]]
    #: Those that can make the initial values.
    initialised: set[MemberKey]
    #: Those that have a damaged checkpoint, in words.
    damaged: list[str]
    #: The newest number of commits known to be on the disks of all stages; 0 if none is.
    saved: int


def _has(version_id: str, holdings: list[Holding]) -> bool:
    return any(holding.version_id == version_id for holding in holdings)


def _names(keys: Iterable[MemberKey]) -> str:
    return ", ".join(peer[:8] for peer, _ in keys)


class Lineage:
    """One coordinator's view of the run's history and of others'."""

    def __init__(self, leadership: RunLeadership) -> None:
        self._leadership = leadership
        #: Since when each peer that may hold something has not said what.
        self._silent_since: dict[MemberKey, float] = {}

    async def starting_record(
        self, peers: list[list[m.Member]], *, era: int, waited_s: float
    ) -> tuple[m.CommitRecord | None, str]:
        """Find the record to go on from: the newest version that the peers hold complete, else the initial values.

        Args:
            peers: of each stage, all of whom become members; those that do not hold the version are not ready.
            era: the lowest that the record may have.
            waited_s: how long there has been a peer of every stage, and others were waited for.

        Returns:
            The record and "", or None and what the run has to wait for.
        """
        held = await self._held(peers)
        stages = held.stages
        best, reason = newest_complete(stages)
        if obstacle := self._obstacle(peers, held, best, waited_s):
            return None, obstacle
        ready = held.initialised if best is None else {key for xs in stages for key, h in xs.items() if _has(best.version_id, h)}
        members = tuple(
            tuple(sorted((x.model_copy(update={"ready": x.key in ready}) for x in xs), key=lambda x: not x.ready)) for xs in peers
        )
        if self._silent_since:
            logger.error("peers %s do not say what they hold: going on without it", _names(self._silent_since))
        if best is None:
            if held.known:
                logger.error("beginning again from the initial values: %s", reason)
            genesis = genesis_record(self._leadership.config, self._leadership.context.run, self._leadership.ballot, members)
            return genesis if not era else restoring_record(genesis, era=era, ballot=self._leadership.ballot, members=members), ""
        known = [*held.known.values(), *([] if self._leadership.record is None else [self._leadership.record])]
        newest = max(known, key=lambda r: (r.era, r.step))
        if newest.version_id == best.version_id:
            logger.info("going on: %s", reason)
        else:
            logger.warning("going on from an earlier version than that of step %d: %s", newest.step + 1, reason)
        record = held.records[best.version_id]
        if is_checkpoint_due(self._leadership.config, record):
            record = record.model_copy(update={"saved": record.step + 1})
        return restoring_record(record, era=max(era, best.era + 1), ballot=self._leadership.ballot, members=members), ""

    async def _held(self, peers: list[list[m.Member]]) -> _Holdings:
        records: dict[str, m.CommitRecord] = {}
        checkpoint_record = self._leadership.checkpoint_record
        stages: list[dict[MemberKey, list[Holding]]] = []
        initialised: set[MemberKey] = set()
        damaged: list[str] = []
        silent: list[MemberKey] = []
        told_by = await together(*(together(*(self._holdings(k, x) for x in xs)) for k, xs in enumerate(peers)))
        for stage, (candidates, answers) in enumerate(zip(peers, told_by, strict=True)):
            stages.append({})
            for member, answer in zip(candidates, answers, strict=True):
                if answer is None:
                    if member.keeps_checkpoints or self._leadership.record is not None:
                        silent.append(member.key)
                    continue
                sound = [
                    r
                    for r in answer.records
                    if r.run == self._leadership.context.run and not fault_of(self._leadership.config, r)
                ]
                records |= {r.version_id: r for r in sound}
                stages[-1][member.key] = [Holding(r.version_id, r.era, r.step) for r in sound]
                if answer.checkpoint_record is not None:
                    checkpoint_record.hear(answer.checkpoint_record)
                if answer.initial:
                    initialised.add(member.key)
                if answer.damaged:
                    damaged.append(f"of stage {stage} at peer {member.peer[:8]}")
        self._silent_since = {key: self._silent_since.get(key, self._leadership.now) for key in silent}
        told = [] if checkpoint_record.record is None else [checkpoint_record.record]
        known = {r.version_id: r for r in told} | records
        saved = max((r.saved for r in [*told, *records.values()]), default=0)
        return _Holdings(records, known, stages, initialised, damaged, saved)

    def _obstacle(self, peers: list[list[m.Member]], held: _Holdings, best: Holding | None, waited_s: float) -> str:
        """Tell why the run should not go on with what is held, for which it has waited so long; "" if it may.

        Those who do not say what they hold have `stage_lost_s` for it. Others may bring a newer version from their disks: for as
        long if the run can go on from an older one, else without end. Nor does it begin again if records tell that every stage
        had a checkpoint of one step, or while a damaged one lies somewhere: its operator may have a copy.
        """
        grace_s, now = self._leadership.timing.stage_lost_s, self._leadership.now
        if silent := [key for key, since in self._silent_since.items() if now - since <= grace_s]:
            return f"peers {_names(silent)} to say what they hold"
        if best is not None and waited_s > grace_s:
            return ""
        absent = self._absent_holders(held, best)
        if absent or best is not None:
            return absent
        if held.damaged:
            return (
                f"intact checkpoints: damaged are those {', '.join(held.damaged)}, whose logs name the files; put an intact copy "
                "in their place, start a peer that has one, or start all with empty state directories to begin again"
            )
        if held.saved:
            steps = [sorted({h.step + 1 for found in stage.values() for h in found}) for stage in held.stages]
            has = "; ".join(f"stage {k}: {', '.join(map(str, xs)) or 'none'}" for k, xs in enumerate(steps))
            return (
                f"a checkpoint of one step in every stage ({has}): start a peer whose state directory has what is missing, or "
                "all with empty ones to begin again"
            )
        without = [k for k, members in enumerate(peers) if held.initialised.isdisjoint(x.key for x in members)]
        return f"a peer of stages {without} that has the initial weights (--model)" if without else ""

    def _absent_holders(self, held: _Holdings, best: Holding | None) -> str:
        written = [r for r in held.known.values() if is_checkpoint_due(self._leadership.config, r)]
        newer = [r for r in written if best is None or (r.era, r.step) > (best.era, best.step)]
        newer.sort(key=lambda r: (r.era, r.step), reverse=True)
        num_stages = range(self._leadership.config.num_stages)
        version_id, absent = worth_waiting_for(
            [{key[0]: {h.version_id for h in found} for key, found in stage.items()} for stage in held.stages],
            [r.version_id for r in newer],
            {
                r.version_id: [[x.peer for x in checkpoint_writers(self._leadership.config, r, k)] for k in num_stages]
                for r in newer
            },
        )
        if not version_id:
            return ""
        names = ", ".join(peer[:8] for peer in absent)
        step, wait_s = held.known[version_id].step + 1, self._leadership.timing.stage_lost_s
        if best is None:
            return f"peers {names}: with them the run goes on at step {step}; to begin again start all with empty directories"
        return f"peers {names}, for {wait_s:g} s: with them the run goes on at step {step}, else at step {best.step + 1}"

    async def _holdings(self, stage: int, member: m.Member) -> m.Held | None:
        """Ask a peer what it holds; None if it does not say."""
        try:
            request = m.Holdings(run=self._leadership.context.run, stage=stage)
            held, _ = await self._leadership.link.ask(member, request, m.Held)
            return held
        except RefusedBy as refused:
            return m.Held(member=member, initial=False) if refused.code in _HOLDS_NOTHING else None
        except (LinkError, RemoteError):
            return None

    async def _live_peers(self) -> list[list[m.Member]]:
        """Return the announced peers of every stage that answer and serve it; one that has moved may be announced elsewhere."""

        async def live(stage: int, member: m.Member) -> m.Member | None:
            reply = await self._leadership.link.status_of(member)
            return reply.member if reply is not None and reply.member.key == member.key and reply.stage == stage else None

        rosters = await self._leadership.rosters()
        answers = await together(*(together(*(live(k, x) for x in roster)) for k, roster in enumerate(rosters)))
        return [[x for x in stage if x is not None] for stage in answers]

    async def set_back(self) -> m.CommitRecord:
        """Find, when a stage was lost, the newest version that is complete over all stages, once each has a live peer.

        Raises:
            Demoted, Rivalry: this coordinator has nothing to decide any more.
        """
        leadership, told, since = self._leadership, "", self._leadership.now
        while True:
            peers = await self._live_peers()
            empty = [k for k, xs in enumerate(peers) if not xs]
            if empty:
                reason, since = f"a peer of stages {empty}: nobody serves them", leadership.now
            else:
                record, reason = await self.starting_record(peers, era=leadership.newest.era + 1, waited_s=leadership.now - since)
                if record is not None:
                    break
            if reason != told:
                logger.error("waiting for %s", reason)
            told = reason
            leadership.tell_waiting(reason)
            await leadership.wait(leadership.timing.request_s / 2)
        num_discarded = self._leadership.newest.step - record.step
        if num_discarded > 0:
            logger.error(
                "the run is set back from step %d to step %d: %d committed steps are discarded",
                self._leadership.newest.step + 1,
                record.step + 1,
                num_discarded,
            )
        else:
            logger.warning("the run goes on at step %d: nothing is lost", record.step + 1)
        return record

    async def resolve_rivalry(self, rival: m.CommitRecord) -> m.CommitRecord:
        """Decide between two lineages: one that lacks a live holder of some stage loses; else the newer record wins, `rival`.

        Returns:
            The record with which this lineage goes on and replaces the other.

        Raises:
            Demoted: the other one goes on.
        """
        self._leadership.forget_rival()
        mine = self._leadership.newest
        missing = await self._without_holder(rival)
        if not missing or self._leadership.lost or await self._without_holder(mine):
            raise Demoted(f"the run goes on from a record of step {rival.step}")
        logger.error("the other lineage at step %d has nobody for stages %s: this one goes on", rival.step, missing)
        return restoring_record(mine, era=rival.era + 1, ballot=self._leadership.ballot, members=mine.members)

    async def _without_holder(self, record: m.CommitRecord) -> list[int]:
        """Return the stages where no listed member takes `record`: each is told, since one may not have heard of it yet.

        Who knows a newer one has gone on from a rival's record, or has left that of this lineage.
        """

        async def takes(member: m.Member) -> bool:
            try:
                await self._leadership.link.ask(member, m.Commit(record=record), m.Ack)
            except RefusedBy as refused:
                return refused.code == "ahead" and record is not self._leadership.newest
            except (LinkError, RemoteError):
                return False
            return True

        answers = await together(*(together(*(takes(x) for x in xs)) for xs in record.members))
        return [k for k, found in enumerate(answers) if not any(found)]

    async def require_not_begun(self, num_asked: int) -> None:
        """Ask announced peers, up to `num_asked` of each stage, for a record: the run may have begun without this coordinator.

        Nobody could tell a candidate of one that was cut off when it stood, and newcomers who ask it know of none either.

        Raises:
            Demoted: somebody has one.
        """
        rosters, rng = await self._leadership.rosters(), self._leadership.context.rng
        announced = [x for roster in rosters for x in rng.sample(roster, min(len(roster), num_asked))]
        for record in await together(*(self._record_of(member) for member in announced)):
            if record is not None:
                raise Demoted(f"a record of step {record.step} exists already")

    async def _record_of(self, member: m.Member) -> m.CommitRecord | None:
        try:
            return (await self._leadership.link.ask(member, m.Hello(), m.RunInfo))[0].record
        except (LinkError, RemoteError):
            return None

    async def survey_loop(self, joining: Callable[[], Container[MemberKey]]) -> None:
        """Tell the newest record to announced peers that it does not list: they may have missed it, or follow another."""
        while True:
            await asyncio.sleep(self._leadership.timing.coordinator_s)
            record = self._leadership.record
            if record is None or self._leadership.lost:
                continue
            listed = {x.key for xs in record.members for x in xs}
            announced = [x for roster in await self._leadership.rosters() for x in roster]
            strays = [x for x in announced if x.key not in listed and x.key not in joining()]
            told = self._leadership.context.rng.sample(strays, min(len(strays), MAX_TOLD))
            await together(*(self._tell_stray(member, record) for member in told))

    async def _tell_stray(self, member: m.Member, record: m.CommitRecord) -> None:
        try:
            await self._leadership.link.ask(member, m.Commit(record=record), m.Ack)
        except RefusedBy as refused:
            theirs = refused.refusal.record
            if theirs is not None and theirs.newer_than(self._leadership.record):
                self._leadership.meet_rival(theirs)
                await self._leadership.notify()
        except (LinkError, RemoteError):
            pass  # it may have gone; who has not is told again
