"""What of a local run is on disk: by the names of its checkpoints, and by what stage processes say of theirs. Asks nobody.

Also hands its processes what others wrote below its directory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.local_swarm.plan import RUN_FILE
from swarm.base.errors import ConfigError
from swarm.base.ids import RunId
from swarm.stage.saved.places import PARTIAL, descriptions_of_peers, partials_of, stage_directory, step_name


class Kept:
    """What stage processes have said."""

    def __init__(self) -> None:
        #: By process, the steps of the checkpoints that it has read to their end, and could go on from.
        self.intact: dict[str, frozenset[int]] = {}
        #: Why the last checkpoint that a disk refused was not written.
        self.refused = ""
        self._damaged: set[str] = set()

    def check(self, name: str, steps: Sequence[int]) -> None:
        """Note the steps of the checkpoints that process `name` has read to their end."""
        self.intact[name] = frozenset(steps)

    def refuse(self, why: str) -> None:
        """Note why a disk refused the last checkpoint."""
        self.refused = why

    def note_news(self, damage: str) -> bool:
        """Note what is wrong with a checkpoint; True for the first time."""
        is_new = damage not in self._damaged
        self._damaged.add(damage)
        return is_new

    def held(self, stages: Mapping[str, int]) -> dict[int, frozenset[int]]:
        """By stage, the steps of its intact checkpoints; {} before all processes have said.

        Args:
            stages: by name, the stage of each process that lives.
        """
        if not stages.keys() <= self.intact.keys():
            return {}
        steps: dict[int, frozenset[int]] = {}
        for name, stage in sorted(stages.items()):
            steps[stage] = steps.get(stage, frozenset()) | self.intact[name]
        return steps

    def is_lost(self, held: Mapping[int, frozenset[int]], *, begins: bool) -> bool:
        """There is no step of which every stage has an intact checkpoint, though some are damaged or each stage has one.

        Args:
            held: of `held`.
            begins: no step has been seen yet. Later a stage's processes may be of any age, beside peers that joined.
        """
        if not held or frozenset.intersection(*held.values()):
            return False
        return bool(self._damaged) or (begins and all(held.values()))

    def fault(self, num_steps: int, newest: int | None) -> str:
        """Why a run that has ended after `num_steps` is not on disk; "" if it is.

        Args:
            newest: of `newest_checkpoint`. An older one is right where a peer of another machine wrote the last.
        """
        if newest is not None and (newest >= num_steps or not self.refused):
            return ""
        kept = "none is complete" if newest is None else f"the newest complete one is of step {newest}"
        return f"the checkpoint of step {num_steps} was not written ({kept}){f': {self.refused}' if self.refused else ''}"


def held_text(held: Mapping[int, frozenset[int]]) -> str:
    """For people: which stage has checkpoints of which steps."""
    return "; ".join(f"stage {k}: {', '.join(map(str, sorted(steps))) or 'none'}" for k, steps in sorted(held.items()))


def adopt_complete(state_dir: Path, num_stages: int, peers_per_stage: int) -> list[Path]:
    """Give the processes of each stage its part of every complete checkpoint that only a peer that had joined wrote.

    Of all, since the newest may turn out to be damaged. Returns what was copied.

    Raises:
        OSError: the disk refuses.
    """
    copied = []
    for step, stage in itertools.product(sorted(_complete_steps(state_dir, num_stages)), range(num_stages)):
        part = stage_directory(Path(), stage) / step_name(step)
        started = [state_dir / f"stage-{stage}-{i}" for i in range(peers_per_stage)]
        if any((peer / part).exists() for peer in started):
            continue
        source, target = next(state_dir.glob(f"*/{part}")), started[0] / part
        unfinished = target.with_name(f"{PARTIAL}{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished)
        unfinished.rename(target)
        copied.append(source)
    return copied


def bytes_under_way(peer_dir: Path, pid: int) -> int:
    """What process `pid` has written of the checkpoints that it is writing now; -1 if it is not writing any."""
    num_bytes = -1
    for partial in partials_of(peer_dir, pid):
        with contextlib.suppress(OSError):
            num_bytes = max(num_bytes, 0) + sum(file.stat().st_size for file in partial.iterdir())
    return num_bytes


def require_own(state_dir: Path, run: RunId) -> None:
    """A directory whose run file is gone, or was changed, goes on with the run whose checkpoints it holds, and no other.

    Raises:
        ConfigError: it holds a checkpoint of another run.
    """
    for _, _, description in descriptions_of_peers(state_dir):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found = str(json.loads(description.read_text())["record"]["run"])
            if found != run and (state_dir / RUN_FILE).exists():
                raise ConfigError(
                    f"{state_dir / RUN_FILE} was changed: the checkpoints there are of run {found[:12]}, and this is run "
                    f"{run[:12]}: put the file back as it was; recut_run begins a new run from them with other options"
                )
            if found != run:
                raise ConfigError(
                    f"{state_dir} holds checkpoints of run {found[:12]} and no {RUN_FILE}, and this is run {run[:12]}: give the "
                    "options or the run file that it was started with, or choose another --state-dir"
                )


def newest_checkpoint(state_dir: Path, num_stages: int) -> int | None:
    """The highest number of steps for which every stage has a checkpoint below `state_dir`, by their names."""
    return max(_complete_steps(state_dir, num_stages), default=None)


def _complete_steps(state_dir: Path, num_stages: int) -> set[int]:
    steps: dict[int, set[int]] = {}
    for stage, step, _ in descriptions_of_peers(state_dir):
        steps.setdefault(step, set()).add(stage)
    return {step for step, stages in steps.items() if len(stages) >= num_stages}
