"""The stage that a peer has moved to, kept in its state directory: restarted, it serves where its newest checkpoints are."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from swarm.base.ids import RunId
from swarm.base.replace_file import replace_file

STAGE_FILE = "stage.json"
logger = logging.getLogger(__name__)


def remember_stage(directory: Path, run: RunId, stage: int) -> None:
    """Replace what was remembered before; a disk that is full costs a restart at the wrong stage, and no more."""
    try:
        replace_file(directory / STAGE_FILE, json.dumps({"run": run, "stage": stage}).encode())
    except OSError as error:
        logger.error("%s: the stage is not remembered: %s", directory, error.strerror)


def remembered_stage(directory: Path, run: RunId, num_stages: int) -> int | None:
    """The stage that this peer of `run` had moved to; None if it had not."""
    try:
        kept = json.loads((directory / STAGE_FILE).read_text())
    except (OSError, ValueError):
        return None
    stage = kept.get("stage") if isinstance(kept, dict) and kept.get("run") == run else None
    return stage if isinstance(stage, int) and 0 <= stage < num_stages else None
