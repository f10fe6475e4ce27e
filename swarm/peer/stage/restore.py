"""What a stage peer could go on from: its memory, its checkpoints, the initial values. Serves `Holdings`.

Which head the run is set back to is the coordinator's decision (`policy/restore.py`); this module finds and loads it.
What it offers it has read to its end: a damaged checkpoint is told to the operator, and counts for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.base.errors import StorageError
from swarm.lifecycle.record import genesis_version_id
from swarm.net.transport import Progress
from swarm.peer.checkpoint_record import LastCheckpointRecord
from swarm.peer.link import Link
from swarm.peer.stage.stage_member import StageMember
from swarm.stage.executor import Priority
from swarm.stage.saved.checkpoint import FileIdentity, StageCheckpoint, scan
from swarm.stage.versions import StageState, make_version
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


#: Told which numbers of commits this peer has an intact checkpoint of, and what is wrong with others.
OnChecked = Callable[[Sequence[int], Sequence[StorageError]], None]


class RestorePoints:
    """One peer's holdings; `on_checked` is told of those on disk whenever they were read."""

    def __init__(self, link: Link, member: StageMember, state_dir: Path | None, on_checked: OnChecked) -> None:
        self._member = member
        self._state_dir = state_dir
        self._on_checked = on_checked
        #: What is wrong with each checkpoint that was read to its end, if anything is, by directory and identity.
        self._faults: dict[tuple[Path, FileIdentity], StorageError | None] = {}
        self._told: tuple[list[int], list[str]] | None = None
        self._checkpoint_record = LastCheckpointRecord(link.context)
        member.on_commit.append(self._checkpoint_record.note)
        member.restore = self.load
        link.register(m.Holdings, self._on_holdings)

    async def _on_holdings(self, message: m.Holdings, frame: Frame, progress: Progress) -> m.Held:
        member = self._member
        member.require_stage(message.stage)
        progress.follow(lambda: member.background.finished)
        async with member.settled():
            pass  # what is being taken over is what it will hold
        records = {}
        if member.queued is None and member.versions.newest.num_commits > 0:
            records[member.versions.newest.version_id] = member.versions.newest.record
        found, damaged = await self._checkpoints() if member.compute.has_frozen else ([], False)
        for checkpoint in found:
            records.setdefault(checkpoint.record.version_id, checkpoint.record)
        newest_first = sorted(records.values(), key=lambda r: (r.era, r.step), reverse=True)
        return m.Held(
            member=member.me,
            records=tuple(newest_first[:16]),
            damaged=damaged,
            initial=member.compute.has_values and not damaged,
            checkpoint_record=self._checkpoint_record.record,
        )

    async def _checkpoints(self) -> tuple[list[StageCheckpoint], bool]:
        """This stage's intact checkpoints of this run, newest first, and if there are others: damaged, or just being changed."""
        root, member = self._state_dir, self._member
        if root is None or not root.is_dir():
            return [], False

        def job() -> tuple[list[StageCheckpoint], list[StorageError], bool]:
            damaged: list[StorageError] = []
            intact, faults, changing = [], {}, False
            for checkpoint in scan([root], stage=member.stage, damaged=damaged):
                key = (checkpoint.directory, checkpoint.identity)
                if checkpoint.record.run != member.context.run:
                    continue
                fault = self._faults[key] if key in self._faults else _fault_of(checkpoint, member.background.tick)
                if checkpoint.is_there:  # if it was pruned or written anew meanwhile, the next look finds what there is
                    faults[key] = fault
                    damaged += [] if fault is None else [fault]
                    intact += [checkpoint] if fault is None else []
                elif checkpoint.directory.exists():
                    changing = True
            self._faults = faults
            return sorted(intact, key=lambda c: c.record.step, reverse=True), damaged, changing

        found, damaged, changing = (await member.background.run(job, Priority.CONTROL)).value
        self._tell([checkpoint.record.step + 1 for checkpoint in found], damaged)
        return found, bool(damaged) or changing

    def _tell(self, steps: list[int], damaged: list[StorageError]) -> None:
        """Once, until it is something else."""
        now, before = (steps, [str(error) for error in damaged]), self._told
        if now == before:
            return
        for text in now[1]:
            if before is None or text not in before[1]:
                logger.error("%s", text)
        self._told = now
        self._on_checked(steps, damaged)

    async def load(self, record: m.CommitRecord) -> StageState | None:
        """The state at `record.version_id` if this peer holds it, with `record` as its record."""
        member = self._member
        compute = member.compute
        if member.queued is None and member.versions.newest.version_id == record.version_id:
            state = member.versions.state()
            version = make_version(record, compute.layout, state.version.masters, compute.dtype)
            return StageState(version, state.optimizer, state.previous)
        if not compute.has_frozen:
            return None
        if record.version_id == genesis_version_id(record.run):
            if not compute.has_values:
                return None
            masters = (await member.executor.run(compute.initial_masters, Priority.CONTROL)).value
            version = make_version(record, compute.layout, masters, compute.dtype)
            return StageState(version, member.moments.zero())
        for checkpoint in (await self._checkpoints())[0]:
            if checkpoint.record.version_id == record.version_id:
                try:
                    outcome = await member.storage.run(
                        lambda c=checkpoint: c.state(  # type: ignore[misc]
                            member.moments, record=record, dtype=compute.dtype, device=compute.device
                        ),
                        Priority.CONTROL,
                    )
                except StorageError as error:
                    logger.error("checkpoint not restored: %s", error)
                    continue
                logger.info("restored %s", checkpoint.directory)
                return outcome.value
        return None


def _fault_of(checkpoint: StageCheckpoint, tick: Callable[[], None]) -> StorageError | None:
    try:
        checkpoint.check(tick)
    except StorageError as error:
        return error
    return None
