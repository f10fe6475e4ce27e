"""What has committed at a stage peer: the newest record, and the versions that came of records.

A record that comes in is learned at once, handed on, and taken over in its turn: by the optimizer's step with the average that
it decided on; or, where another lineage or era replaces what was committed, by the state at its version. Until then `record` is
newer than the state. Code that needs both to match waits in `settled`. Must not know how steps end: `stage_member` takes part
in that.

The way of a record: `learn`, take over, apply, `advance`; that of a snapshot: `let_go`, `go_on_from`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

import torch

from swarm.averaging.local_updates import LocalAccumulator
from swarm.base.ids import ZERO_BALLOT
from swarm.lifecycle.commit_record import fault_of, genesis_record
from swarm.net.transport import Progress
from swarm.peer.link import Refuse
from swarm.peer.stage.saved_states import SavedStates
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.step_state import OpenSteps
from swarm.peer.stage.sum_copies import SumCopies
from swarm.stage.devices import on_device
from swarm.stage.digest import checksum_of
from swarm.stage.executor import Priority
from swarm.stage.memory_plan import MAX_QUEUED_SUMS
from swarm.stage.state_buffers import applied
from swarm.stage.versions import StageState, VersionStore, make_version
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


def _replaces(record: m.CommitRecord, known: m.CommitRecord) -> bool:
    """Tell whether `record`, the newer one, is of another lineage or era, and so does not build on `known`."""
    return not record.relists(known) and (record.era > known.era or record.step <= known.step)


def _restores(record: m.CommitRecord, known: m.CommitRecord | None) -> bool:
    """Tell whether the state at `record` is found in memory or on disk, and not made by a step from that of `known`."""
    return record.step == -1 or (_replaces(record, known) if known is not None else record.era > 0)


class CommittedState:
    """The newest record and the newest versions of one peer at one stage.

    Args:
        context: of the peer at its stage.
        steps: not committed yet; those that a record decides are closed here.
        sums: gives the averages that records decided on.
        saved: finds states on disk.
        max_queued: averages that wait for a snapshot, at most.
    """

    def __init__(
        self, context: StageContext, steps: OpenSteps, sums: SumCopies, saved: SavedStates, *, max_queued: int = MAX_QUEUED_SUMS
    ) -> None:
        self._context = context
        self._steps = steps
        self._sums = sums
        self._saved = saved
        config, compute, moments = context.config, context.compute, context.moments
        initial = genesis_record(config, context.run, ZERO_BALLOT, ((),) * config.num_stages)
        masters = compute.initial_masters() if compute.has_values else compute.no_masters()
        self.versions = VersionStore(
            make_version(initial, compute.layout, masters, compute.dtype), moments.zero(), keep=config.delay_steps + 1
        )
        #: Newest record seen; None before genesis.
        self.record: m.CommitRecord | None = None
        #: Averages of records after the snapshot that is being downloaded; None while this peer has a state.
        self._queued: list[tuple[m.CommitRecord, torch.Tensor]] | None = None if compute.has_values else []
        self._max_queued = max_queued
        #: The optimizer step of the newest record waits for the compute thread, or is under way there.
        self.is_applying = False
        #: Notified when a record has been taken over.
        self.taken_over = asyncio.Condition()
        #: The name of a version, and the digest of the state at it.
        self._digest = ("", "")
        #: Records that were learned and not yet taken over, in order, each with the one before it.
        self._learned: deque[tuple[m.CommitRecord, m.CommitRecord | None]] = deque()
        #: Its lock is held by whoever changes the state: the newest version, and the averages that queue for one.
        self._settled = asyncio.Condition()
        #: Called after each record was applied or queued, in order.
        self.on_commit: list[Callable[[m.CommitRecord], None]] = []
        #: Steps that were committed and then set back, by a restore or by another lineage.
        self.discarded_steps = 0
        context.link.register(m.Commit, self._on_commit)
        context.link.register(m.Holdings, self._on_holdings)

    def take_over_from(self, before: CommittedState) -> None:
        """Take over what the same peer knew at another stage."""
        self.record, self.discarded_steps = before.record, before.discarded_steps

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def num_commits(self) -> int:
        """Steps that have committed, as far as this peer knows (its own version may still lag)."""
        return 0 if self.record is None else self.record.step + 1

    @property
    def has_state(self) -> bool:
        """This peer holds a state, however old; else averages queue for the one that it downloads."""
        return self._queued is None

    @property
    def up_to_date(self) -> bool:
        """This peer holds the state that the newest record made."""
        return self.record is not None and self.has_state and self.versions.newest.version_id == self.record.version_id

    @property
    def held_version_id(self) -> str | None:
        """The name of the newest version that this peer holds, whatever has committed since; None without any."""
        return self.versions.newest.version_id if self.has_state else None

    @property
    def is_copying(self) -> bool:
        """The average of the newest record was made without this peer, and is on its way."""
        return self._sums.is_copying

    def listed(self) -> m.Member | None:
        """Return this peer's entry in the newest record."""
        if self.record is None:
            return None
        return next((x for x in self.record.members[self._context.stage] if x.key == self._context.me.key), None)

    def mates(self) -> list[m.Member]:
        """Return who else serves this stage."""
        listed = self.record.members[self._context.stage] if self.record is not None else ()
        return [x for x in listed if x.ready and x.key != self._context.me.key]

    def listed_elsewhere(self) -> int | None:
        """Return the stage at which the newest record lists this peer, if that is not the one it serves."""
        if self.record is None or self.listed() is not None:
            return None
        return next((k for k, xs in enumerate(self.record.members) if any(x.key == self._context.me.key for x in xs)), None)

    def hands_over(self, step: int) -> bool:
        """Tell whether this peer moves, and will not be here to seal `step`."""
        record = self.record
        return record is not None and step > record.step + 1 and any(x.member.key == self._context.me.key for x in record.moves)

    @contextlib.asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """Begin a block once all that was learned has been taken over: inside it, the record and the state match.

        A peer without a state does not wait for averages that queue: they may come faster than it copies them. Nothing is
        taken over until the block ends, so it should ask nobody.
        """

        def is_settled() -> bool:
            return not self._learned or (self._queued is not None and not any(_restores(*x) for x in self._learned))

        async with self._settled:
            await self._settled.wait_for(is_settled)
            yield

    async def caught_up(self, step: int, *, num_commits: int | None = None) -> None:
        """Wait until this peer holds the version that `step` builds on, or `step` is over, or a while has passed.

        With `num_commits` it waits for the version after so many commits instead.
        """
        wanted = self._context.config.base_step(step) if num_commits is None else num_commits
        while True:
            try:
                async with asyncio.timeout(self._context.config.timing.request_s / 2), self.taken_over:
                    await self.taken_over.wait_for(lambda: step < self.num_commits or self.versions.at(wanted) is not None)
            except TimeoutError:
                if self.is_applying:  # behind a long job perhaps
                    continue
            return

    async def _on_holdings(self, message: m.Holdings, frame: Frame, progress: Progress) -> m.Held:
        self._context.require_stage(message.stage)
        progress.follow(lambda: self._context.background.finished)
        async with self.settled():
            newest = self.versions.newest  # what was being taken over has been
        return await self._saved.held(newest.record if self.has_state and newest.num_commits > 0 else None)

    # ------------------------------------------------------------------------------------------------ commit

    async def _on_commit(self, message: m.Commit, frame: Frame, progress: Progress) -> m.Ack:
        self.learn(message.record)
        return m.Ack()

    def learn(self, record: m.CommitRecord) -> None:
        """Learn a record that came in; newer ones are handed on and applied in the background.

        The record is the decision, so it stands whatever ballot was promised since.
        """
        if record.run != self._context.link.context.run:
            raise Refuse("wrong_run", "the record belongs to another run")
        fault = fault_of(self._context.config, record)
        if fault:
            raise Refuse("bad_request", f"no record of this run: {fault}")
        known = self.record
        if known is not None and not record.newer_than(known):
            if known.newer_than(record):  # its sender may follow another lineage
                raise Refuse("ahead", f"step {known.step} of era {known.era} is newer", record=known)
            return
        self.record = record
        if known is not None and _replaces(record, known):
            self._steps.clear()  # their gradients are of versions that are given up
        self._learned.append((record, known))
        self._context.tasks.start(self._forward(record), f"forward record {record.step}")
        if len(self._learned) == 1:  # else the task that takes the first one over goes on
            self._context.tasks.start(self._take_over_all(), f"apply records from {record.step} on", vital=True)

    async def _forward(self, record: m.CommitRecord) -> None:
        """Hand the record on: to the next member of this stage, and to the leader of the next stage."""
        mine = [x for x in record.members[self._context.stage] if x.key != self._context.me.key]
        after = [x for x in mine if x.key > self._context.me.key] or mine
        targets = after[:1] + list(record.members[(self._context.stage + 1) % self._context.config.num_stages][:1])
        for target in targets:
            if (
                target.key != self._context.me.key
            ):  # one that this does not reach hears of it from others, or notices that it is behind
                await self._context.link.tell(target, m.Commit(record=record))

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
            state = await self._restored(record)
            if state is not None:
                self._queued = None
                self.versions.replace(state)
                await self.refresh_digest()
            elif self._queued is not None:
                self._queued.clear()
        elif self._queued is not None:
            await self._queue(record)
        elif record.previous_version_id == self.versions.newest.version_id:
            await self._apply(record)
        elif record.version_id != self.versions.newest.version_id:
            logger.info("behind: record of step %d does not follow this peer's version", record.step)
        self._steps.close(record.step)
        for callback in self.on_commit:
            callback(record)
        async with self.taken_over:
            self.taken_over.notify_all()

    async def _restored(self, record: m.CommitRecord) -> StageState | None:
        """Find the state at `record.version_id` in memory or on disk, with `record` as its record; None if it is in neither."""
        if self.has_state and self.versions.newest.version_id == record.version_id:
            compute, state = self._context.compute, self.versions.state()
            version = make_version(record, compute.layout, state.version.masters, compute.dtype)
            return StageState(version, state.optimizer, state.previous)
        return await self._saved.load(record)

    def _forget(self, known: m.CommitRecord, record: m.CommitRecord) -> None:
        """Count and tell the committed steps that another lineage or era replaces."""
        num_discarded = known.step - record.step
        self.discarded_steps += max(0, num_discarded)
        logger.log(
            logging.ERROR if num_discarded > 0 else logging.INFO,
            "step %d of era %d (version %s) replaces step %d of era %d (version %s): %d committed steps are discarded",
            record.step,
            record.era,
            record.version_id[:12],
            known.step,
            known.era,
            known.version_id[:12],
            max(0, num_discarded),
        )
        self._steps.clear()
        self._sums.forget()
        self._steps.own.forget()

    async def _apply(self, record: m.CommitRecord) -> None:
        state = self._steps.get(record.step)
        average = await self._sums.of(record)
        if average is None:
            return
        self._report_lost(record)

        def keep_residual() -> None:
            """Keep what compression left of this peer's contribution, if that is in the average."""
            if state is not None and average.seals and not record.skipped:
                self._context.compressor.adopt(average.state)
                if isinstance(state.accumulator, LocalAccumulator):
                    state.accumulator.committed()

        await self.advance(record, average.flat, keep_residual)
        self._sums.keep(record.step, average)

    def _report_lost(self, record: m.CommitRecord) -> None:
        """Warn of what compressors kept back at peers that are gone: it is private, and lost with them."""
        here = {x.key for x in record.members[self._context.stage]}
        gone = [x for x in self.versions.newest.record.members[self._context.stage] if x.ready and x.key not in here]
        if gone and self._context.compressor.keeps_back:
            names = ", ".join(x.peer[:8] for x in gone)
            logger.warning("step %d: what %s had not sent of earlier steps is lost with it", record.step, names)

    async def _queue(self, record: m.CommitRecord) -> None:
        assert self._queued is not None
        average = await self._sums.of(record)
        if len(self._queued) >= self._max_queued:
            logger.warning("%d averages wait for the snapshot, and there is room for no more: it must be newer", self._max_queued)
            average = None
        if average is None:
            self._queued.clear()  # a gap: the snapshot must be newer than this record
            return
        self._queued.append((record, average.flat))
        self._sums.keep(record.step, average)

    def let_go(self) -> None:
        """Drop the state: from here on averages queue for a snapshot."""
        self._queued = []

    async def go_on_from(self, state: StageState) -> None:
        """Go on from a snapshot and what has queued up since it; in `settled`."""
        record, queued = state.version.record, self._queued or []
        self.versions.replace(state)
        self._queued = None
        for later, flat in queued:
            if later.step > record.step and later.previous_version_id == self.versions.newest.version_id:
                await self.advance(later, flat)
        if record.newer_than(self.record):
            self.learn(record)

    async def advance(self, record: m.CommitRecord, flat: torch.Tensor, also: Callable[[], None] = lambda: None) -> None:
        """Apply one record to the newest version: the optimizer step, and `also`, as a job of the compute thread."""
        compute, arrived = self._context.compute, flat

        def job() -> None:
            newest = self.versions.newest
            masters, optimizer = newest.masters, self.versions.optimizer
            if not record.skipped:
                used = self.versions.at(self._context.config.base_step(record.step)) or newest
                masters, optimizer = applied(self._context.optimizer, newest, used, flat, optimizer, record)
            version = make_version(record, compute.layout, masters, compute.dtype)
            self.versions.add(version, optimizer)
            also()

        self.is_applying = True
        try:
            if compute.device != "cpu":
                flat = (await self._context.background.run(lambda: on_device(arrived, compute.device), Priority.CONTROL)).value
            await self._context.executor.run(job, Priority.CONTROL, "optimizer")
        finally:
            self.is_applying = False
        self._context.tasks.start(self.refresh_digest(), "digest of the state")

    async def refresh_digest(self) -> None:
        """Compute the digest of parameters and optimizer state of the newest version, for the next seal."""
        version, optimizer = self.versions.newest, self.versions.optimizer
        outcome = await self._context.background.run(
            lambda: checksum_of([version.masters, *(optimizer.tensors[name] for name in self._context.moments.entries)]),
            Priority.CONTROL,
        )
        if self.versions.newest is version:
            self._digest = (version.version_id, outcome.value)

    @property
    def state_digest(self) -> str:
        """The digest of the newest version; empty until it is computed."""
        return self.digest_at(self.versions.newest.version_id)

    def digest_at(self, version_id: str) -> str:
        """Return the digest of the version with this name; empty if it is not known.

        A seal is written by the compute thread, right after a commit perhaps: it must not carry an older state's digest.
        """
        known, digest = self._digest
        return digest if known == version_id else ""
