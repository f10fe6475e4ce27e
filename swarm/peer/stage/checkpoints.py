"""When a stage peer writes a checkpoint, and which one is the best. Owns no format (`stage/saved/checkpoint.py`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path

from swarm.base.errors import StorageError
from swarm.lifecycle.commit_record import checkpoint_writers, is_checkpoint_due
from swarm.net.transport import Progress
from swarm.peer.link import Refuse
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.stage_context import StageContext
from swarm.stage.executor import Priority
from swarm.stage.saved.checkpoint import best_loss, mark_best, saved_steps, write_checkpoint
from swarm.stage.saved.places import stage_directory
from swarm.stage.versions import StageState
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of one peer, which says so in its seals; `checkpoint_writers` of the stage write them.

    A disk that refuses is one error, which `on_refused` is told, and training goes on. So it does where a disk is slow: one
    checkpoint is under way, and of those that are due the newest waits, as does the best. A writer that leaves writes one more.
    """

    def __init__(
        self, context: StageContext, committed: CommittedState, state_dir: Path | None, on_refused: Callable[[StorageError], None]
    ) -> None:
        self._context = context
        self._committed = committed
        self._on_refused = on_refused
        self._state_dir = state_dir
        #: Numbers of commits of the checkpoints that this peer has written in this era and still has.
        self.saved: tuple[int, ...] = ()
        self._era = 0
        #: What is to be written, by whether it is for its loss, which is lower than any before.
        self._waiting: dict[bool, tuple[StageState, float | None]] = {}
        self._writer: asyncio.Task[None] | None = None
        #: Of the state that was last begun to be written.
        self._newest = ""
        context.link.register(m.Evaluated, self._on_evaluated)

    def _writes(self, record: m.CommitRecord) -> bool:
        context, committed = self._context, self._committed
        writers = [x.key for x in checkpoint_writers(context.config, record, context.stage)]
        return (
            self._state_dir is not None
            and context.me.key in writers
            and committed.versions.newest.version_id == record.version_id
        )

    def note(self, record: m.CommitRecord) -> None:
        """Write the state that `record` made, if that is due and this peer is one of those who write it."""
        if record.era != self._era:
            self._era, self.saved = record.era, ()
        if is_checkpoint_due(self._context.config, record) and self._writes(record):
            self._write_soon(self._committed.versions.state(), None)

    async def _on_evaluated(self, message: m.Evaluated, frame: Frame, progress: Progress) -> m.Ack:
        """Nothing trains during an evaluation, so the version that it was of is the newest."""
        committed = self._committed
        async with committed.settled():
            record = committed.record
            if record is None or record.version_id != message.version_id:
                raise Refuse("ahead", "this peer is at another version", record=record)
            if math.isfinite(message.loss) and self._writes(record):
                self._write_soon(committed.versions.state(), message.loss)
        return m.Ack()

    def write_newest(self) -> None:
        """Write what has committed last, as if it were due now: this peer goes, and perhaps all do."""
        record = self._committed.record
        if (
            record is None
            or record.step < 0
            or record.version_id == self._newest
            or is_checkpoint_due(self._context.config, record)
        ):
            return
        if self._writes(record):
            self._write_soon(self._committed.versions.state(), None)

    @property
    def is_writing(self) -> bool:
        """A checkpoint is being written."""
        return self._writer is not None and not self._writer.done()

    def _write_soon(self, state: StageState, loss: float | None) -> None:
        before, best = self._waiting.get(loss is not None, (None, None))
        if loss is not None and best is not None and best <= loss:
            return
        if before is not None and loss is None:
            logger.warning("the checkpoint of step %d is not written: the disk is too slow", before.version.num_commits)
        self._waiting[loss is not None] = state, loss
        if loss is None:  # else it is written only if it is the best
            self._newest = state.version.version_id
        if not self.is_writing:
            self._writer = self._context.tasks.start(self._write_all(), "checkpoints")

    async def _write_all(self) -> None:
        while self._waiting:
            await self._write(*self._waiting.pop(min(self._waiting)))

    async def written(self) -> None:
        """Wait until all that is due is on disk, or refused."""
        if self._writer is not None:
            await asyncio.wait({self._writer})

    async def _write(self, state: StageState, loss: float | None) -> None:
        """Write `state` unless it is on disk; with a `loss` lower than any before, mark it as the best."""
        context, committed, root = self._context, self._committed, self._state_dir
        assert root is not None

        def job() -> tuple[Path, tuple[int, ...]] | None:
            directory = stage_directory(root, context.stage)
            if loss is not None:
                best = best_loss(directory)
                if best is not None and best[1] <= loss:
                    return None
            path = write_checkpoint(
                root, context.stage, state, context.moments, context.config, config_bytes=context.link.context.config_bytes
            )
            if loss is not None:
                mark_best(path, loss)
            return path, saved_steps(root, context.stage, (*self.saved, state.version.num_commits))

        try:
            written = (await context.storage.run(job, Priority.EVALUATION)).value
        except StorageError as error:
            logger.error("%s; training goes on", error)
            self._on_refused(error)
        else:
            if written is not None:
                path, saved = written
                if committed.record is not None and committed.record.era == state.version.record.era:
                    self.saved = saved[-m.MAX_SAVED :]
                logger.info("checkpoint %s%s", path, "" if loss is None else f", the best so far: {loss:.4f}")
