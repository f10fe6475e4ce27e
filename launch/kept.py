"""What of a local run is on disk: by the names of its checkpoints, and by what stage processes say of theirs. Asks nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path


class Kept:
    """What stage processes have said."""

    def __init__(self) -> None:
        #: By process, the steps of the checkpoints that it has read to their end, and could go on from.
        self.intact: dict[str, frozenset[int]] = {}
        #: Why the last checkpoint that a disk refused was not written.
        self.refused = ""
        self._damaged: set[str] = set()

    def is_news(self, damage: str) -> bool:
        """Note what is wrong with a checkpoint; True for the first time."""
        is_new = damage not in self._damaged
        self._damaged.add(damage)
        return is_new

    def is_lost(self, stages: Mapping[str, int]) -> bool:
        """Checkpoints are damaged, and there is no step of which every stage has an intact one.

        Args:
            stages: by name, the stage of each process that lives. Nothing is lost before all of them have said.
        """
        if not self._damaged or not stages.keys() <= self.intact.keys():
            return False
        steps: dict[int, frozenset[int]] = {}
        for name, stage in stages.items():
            steps[stage] = steps.get(stage, frozenset()) | self.intact[name]
        return not frozenset.intersection(*steps.values())

    def fault(self, num_steps: int, newest: int | None) -> str:
        """Why a run that has ended after `num_steps` is not on disk; "" if it is.

        Args:
            newest: of `newest_checkpoint`. An older one is right where a peer of another machine wrote the last.
        """
        if newest is not None and (newest >= num_steps or not self.refused):
            return ""
        kept = "none is complete" if newest is None else f"the newest complete one is of step {newest}"
        return f"the checkpoint of step {num_steps} was not written ({kept}){f': {self.refused}' if self.refused else ''}"


def newest_checkpoint(state_dir: Path, num_stages: int) -> int | None:
    """The highest number of steps for which every stage has a checkpoint below `state_dir`, by their names."""
    steps: dict[int, set[int]] = {}
    for description in state_dir.glob("*/checkpoints/stage-*/step-*/checkpoint.json"):
        with contextlib.suppress(ValueError):
            stage = int(description.parent.parent.name.removeprefix("stage-"))
            steps.setdefault(int(description.parent.name.removeprefix("step-")), set()).add(stage)
    return max((step for step, stages in steps.items() if len(stages) >= num_stages), default=None)
