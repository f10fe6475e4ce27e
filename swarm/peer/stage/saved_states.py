"""What a stage peer could go on from without its memory: its checkpoints, and the initial values.

Which version the run is set back to is the coordinator's decision (`policy/restore.py`); this module finds and loads it. What
it offers it has read to its end: a damaged checkpoint is told to the operator, and counts for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.base.errors import StorageError
from swarm.lifecycle.commit_record import genesis_version_id
from swarm.peer.checkpoint_record import LastCheckpointRecord
from swarm.peer.stage.stage_context import StageContext
from swarm.stage.executor import Priority
from swarm.stage.saved.checkpoint import FileIdentity, StageCheckpoint, scan
from swarm.stage.versions import StageState, make_version
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


#: Told which numbers of commits this peer has an intact checkpoint of, and what is wrong with others.
OnChecked = Callable[[Sequence[int], Sequence[StorageError]], None]


class SavedStates:
    """The checkpoints of one peer at one stage.

    Args:
        context: of the peer at its stage.
        state_dir: has them; None if the peer keeps none.
        on_checked: told of them whenever they were read.
    """

    def __init__(
        self, context: StageContext, state_dir: Path | None, on_checked: OnChecked = lambda steps, damaged: None
    ) -> None:
        self._context = context
        self._state_dir = state_dir
        self._on_checked = on_checked
        #: What is wrong with each checkpoint that was read to its end, if anything is, by directory and identity.
        self._faults: dict[tuple[Path, FileIdentity], StorageError | None] = {}
        self._told: tuple[list[int], list[str]] | None = None
        self.checkpoint_record = LastCheckpointRecord(context.link.context)

    async def held(self, newest: m.CommitRecord | None) -> m.Held:
        """Return what this peer could go on from: the state that `newest` made, if any, checkpoints, the initial values."""
        context, compute = self._context, self._context.compute
        found, damaged = await self._checkpoints() if compute.has_frozen else ([], False)
        records = {} if newest is None else {newest.version_id: newest}
        for checkpoint in found:
            records.setdefault(checkpoint.record.version_id, checkpoint.record)
        newest_first = sorted(records.values(), key=lambda r: (r.era, r.step), reverse=True)
        return m.Held(
            member=context.me,
            records=tuple(newest_first[:16]),
            damaged=damaged,
            initial=compute.has_values and not damaged,
            checkpoint_record=self.checkpoint_record.record,
        )

    async def _checkpoints(self) -> tuple[list[StageCheckpoint], bool]:
        """Return this stage's intact checkpoints, newest first, and if there are others: damaged, or just being changed."""
        root, context = self._state_dir, self._context
        if root is None or not root.is_dir():
            return [], False

        def job() -> tuple[list[StageCheckpoint], list[StorageError], bool]:
            damaged: list[StorageError] = []
            intact, faults, changing = [], {}, False
            for checkpoint in scan([root], stage=context.stage, damaged=damaged):
                key = (checkpoint.directory, checkpoint.identity)
                if checkpoint.record.run != context.run:
                    continue
                fault = self._faults[key] if key in self._faults else _fault_of(checkpoint, context.background.tick)
                if checkpoint.is_there:  # if it was pruned or written anew meanwhile, the next look finds what there is
                    faults[key] = fault
                    damaged += [] if fault is None else [fault]
                    intact += [checkpoint] if fault is None else []
                elif checkpoint.directory.exists():
                    changing = True
            self._faults = faults
            return sorted(intact, key=lambda c: c.record.step, reverse=True), damaged, changing

        found, damaged, changing = (await context.background.run(job, Priority.CONTROL)).value
        self._tell([checkpoint.record.step + 1 for checkpoint in found], damaged)
        return found, bool(damaged) or changing

    def _tell(self, steps: list[int], damaged: list[StorageError]) -> None:
        """Tell of the checkpoints once, until they are others."""
        now, before = (steps, [str(error) for error in damaged]), self._told
        if now == before:
            return
        for text in now[1]:
            if before is None or text not in before[1]:
                logger.error("%s", text)
        self._told = now
        self._on_checked(steps, damaged)

    async def load(self, record: m.CommitRecord) -> StageState | None:
        """Return the state at `record.version_id`, of a checkpoint or made of the initial values; None if it is not here."""
        context, compute = self._context, self._context.compute
        if not compute.has_frozen:
            return None
        if record.version_id == genesis_version_id(record.run):
            if not compute.has_values:
                return None
            masters = (await context.executor.run(compute.initial_masters, Priority.CONTROL)).value
            version = make_version(record, compute.layout, masters, compute.dtype)
            return StageState(version, context.moments.zero())
        for checkpoint in (await self._checkpoints())[0]:
            if checkpoint.record.version_id == record.version_id:
                try:
                    outcome = await context.storage.run(
                        lambda c=checkpoint: c.state(  # type: ignore[misc]
                            context.moments, record=record, dtype=compute.dtype, device=compute.device
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
