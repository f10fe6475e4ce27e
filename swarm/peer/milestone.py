"""The newest record that asked for a checkpoint, kept in the state directory from one life of a peer to the next.

Whoever starts again knows by it how far the run had come, though he holds nothing of it: `lineage.py` does not begin the run
again while others may hold more. Owns one small file; must not know what is decided with it.
"""

from __future__ import annotations

import logging
import os

from pydantic import ValidationError

from swarm.lifecycle.record import is_checkpoint_due
from swarm.peer.context import PeerContext
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

MILESTONE_FILE = "milestone.json"


class Milestone:
    """Of one run. Without a state directory it lasts as long as the process."""

    def __init__(self, context: PeerContext) -> None:
        self._config = context.config
        self._path = None if context.state_dir is None else context.state_dir / MILESTONE_FILE
        #: None if no checkpoint was due yet. Its `saved` is the newest step known to be on the disks of all stages.
        self.record = self._load()
        if self.record is not None and self.record.run != context.run:
            self.record = None

    def _load(self) -> m.CommitRecord | None:
        if self._path is None:
            return None
        try:
            return m.CommitRecord.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            logger.warning("%s tells nothing: %s", self._path, str(error).partition("\n")[0])
            return None

    def note(self, record: m.CommitRecord) -> None:
        """`record` is the newest of the lineage that this peer follows."""
        if is_checkpoint_due(self._config, record):
            self.record = record
        elif self.record is not None and record.saved > self.record.saved:
            self.record = self.record.model_copy(update={"saved": record.saved})
        else:
            return
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.record.model_dump_json())
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
