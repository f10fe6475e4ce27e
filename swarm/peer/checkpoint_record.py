"""The newest record that asked for a checkpoint, kept in the state directory from one life of a peer to the next.

Whoever starts again knows by it how far the run had come, though he holds nothing of it: `lineage.py` does not begin the run
again while others may hold more. Owns one small file; must not know what is decided with it.
"""

from __future__ import annotations

import logging

from pydantic import ValidationError

from swarm.base.config import first_problem
from swarm.base.replace_file import replace_file
from swarm.lifecycle.commit_record import fault_of, is_checkpoint_due
from swarm.peer.context import PeerContext
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

CHECKPOINT_RECORD_FILE = "milestone.json"
_MAX_FILE_BYTES = 2**24


class LastCheckpointRecord:
    """Keeps the record of one run. Without a state directory it lasts as long as the process."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._path = None if context.state_dir is None else context.state_dir / CHECKPOINT_RECORD_FILE
        #: None if no checkpoint was due yet. Its `saved` is the newest step known to be on the disks of all stages.
        self.record: m.CommitRecord | None = None
        self._load()

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            if self._path.stat().st_size > _MAX_FILE_BYTES or not self._path.is_file():
                raise ValueError("it is too large, or no file")
            record = m.CommitRecord.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            why = first_problem(error) if isinstance(error, ValidationError) else str(error)
            logger.warning(
                "%s does not tell how far the run had come (%s): put an intact copy in its place, or delete it", self._path, why
            )
            return
        if self._is_of_this_run(record):
            self.record = record

    def _is_of_this_run(self, record: m.CommitRecord) -> bool:
        return record.run == self._context.run and not fault_of(self._context.config, record)

    def note(self, record: m.CommitRecord) -> None:
        """Keep `record`, the newest of the lineage that this peer follows, if it asks for a checkpoint."""
        if is_checkpoint_due(self._context.config, record):
            self._keep(record)
        elif self.record is not None and record.saved > self.record.saved:
            self._keep(self.record.model_copy(update={"saved": record.saved}))

    def hear(self, record: m.CommitRecord) -> None:
        """Keep `record`, the checkpoint record of another peer, if it is newer: that peer may be gone when it matters."""
        if not self._is_of_this_run(record):
            return
        saved = max(record.saved, 0 if self.record is None else self.record.saved)
        if record.newer_than(self.record):
            self._keep(record.model_copy(update={"saved": saved}))
        elif self.record is not None and saved > self.record.saved:
            self._keep(self.record.model_copy(update={"saved": saved}))

    def _keep(self, record: m.CommitRecord) -> None:
        self.record = record
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # The event loop waits for no disk, which at a checkpoint may be busy for seconds.
            replace_file(self._path, record.model_dump_json().encode(), durable=False)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
