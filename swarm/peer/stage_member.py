"""A stage peer's part in steps: ledgers, seals, averages, commits. Owns its versions, accumulators and the newest record.

Must not route micro-batches and must not lead: `stage_leader` and `micro_batches` use what is here. The rules are those
of DESIGN.md, "The life of a step"; the tables are in `lifecycle/step.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.averaging.all_reduce import Average, Round, RoundFailed
from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.base.ids import ZERO_BALLOT, Ballot
from swarm.lifecycle.coverage import coverage_of
from swarm.lifecycle.record import genesis_record
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse, Tasks
from swarm.stage.accumulator import Accumulator
from swarm.stage.compute import StageCompute
from swarm.stage.digest import checksum_of, digest_of
from swarm.stage.executor import Executor, Priority
from swarm.stage.optimizer import OptimizerState, adamw
from swarm.stage.versions import StageState, VersionStore, make_version
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor, encode_tensor
from swarm.wire.framing import Buffer, Frame

logger = logging.getLogger(__name__)

#: Elements of an average or a state that one request moves.
CHUNK_ELEMENTS = 2**22
#: Averages that wait for a joiner's snapshot; beyond it the download starts again.
MAX_QUEUED_AVERAGES = 64


@dataclass
class StepState:
    """What a member knows of one step that has not committed."""

    accumulator: Accumulator
    leader: m.Member | None = None
    round: Round | None = None
    average: Average | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


async def _nothing_to_restore(record: m.CommitRecord) -> StageState | None:
    return None


class StageMember:
    """The step protocol at one peer of one stage."""

    def __init__(
        self, link: Link, stage: int, compute: StageCompute, executor: Executor, background: Executor, tasks: Tasks
    ) -> None:
        self.link = link
        self.context = link.context
        self.config = link.context.config
        self.stage = stage
        self.compute = compute
        self.executor = executor
        self.background = background
        self._tasks = tasks
        initial = genesis_record(self.config, self.context.run, ZERO_BALLOT, ((),) * self.config.num_stages)
        masters = compute.initial_masters()
        self.versions = VersionStore(
            make_version(initial, compute.layout, masters, compute.dtype),
            OptimizerState.zero(masters),
            keep=self.config.delay_steps + 1,
        )
        #: Newest record seen; None before genesis.
        self.record: m.CommitRecord | None = None
        #: Averages of records after the snapshot that is being downloaded.
        self.queued: list[tuple[m.CommitRecord, torch.Tensor]] | None = None
        self.promised: Ballot = ZERO_BALLOT
        self.coordinator: m.Member | None = None
        self.committed = asyncio.Condition()
        self.state_digest = ""
        self._steps: dict[int, StepState] = {}
        self._last_average: tuple[int, Average] | None = None
        self.commit_lock = asyncio.Lock()
        #: Called after each record was applied or queued, in order.
        self.on_commit: list[Callable[[m.CommitRecord], None]] = []
        #: Finds the state at a record's head in memory or on disk; see `restore.py`.
        self.restore: Callable[[m.CommitRecord], Awaitable[StageState | None]] = _nothing_to_restore
        #: Steps that were committed and then set back, by a restore or by another lineage.
        self.discarded_steps = 0
        for kind, handler in (
            (m.Collect, self._on_collect), (m.Revoke, self._on_revoke), (m.Reduce, self._on_reduce),
            (m.Slice, self._on_slice), (m.FetchAverage, self._on_fetch_average), (m.Commit, self._on_commit),
            (m.Elect, self._on_elect),
        ):  # fmt: skip
            link.register(kind, handler)

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def num_commits(self) -> int:
        """Steps that have committed, as far as this peer knows (its own version may still lag)."""
        return 0 if self.record is None else self.record.step + 1

    @property
    def up_to_date(self) -> bool:
        return self.record is not None and self.queued is None and self.versions.newest.head == self.record.head

    @property
    def me(self) -> m.Member:
        return self.context.member()

    def listed(self) -> m.Member | None:
        """This peer's entry in the newest record."""
        if self.record is None:
            return None
        return next((x for x in self.record.members[self.stage] if x.key == self.me.key), None)

    def members_for(self, step: int) -> tuple[m.Member, ...]:
        """Members of this stage for `step`: those of the record that its version came from, or nobody if that is gone.

        Two peers never differ here, so at the zero term there is one leader.
        """
        version = self.versions.at(self.config.base_step(step))
        return version.record.members[self.stage] if version is not None else ()

    def leader_of(self, step: int) -> m.Member | None:
        """Who grants claims for `step`: the last to collect, else the record's first ready member."""
        state = self._steps.get(step)
        if state is not None and state.leader is not None:
            return state.leader
        return next((x for x in self.members_for(step) if x.ready), None)

    def step_state(self, step: int) -> StepState:
        """The open state of `step`.

        Raises:
            Refuse: `stale` if the step has committed, `behind` if it is too far ahead.
        """
        if step < self.num_commits:
            raise Refuse("stale", f"step {step} has committed", record=self.record)
        if step > self.num_commits + self.config.delay_steps:
            raise Refuse("behind", f"step {step} is ahead of this peer at {self.num_commits}", record=self.record)
        state = self._steps.get(step)
        if state is None:
            state = self._steps[step] = StepState(self.make_accumulator(step))
        return state

    def make_accumulator(self, step: int) -> Accumulator:
        return Accumulator(step, self.compute.layout, dtype=self.compute.master_dtype, device=self.compute.device)

    def accept_ballot(self, ballot: Ballot) -> None:
        """Members refuse lower ballots than they promised."""
        if ballot < self.promised:
            raise Refuse("lower_ballot", f"ballot {self.promised.counter} was accepted", record=self.record)
        self.promised = ballot

    # ------------------------------------------------------------------------------------------------ ledger

    async def _on_collect(self, message: m.Collect, frame: Frame, progress: Progress) -> m.Collected:
        self.require_stage(message.stage)
        self.accept_ballot(message.term.ballot)
        state = self.step_state(message.step)
        ledger = state.accumulator.ledger

        def job() -> m.Seal:
            if message.term.order < ledger.term.order:
                raise Refuse("wrong_state", f"term {message.term.order} is below {ledger.term.order}")
            if message.freeze:
                state.accumulator.freeze(message.term)
            else:
                ledger.collect(message.term, freeze=False)
            return ledger.seal(self.me, self.versions.newest.head, self.state_digest)

        seal = (await self.executor.run(job, Priority.CONTROL)).value
        state.leader = message.leader
        if state.round is not None and state.round.term.order != message.term.order:
            state.round.fail(RoundFailed("a newer attempt began"))
            state.round = None
        state.average = None
        return m.Collected(seal=seal)

    async def _on_revoke(self, message: m.Revoke, frame: Frame, progress: Progress) -> m.Revoked:
        self.require_stage(message.stage)
        ledger = self.step_state(message.step).accumulator.ledger
        outcome = await self.executor.run(lambda: ledger.revoke(message.index), Priority.CONTROL)
        return m.Revoked(held=outcome.value)

    def require_stage(self, stage: int) -> None:
        if stage != self.stage:
            raise Refuse("wrong_stage", f"this peer serves stage {self.stage}")

    # ------------------------------------------------------------------------------------------------ average

    async def _on_reduce(self, message: m.Reduce, frame: Frame, progress: Progress) -> m.Reduced:
        self.require_stage(message.stage)
        self.accept_ballot(message.term.ballot)
        state = self.step_state(message.step)
        ledger = state.accumulator.ledger
        if ledger.term.order != message.term.order or ledger.state not in ("frozen", "averaging"):
            raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.term.order}")
        progress.follow(lambda: self.background.finished)
        try:
            round_ = await self._round(state, message)
            progress.follow(lambda: round_.num_parts)
            async with asyncio.timeout(self.config.timing.average_s):
                average = await round_.run(lambda j, part: self._exchange(message, round_.members[j], part, round_.me))
        except RoundFailed as failure:
            self._leave_round(state, message.term)
            return m.Reduced(suspects=failure.suspects, reason=str(failure)[:2000])
        except TimeoutError:
            self._leave_round(state, message.term)
            return m.Reduced(reason=f"no average within {self.config.timing.average_s:g} s")
        if ledger.term.order != message.term.order or ledger.state != "averaging":
            return m.Reduced(reason="a newer attempt began")
        # Invariant: the average is held before the leader hears of it.
        state.average = average
        ledger.move("hold")
        return m.Reduced(average_digest=average.digest, sum_squares=average.sum_squares)

    def _leave_round(self, state: StepState, term: m.Term) -> None:
        ledger = state.accumulator.ledger
        if ledger.state == "averaging" and ledger.term.order == term.order:
            ledger.move("fail")
        if state.round is not None and state.round.term.order == term.order:
            state.round.fail(RoundFailed("this member left the round"))

    async def _round(self, state: StepState, message: m.Reduce) -> Round:
        """The round of this attempt; made once, from a copy of the sealed accumulator."""
        ledger = state.accumulator.ledger
        if ledger.state != "frozen":
            raise Refuse("wrong_state", "this round has been started already")
        ledger.move("reduce")
        contribution = (await self.executor.run(state.accumulator.contribution, Priority.CONTROL)).value
        if ledger.term.order != message.term.order or ledger.state != "averaging":
            raise RoundFailed("a newer attempt began")
        state.round = Round(
            message.term, message.seals, self.me.key, contribution,
            num_elements=self.compute.layout.num_elements, dtype=self.compute.master_dtype, run_job=self._in_background,
        )  # fmt: skip
        state.changed.set()
        return state.round

    async def _in_background(self, job: Callable[[], Any]) -> Any:
        return (await self.background.run(job, Priority.CONTROL)).value

    async def _exchange(
        self, message: m.Reduce, target: m.Member, part: torch.Tensor | None, me: int
    ) -> torch.Tensor:
        request = m.Slice(
            run=message.run, stage=self.stage, step=message.step, term=message.term, member=self.me, index=me
        )
        buffers: tuple[Buffer, ...] = ()
        if part is not None:
            spec, buffer = encode_tensor("slice", part, "raw", "state")
            request, buffers = request.model_copy(update={"tensors": (spec,)}), (buffer,)
        timing = self.config.timing
        _, frame = await self.link.ask(target, request, m.ReducedSlice, buffers=buffers, stall_s=timing.average_s)
        return decode_tensor(frame.message.tensors[0], frame.buffers[0])

    async def _on_slice(self, message: m.Slice, frame: Frame, progress: Progress) -> Frame:
        self.require_stage(message.stage)
        state = self.step_state(message.step)
        ledger = state.accumulator.ledger
        while state.round is None or state.round.term.order != message.term.order:
            # The sender was told to start a moment before this member; a frozen ledger of the attempt vouches for it.
            if ledger.term.order != message.term.order or ledger.state not in ("frozen", "averaging"):
                raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.term.order}")
            state.changed.clear()
            try:
                async with asyncio.timeout(self.config.timing.request_s):
                    await state.changed.wait()
            except TimeoutError:
                raise Refuse("wrong_state", "this member was not told to start the round") from None
        round_ = state.round
        index = round_.index_of(message.member)
        if index is None or index == round_.me:
            raise Refuse("not_member", "the sender is not sealed in this attempt")
        part = None
        if message.tensors:
            part = decode_tensor(message.tensors[0], frame.buffers[0])
            if part.shape != (round_.slice_elements,) or part.dtype != self.compute.master_dtype:
                raise Refuse("bad_request", f"slice has {tuple(part.shape)} elements, not {round_.slice_elements}")
            if not bool(torch.isfinite(part).all()):
                raise Refuse("non_finite", "the slice holds NaN or Inf")
        progress.follow(lambda: round_.num_parts)
        try:
            reduced = await round_.reduce(index, part)
        except RoundFailed as failure:
            raise Refuse("failed", str(failure)) from None
        spec, buffer = encode_tensor("slice", reduced, "raw", "state")
        return Frame(m.ReducedSlice(tensors=(spec,)), (buffer,))

    async def _on_fetch_average(self, message: m.FetchAverage, frame: Frame, progress: Progress) -> Frame:
        self.require_stage(message.stage)
        held = [(s, x.average) for s, x in self._steps.items() if x.average is not None]
        if self._last_average is not None:
            held.append(self._last_average)
        for step, average in held:
            if step == message.step and average is not None and average.digest == message.digest:
                part = average.flat[message.offset : message.offset + message.length]
                spec, buffer = encode_tensor("average", part, "raw", "state")
                return Frame(m.AverageCopy(total=average.flat.numel(), tensors=(spec,)), (buffer,))
        raise Refuse("unknown", f"no such average of step {message.step} is held")

    # ------------------------------------------------------------------------------------------------ commit

    async def _on_commit(self, message: m.Commit, frame: Frame, progress: Progress) -> m.Ack:
        self.learn(message.record)
        return m.Ack()

    def learn(self, record: m.CommitRecord) -> None:
        """A record came in, from the coordinator or a peer; newer ones are handed on and applied in the background.

        The record is the decision, so it stands whatever ballot was promised since.
        """
        if record.run != self.context.run or len(record.members) != self.config.num_stages:
            raise Refuse("wrong_run", "the record belongs to another run")
        known = self.record
        if known is not None and not record.newer_than(known):
            if record.head != known.head or record.era < known.era:  # its sender may follow another lineage
                raise Refuse("ahead", f"step {known.step} of era {known.era} is newer", record=known)
            return
        self.record = record
        self._tasks.start(self._forward(record), f"forward record {record.step}")
        self._tasks.start(self._take_over(record, known), f"apply record {record.step}", vital=True)

    async def _forward(self, record: m.CommitRecord) -> None:
        """Hand the record on: to the next member of this stage, and to the leader of the next stage."""
        mine = [x for x in record.members[self.stage] if x.key != self.me.key]
        after = [x for x in mine if x.key > self.me.key] or mine
        targets = after[:1] + list(record.members[(self.stage + 1) % self.config.num_stages][:1])
        for target in targets:
            if target.key == self.me.key:
                continue
            try:
                await self.link.ask(target, m.Commit(record=record), m.Ack)
            except (LinkError, RemoteError):
                continue  # it will hear of it from someone else, or notice that it is behind

    async def _take_over(self, record: m.CommitRecord, known: m.CommitRecord | None) -> None:
        async with self.commit_lock:
            set_back = known is not None and (record.era > known.era or record.step <= known.step)
            if set_back:
                assert known is not None
                self._forget(known, record)
            if record.step == -1 or set_back or (known is None and record.era > 0):
                state = await self.restore(record) if self.queued is None else None
                if state is not None:
                    self.versions.replace(state)
                    await self.refresh_digest()
                elif self.queued is not None:
                    self.queued.clear()
            elif self.queued is not None:
                await self._queue(record)
            elif record.previous_head == self.versions.newest.head:
                await self._apply(record)
            elif record.head != self.versions.newest.head:
                logger.warning("behind: record of step %d does not follow this peer's version", record.step)
            for step in [s for s in self._steps if s <= record.step]:
                del self._steps[step]
            for callback in self.on_commit:
                callback(record)
            async with self.committed:
                self.committed.notify_all()

    def _forget(self, known: m.CommitRecord, record: m.CommitRecord) -> None:
        """Another lineage or era replaces what was committed: loudly, and counted."""
        self.discarded_steps += known.step - record.step
        logger.error(
            "step %d of era %d replaces step %d of era %d: %d committed steps are discarded",
            record.step, record.era, known.step, known.era, known.step - record.step,
        )  # fmt: skip
        self._steps.clear()
        self._last_average = None

    async def _apply(self, record: m.CommitRecord) -> None:
        average = await self._average_of(record)
        if average is None:
            return
        await self.advance(record, average.flat)
        self._last_average = (record.step, average)

    async def _average_of(self, record: m.CommitRecord) -> Average | None:
        """The average that `record` decided on: held, or copied from one of its holders; None if nobody gives it."""
        result = record.results[self.stage]
        state = self._steps.get(record.step)
        if state is not None and state.average is not None and state.average.digest == result.average_digest:
            state.accumulator.ledger.move("commit")
            return state.average
        for holder in result.holders:
            if holder.key == self.me.key:
                continue
            try:
                flat = await self._copy_average(holder, record.step, result.average_digest)
            except SwarmError as error:
                logger.info("average of step %d not copied from %s: %s", record.step, holder.peer[:8], error)
                continue
            return Average(result.attempt, (), flat, result.average_digest, result.sum_squares)
        logger.warning("no holder gave the average of step %d", record.step)
        return None

    async def _copy_average(self, holder: m.Member, step: int, digest: str) -> torch.Tensor:
        total = self.compute.layout.num_elements
        flat = torch.empty(total, dtype=self.compute.master_dtype)
        for offset in range(0, total, CHUNK_ELEMENTS):
            request = m.FetchAverage(
                run=self.context.run, stage=self.stage, step=step, digest=digest, offset=offset, length=CHUNK_ELEMENTS
            )
            reply, frame = await self.link.ask(holder, request, m.AverageCopy)
            part = decode_tensor(reply.tensors[0], frame.buffers[0])
            flat[offset : offset + CHUNK_ELEMENTS] = part
        if (await self.background.run(lambda: digest_of([flat]), Priority.CONTROL)).value != digest:
            raise RemoteError(f"the average from {holder.peer[:8]} has another digest")
        return flat

    async def _queue(self, record: m.CommitRecord) -> None:
        assert self.queued is not None
        average = await self._average_of(record)
        if average is None or len(self.queued) >= MAX_QUEUED_AVERAGES:
            self.queued.clear()  # a gap: the snapshot must be newer than this record
            return
        self.queued.append((record, average.flat))
        self._last_average = (record.step, average)

    async def advance(self, record: m.CommitRecord, flat: torch.Tensor) -> None:
        """Apply one record to the newest version: the optimizer step, as a job of the compute thread."""
        compute, config = self.compute, self.config

        def job() -> None:
            newest = self.versions.newest
            masters, optimizer = newest.masters, self.versions.optimizer
            if not record.skipped:
                masters, optimizer = adamw(
                    config, masters, flat.to(compute.device), optimizer, learning_rate=record.learning_rate,
                    factor=record.clip_coefficient / record.tokens,
                )  # fmt: skip
            version = make_version(record, compute.layout, masters, compute.dtype)
            self.versions.add(version, optimizer)

        await self.executor.run(job, Priority.CONTROL)
        self.state_digest = ""
        self._tasks.start(self.refresh_digest(), "digest of the state")

    async def refresh_digest(self) -> None:
        """Digest of parameters and optimizer state of the newest version, for the next seal."""
        version, optimizer = self.versions.newest, self.versions.optimizer
        outcome = await self.background.run(
            lambda: checksum_of([version.masters, optimizer.first, optimizer.second]), Priority.CONTROL
        )
        if self.versions.newest is version:
            self.state_digest = outcome.value

    # ------------------------------------------------------------------------------------------------ coordinator

    async def _on_elect(self, message: m.Elect, frame: Frame, progress: Progress) -> m.Elected:
        self.accept_ballot(message.ballot)
        self.coordinator = message.coordinator
        prepared = [
            (step, self._prepared_result(state.average))
            for step, state in sorted(self._steps.items())
            if state.average is not None and state.accumulator.ledger.state == "prepared"
        ]
        highest = max((s.accumulator.ledger.term for s in self._steps.values()), key=lambda t: t.order, default=m.Term())
        return m.Elected(
            stage=self.stage, member=self.me, record=self.record, term=highest, prepared=tuple(prepared)
        )

    def _prepared_result(self, average: Average) -> m.StageResult:
        return stage_result(average.term, average.seals, average.digest, average.sum_squares, (self.me,))


def stage_result(
    term: m.Term, seals: tuple[m.Seal, ...], digest: str, sum_squares: float, holders: tuple[m.Member, ...]
) -> m.StageResult:
    """What a stage contributes to the commit record, from the seals of the attempt that was averaged."""
    coverage = coverage_of(seals)
    return m.StageResult(
        attempt=term,
        average_digest=digest,
        sum_squares=sum_squares,
        num_tickets=len(coverage.covered),
        num_overflow=len(coverage.overflow),
        tokens=sum(seal.tokens for seal in seals),
        loss_sum=sum(seal.loss_sum for seal in seals),
        holders=holders,
    )
