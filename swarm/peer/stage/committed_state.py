"""What has committed at a stage peer: the newest record, the versions that came of records, and averages for those that lag.

A record that comes in is learned at once, handed on, and taken over in its turn: the optimizer step with the average that it
decided on, held here or copied from one of its holders; or, where another lineage or era replaces what was committed, the state
at its head. Between the two this peer lags by what it has in hand, which is not being behind: who decides by record and state
together waits in `settled`. Must not know how steps end: `stage_member`, which builds on this, takes part in that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import torch

from swarm.averaging.all_reduce import StageSum
from swarm.averaging.compressors.choice import compressor_of
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.local_updates import LocalAccumulator, OwnCopy, nesterov
from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.base.ids import ZERO_BALLOT
from swarm.lifecycle.record import fault_of, genesis_record
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse, Tasks
from swarm.peer.presence import Candidates
from swarm.peer.stage.at_work import AtWork
from swarm.peer.stage.step_state import StepState
from swarm.stage.compute import StageCompute
from swarm.stage.device import on_device
from swarm.stage.digest import checksum_of
from swarm.stage.executor import Priority, Threads
from swarm.stage.memory_plan import KEPT_SUMS, MAX_QUEUED_SUMS
from swarm.stage.moments import Moments
from swarm.stage.optimizer import adamw, own_moments_for
from swarm.stage.versions import StageState, VersionStore, make_version
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


async def _nothing_to_restore(record: m.CommitRecord) -> StageState | None:
    return None


async def _nobody_to_copy_from(holder: m.Member, step: int, digest: str) -> torch.Tensor:
    raise RemoteError("no way to copy averages")


def _replaces(record: m.CommitRecord, known: m.CommitRecord) -> bool:
    """Is `record`, the newer one, of another lineage or era, so that what was committed is not built upon?"""
    return not record.relists(known) and (record.era > known.era or record.step <= known.step)


def _restores(record: m.CommitRecord, known: m.CommitRecord | None) -> bool:
    """Is the state at `record` not made by a step from that of `known`, but found in memory or on disk?"""
    return record.step == -1 or (_replaces(record, known) if known is not None else record.era > 0)


class CommittedState:
    """Of one peer of one stage."""

    def __init__(self, link: Link, stage: int, compute: StageCompute, moments: Moments, threads: Threads, tasks: Tasks) -> None:
        self.link = link
        self.context = link.context
        self.config = link.context.config
        self.stage = stage
        self.compute = compute
        self.moments = moments
        self.executor = threads.compute
        self.background = threads.background
        self.storage = threads.storage
        #: Vouches for the compute thread.
        self.at_work = AtWork(link, tasks, threads.compute, self._mates)
        self._tasks = tasks
        initial = genesis_record(self.config, self.context.run, ZERO_BALLOT, ((),) * self.config.num_stages)
        masters = compute.initial_masters() if compute.has_values else compute.no_masters()
        self.versions = VersionStore(
            make_version(initial, compute.layout, masters, compute.dtype), moments.zero(), keep=self.config.delay_steps + 1
        )
        self.compressor = compressor_of(self.config, compute.layout)
        #: Of a local run.
        self.own = OwnCopy(self.config, own_moments_for(self.config, moments), compute.dtype, self.compressor)
        #: Newest record seen; None before genesis.
        self.record: m.CommitRecord | None = None
        #: Averages of records after the snapshot that is being downloaded.
        self.queued: list[tuple[m.CommitRecord, torch.Tensor]] | None = None if compute.has_values else []
        #: So many at most; whoever knows this peer's memory says less, see `queued_sums`.
        self.max_queued = MAX_QUEUED_SUMS
        #: The average of the newest record was made without this peer, and is on its way: that takes as long as it is large.
        self.is_copying = False
        #: The optimizer step of the newest record waits for the compute thread, or is under way there.
        self.is_applying = False
        self.committed = asyncio.Condition()
        #: A head, and the digest of the state at it.
        self._digest = ("", "")
        #: Steps that have not committed, and the averages of the last ones that did, for those that copy them.
        self.steps: dict[int, StepState] = {}
        self.last_sums: deque[tuple[int, StageSum]] = deque(maxlen=KEPT_SUMS)
        #: Copies an average from one of its holders; see `rounds.py`.
        self.copy_sum: Callable[[m.Member, int, str], Awaitable[torch.Tensor]] = _nobody_to_copy_from
        #: Records that were learned and not yet taken over, in order, each with the one before it.
        self._learned: deque[tuple[m.CommitRecord, m.CommitRecord | None]] = deque()
        #: Its lock is held by whoever changes the state: the newest version, and the averages that queue for one.
        self._settled = asyncio.Condition()
        #: Called after each record was applied or queued, in order.
        self.on_commit: list[Callable[[m.CommitRecord], None]] = []
        #: Finds the state at a record's head in memory or on disk; see `restore.py`.
        self.restore: Callable[[m.CommitRecord], Awaitable[StageState | None]] = _nothing_to_restore
        #: Steps that were committed and then set back, by a restore or by another lineage.
        self.discarded_steps = 0
        #: Of this stage's state, moved to newcomers and from donors since the start.
        self.state_bytes_sent = 0
        self.state_bytes_received = 0
        link.register(m.Commit, self._on_commit)

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def num_commits(self) -> int:
        """Steps that have committed, as far as this peer knows (its own version may still lag)."""
        return 0 if self.record is None else self.record.step + 1

    @property
    def up_to_date(self) -> bool:
        return self.record is not None and self.queued is None and self.versions.newest.version_id == self.record.version_id

    @property
    def held_head(self) -> str | None:
        """Of the newest state that this peer holds, whatever has committed since; None without any."""
        return None if self.queued is not None else self.versions.newest.version_id

    @property
    def me(self) -> m.Member:
        return self.context.member()

    def listed(self) -> m.Member | None:
        """This peer's entry in the newest record."""
        if self.record is None:
            return None
        return next((x for x in self.record.members[self.stage] if x.key == self.me.key), None)

    def _mates(self) -> list[m.Member]:
        """Who else serves this stage."""
        listed = self.record.members[self.stage] if self.record is not None else ()
        return [x for x in listed if x.ready and x.key != self.me.key]

    def listed_elsewhere(self) -> int | None:
        """The stage at which the newest record lists this peer, if that is not the one it serves."""
        if self.record is None or self.listed() is not None:
            return None
        return next((k for k, xs in enumerate(self.record.members) if any(x.key == self.me.key for x in xs)), None)

    def hands_over(self, step: int) -> bool:
        """This peer moves, and will not be here to seal `step`."""
        record = self.record
        return record is not None and step > record.step + 1 and any(x.member.key == self.me.key for x in record.moves)

    @contextlib.asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """A block that begins once all that was learned has been taken over: the record and the state belong together there.

        A peer without a state has none to let go, and waits for no averages that queue: they may come faster than it copies
        them. Until the block's end nothing is taken over, so it should ask nobody.
        """

        def is_settled() -> bool:
            return not self._learned or (self.queued is not None and not any(_restores(*x) for x in self._learned))

        async with self._settled:
            await self._settled.wait_for(is_settled)
            yield

    # ------------------------------------------------------------------------------------------------ commit

    async def _on_commit(self, message: m.Commit, frame: Frame, progress: Progress) -> m.Ack:
        self.learn(message.record)
        return m.Ack()

    def learn(self, record: m.CommitRecord) -> None:
        """A record came in, from the coordinator or a peer; newer ones are handed on and applied in the background.

        The record is the decision, so it stands whatever ballot was promised since.
        """
        if record.run != self.context.run:
            raise Refuse("wrong_run", "the record belongs to another run")
        fault = fault_of(self.config, record)
        if fault:
            raise Refuse("bad_request", f"no record of this run: {fault}")
        known = self.record
        if known is not None and not record.newer_than(known):
            if known.newer_than(record):  # its sender may follow another lineage
                raise Refuse("ahead", f"step {known.step} of era {known.era} is newer", record=known)
            return
        self.record = record
        if known is not None and _replaces(record, known):
            self.steps.clear()  # their gradients are of what is no more, whenever that is taken over
        self._learned.append((record, known))
        self._tasks.start(self._forward(record), f"forward record {record.step}")
        if len(self._learned) == 1:  # else the task that takes the first one over goes on
            self._tasks.start(self._take_over_all(), f"apply records from {record.step} on", vital=True)

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

    async def _take_over_all(self) -> None:
        while self._learned:
            async with self._settled:
                await self._take_over(*self._learned[0])
                self._learned.popleft()
                self._settled.notify_all()

    async def _take_over(self, record: m.CommitRecord, known: m.CommitRecord | None) -> None:
        if known is not None and _replaces(record, known):
            self._forget(known, record)
        if record.relists(known) and self.versions.newest.version_id == record.version_id:
            pass  # nothing but the members may have changed
        elif _restores(record, known):
            state = await self.restore(record)
            if state is not None:
                self.queued = None
                self.versions.replace(state)
                await self.refresh_digest()
            elif self.queued is not None:
                self.queued.clear()
        elif self.queued is not None:
            await self._queue(record)
        elif record.previous_version_id == self.versions.newest.version_id:
            await self._apply(record)
        elif record.version_id != self.versions.newest.version_id:
            logger.info("behind: record of step %d does not follow this peer's version", record.step)
        for step in [s for s in self.steps if s <= record.step]:
            del self.steps[step]
        for callback in self.on_commit:
            callback(record)
        async with self.committed:
            self.committed.notify_all()

    def _forget(self, known: m.CommitRecord, record: m.CommitRecord) -> None:
        """Another lineage or era replaces what was committed: loudly if steps are lost, and counted."""
        num_discarded = known.step - record.step
        self.discarded_steps += max(0, num_discarded)
        if num_discarded > 0:
            logger.error(
                "step %d of era %d replaces step %d of era %d: %d committed steps are discarded",
                record.step,
                record.era,
                known.step,
                known.era,
                num_discarded,
            )
        else:
            logger.info(
                "step %d of era %d (head %s) replaces that of era %d (head %s)",
                record.step,
                record.era,
                record.version_id[:12],
                known.era,
                known.version_id[:12],
            )
        self.steps.clear()
        self.last_sums.clear()
        self.own.forget()

    async def _apply(self, record: m.CommitRecord) -> None:
        state = self.steps.get(record.step)
        average = await self._sum_of(record)
        if average is None:
            return
        self._report_lost(record)

        def adopt() -> None:
            """What this peer kept back of its contribution, if that is in the average."""
            if state is not None and average.seals and not record.skipped:
                self.compressor.adopt(average.state)
                if isinstance(state.accumulator, LocalAccumulator):
                    state.accumulator.committed()

        await self.advance(record, average.flat, adopt)
        self.last_sums.append((record.step, average))

    def _report_lost(self, record: m.CommitRecord) -> None:
        """What a compressor keeps back is private, so it goes with its peer."""
        here = {x.key for x in record.members[self.stage]}
        gone = [x for x in self.versions.newest.record.members[self.stage] if x.ready and x.key not in here]
        if gone and not isinstance(self.compressor, Plain):
            names = ", ".join(x.peer[:8] for x in gone)
            logger.warning("step %d: what %s had not sent of earlier steps is lost with it", record.step, names)

    async def _sum_of(self, record: m.CommitRecord) -> StageSum | None:
        """The average that `record` decided on: held, or copied from one of its holders; None if nobody gives it."""
        result = record.results[self.stage]
        state = self.steps.get(record.step)
        held = state.held_sum(result.sum_digest) if state is not None else None
        if state is not None and held is not None:
            state.accumulator.ledger.move("commit")
            return held
        self.is_copying = True
        try:
            holders = Candidates(self.link.presence, [x for x in result.holders if x.key != self.me.key])
            while (holder := await holders.next()) is not None:
                try:
                    flat = await self.copy_sum(holder, record.step, result.sum_digest)
                except SwarmError as error:
                    logger.info("average of step %d not copied from %s: %s", record.step, holder.peer[:8], error)
                    continue
                return StageSum(result.attempt, (), flat, result.sum_digest, result.sum_squares, result.tied)
        finally:
            self.is_copying = False
        logger.warning("no holder gave the average of step %d", record.step)
        return None

    async def _queue(self, record: m.CommitRecord) -> None:
        assert self.queued is not None
        average = await self._sum_of(record)
        if len(self.queued) >= self.max_queued:
            logger.warning("%d averages wait for the snapshot, and there is room for no more: it must be newer", self.max_queued)
            average = None
        if average is None:
            self.queued.clear()  # a gap: the snapshot must be newer than this record
            return
        self.queued.append((record, average.flat))
        self.last_sums.append((record.step, average))

    async def adopt(self, state: StageState) -> None:
        """Go on from a snapshot and what has queued up since it; in `settled`."""
        record, queued = state.version.record, self.queued or []
        self.versions.replace(state)
        self.queued = None
        for later, flat in queued:
            if later.step > record.step and later.previous_version_id == self.versions.newest.version_id:
                await self.advance(later, flat)
        if record.newer_than(self.record):
            self.learn(record)

    async def advance(self, record: m.CommitRecord, flat: torch.Tensor, adopt: Callable[[], None] = lambda: None) -> None:
        """Apply one record to the newest version: the optimizer step, and `adopt`, as a job of the compute thread."""
        compute, config, arrived = self.compute, self.config, flat

        def job() -> None:
            newest = self.versions.newest
            masters, optimizer = newest.masters, self.versions.optimizer
            if not record.skipped and config.mode == "local":
                masters, optimizer = nesterov(config, masters, flat, optimizer, step=record.step, factor=1.0 / record.tokens)
            elif not record.skipped:
                masters, optimizer = adamw(
                    config,
                    self.moments,
                    masters,
                    flat,
                    optimizer,
                    learning_rate=record.learning_rate,
                    factor=record.clip_coefficient / record.tokens,
                )
            version = make_version(record, compute.layout, masters, compute.dtype)
            self.versions.add(version, optimizer)
            adopt()

        self.is_applying = True
        try:
            if compute.device != "cpu":
                flat = (await self.background.run(lambda: on_device(arrived, compute.device), Priority.CONTROL)).value
            await self.executor.run(job, Priority.CONTROL, "optimizer")
        finally:
            self.is_applying = False
        self._tasks.start(self.refresh_digest(), "digest of the state")

    async def refresh_digest(self) -> None:
        """Digest of parameters and optimizer state of the newest version, for the next seal."""
        version, optimizer = self.versions.newest, self.versions.optimizer
        outcome = await self.background.run(
            lambda: checksum_of([version.masters, *(optimizer.tensors[name] for name in self.moments.entries)]), Priority.CONTROL
        )
        if self.versions.newest is version:
            self._digest = (version.version_id, outcome.value)

    @property
    def state_digest(self) -> str:
        """Of the newest version; empty until it is computed."""
        return self._digest_at(self.versions.newest.version_id)

    def _digest_at(self, version_id: str) -> str:
        # A seal is written by the compute thread, right after a commit perhaps: it must not carry an older state's digest.
        known, digest = self._digest
        return digest if known == version_id else ""
