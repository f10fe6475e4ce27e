"""Checkpoints that make a whole: of one run and one version, a part of every stage, wherever the parts lie.

Owns the choice among the checkpoints below some directories; must not know what their files hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from swarm.base.errors import ConfigError, StorageError
from swarm.base.ids import RunId
from swarm.stage.saved.checkpoint import StageCheckpoint, scan

logger = logging.getLogger(__name__)

T = TypeVar("T")


def require_own(state_dir: Path, run: RunId) -> None:
    """Check that what a peer finds in its state directory, and would prune, is of the run that it serves.

    Raises:
        ConfigError: there is a checkpoint of another run.
    """
    if not state_dir.is_dir():
        return
    for found in scan([state_dir], damaged=[]):
        if found.record.run != run:
            raise ConfigError(
                f"{state_dir} holds a checkpoint of another run ({found.record.run[:12]}, {found.directory.name}), and this is "
                f"{run[:12]}: choose another --state-dir; recut_run begins a new run from an old one's checkpoints"
            )


def require_one_run(checkpoints: Iterable[StageCheckpoint]) -> None:
    """Check that checkpoints are of one run.

    Raises:
        ConfigError: they are of several runs; names some, and where they lie.
    """
    places = {checkpoint.record.run: checkpoint.directory for checkpoint in checkpoints}
    if len(places) > 1:
        some = "; ".join(f"run {run[:12]}, {directory}" for run, directory in list(places.items())[:3])
        raise ConfigError(f"checkpoints of {len(places)} runs ({some}): name the directories of one")


def find_complete(roots: Iterable[Path], *, step: int | None = None, best: bool = False) -> list[StageCheckpoint]:
    """One checkpoint for each stage, all of the same version: the newest that is complete, or that of `step` commits.

    With `best` it is the one with the lowest evaluation loss of those that a peer marked as its best. Goes by what
    descriptions say: see `use_complete`.

    Raises:
        ConfigError: if there is none; says which stages are missing at the newest version.
        StorageError: if there is none, and a description could not be read.
    """
    return [copies[0] for copies in _complete(roots, step, best)[0]]


def use_complete(
    roots: Iterable[Path], use: Callable[[StageCheckpoint], T], *, step: int | None = None, best: bool = False
) -> list[tuple[StageCheckpoint, T]]:
    """Find the checkpoints that `find_complete` gives, and what `use` makes of each; another copy takes a damaged one's place.

    Where a stage has no other copy, the version before it is taken; each is a line in the log.

    Raises:
        ConfigError, StorageError: as `find_complete`, and if no version is intact over all stages.
    """

    def of_any(copies: list[StageCheckpoint]) -> tuple[StageCheckpoint, T]:
        for copy in copies[:-1]:
            try:
                return copy, use(copy)
            except StorageError as error:
                logger.warning("%s; taking another copy", error)
        return copies[-1], use(copies[-1])

    candidates = _complete(roots, step, best)
    for stages in candidates[:-1]:
        try:
            return [of_any(copies) for copies in stages]
        except StorageError as error:
            logger.warning("%s; step %d is in no other copy; taking another checkpoint", error, stages[0][0].record.step + 1)
    return [of_any(copies) for copies in candidates[-1]]


def _complete(roots: Iterable[Path], step: int | None, best: bool) -> list[list[list[StageCheckpoint]]]:
    """The copies of each version that is complete, by stage; the version to take first comes first.

    Raises:
        ConfigError, StorageError: as `find_complete`.
    """
    roots = list(roots)
    by_version_id: dict[str, dict[int, list[StageCheckpoint]]] = {}
    damaged: list[StorageError] = []
    checkpoints = scan(roots, damaged=damaged)
    require_one_run(checkpoints)
    for checkpoint in checkpoints:
        if (step is None or checkpoint.record.step + 1 == step) and (checkpoint.best_loss is not None or not best):
            by_version_id.setdefault(checkpoint.record.version_id, {}).setdefault(checkpoint.stage, []).append(checkpoint)
    complete: list[list[list[StageCheckpoint]]] = []
    missing = ""

    def order(stages: dict[int, list[StageCheckpoint]]) -> tuple[float, int]:
        one = next(iter(stages.values()))[0]
        return (one.best_loss if best and one.best_loss is not None else 0.0, -one.record.step)

    for stages in sorted(by_version_id.values(), key=order):
        record = next(iter(stages.values()))[0].record
        absent = [k for k in range(len(record.members)) if k not in stages]
        if absent:
            missing = missing or f"; at step {record.step + 1} stages {absent} are missing"
        else:
            complete.append([stages[k] for k in sorted(stages)])
    if not complete and damaged:
        raise damaged[0]
    if not complete:
        where = ", ".join(str(root) for root in roots)
        wanted = " with an evaluation" if best else "" if step is None else f" of step {step}"
        raise ConfigError(f"no checkpoint{wanted} that is complete over all stages in {where}{missing}")
    for error in damaged:
        logger.warning("%s", error)
    return complete
