"""What a stage peer could go on from: its memory, its checkpoints, the initial values. Serves `Holdings`.

Which head the run is set back to is the coordinator's decision (`policy/restore.py`); this module finds and loads it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm.base.errors import StorageError
from swarm.lifecycle.record import genesis_head
from swarm.net.transport import Progress
from swarm.peer.link import Link
from swarm.peer.stage_member import StageMember
from swarm.stage.checkpoint import StageCheckpoint, scan
from swarm.stage.executor import Priority
from swarm.stage.optimizer import OptimizerState
from swarm.stage.versions import StageState, make_version
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


class RestorePoints:
    """One peer's holdings."""

    def __init__(self, link: Link, member: StageMember, state_dir: Path | None) -> None:
        self._member = member
        self._state_dir = state_dir
        member.restore = self.load
        link.register(m.Holdings, self._on_holdings)

    async def _on_holdings(self, message: m.Holdings, frame: Frame, progress: Progress) -> m.Held:
        self._member.require_stage(message.stage)
        records = {}
        member = self._member
        if member.queued is None and member.versions.newest.num_commits > 0:
            records[member.versions.newest.head] = member.versions.newest.record
        for checkpoint in await self._checkpoints() if member.compute.has_frozen else []:
            records.setdefault(checkpoint.record.head, checkpoint.record)
        newest_first = sorted(records.values(), key=lambda r: (r.era, r.step), reverse=True)
        return m.Held(member=member.me, records=tuple(newest_first[:16]), initial=member.compute.has_values)

    async def _checkpoints(self) -> list[StageCheckpoint]:
        """This stage's checkpoints of this run, newest first."""
        root, run = self._state_dir, self._member.context.run
        if root is None or not root.is_dir():
            return []

        damaged: list[StorageError] = []

        def job() -> list[StageCheckpoint]:
            return [c for c in scan([root], damaged=damaged) if c.stage == self._member.stage and c.record.run == run]

        found = (await self._member.background.run(job, Priority.CONTROL)).value
        for error in damaged:
            logger.warning("%s", error)
        return sorted(found, key=lambda c: c.record.step, reverse=True)

    async def load(self, record: m.CommitRecord) -> StageState | None:
        """The state at `record.head` if this peer holds it, with `record` as its record."""
        member = self._member
        compute = member.compute
        if member.queued is None and member.versions.newest.head == record.head:
            state = member.versions.state()
            version = make_version(record, compute.layout, state.version.masters, compute.dtype)
            return StageState(version, state.optimizer, state.previous)
        if not compute.has_frozen:
            return None
        if record.head == genesis_head(record.run):
            if not compute.has_values:
                return None
            masters = (await member.executor.run(compute.initial_masters, Priority.CONTROL)).value
            version = make_version(record, compute.layout, masters, compute.dtype)
            return StageState(version, OptimizerState.zero(masters))
        for checkpoint in await self._checkpoints():
            if checkpoint.record.head == record.head:
                try:
                    outcome = await member.storage.run(
                        lambda c=checkpoint: c.state(  # type: ignore[misc]
                            compute.layout, record=record, dtype=compute.dtype, device=compute.device
                        ),
                        Priority.CONTROL,
                    )
                except StorageError as error:
                    logger.error("checkpoint not restored: %s", error)
                    continue
                logger.info("restored %s", checkpoint.directory)
                return outcome.value
        return None
