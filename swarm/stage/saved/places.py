"""Where checkpoints lie below a peer's state directory, and what their files are called. Owns the names; opens no file.

`<root>/checkpoints/stage-<k>/step-<n>/{parameters,optimizer}.safetensors` (and `previous.safetensors` with `delay_steps = 1`)
and `checkpoint.json`, for stage k after n commits. `stage-<k>/best.json` names the one with the lowest evaluation loss. A
directory that begins with `PARTIAL` is being written, one that begins with `OLD` is being deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DESCRIPTION = "checkpoint.json"
#: The tensor files beside it; the last only with `delay_steps`.
TENSOR_FILES = ("parameters", "optimizer", "previous")
BEST_FILE = "best.json"
PARTIAL, OLD = ".partial-", ".old-"


def checkpoints_directory(root: Path) -> Path:
    """The directory with the checkpoints of all stages."""
    return root / "checkpoints"


def stage_directory(root: Path, stage: int) -> Path:
    """The directory with the checkpoints of a stage, below a peer's state directory."""
    return checkpoints_directory(root) / f"stage-{stage}"


def step_name(num_commits: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{num_commits:08d}"


def tensor_path(directory: Path, name: str) -> Path:
    """The file of one of `TENSOR_FILES` in a checkpoint's directory."""
    return directory / f"{name}.safetensors"


def stage_directories(root: Path, stage: int | None = None) -> list[Path]:
    """The directories of a stage, or of all, below `root` at any depth, in order."""
    return sorted(root.glob(f"**/checkpoints/stage-{'*' if stage is None else stage}"))


def steps_in(parent: Path) -> list[Path]:
    """The checkpoints in a stage's directory, in order of their steps; what is called otherwise is none.

    Raises:
        OSError: the directory cannot be read.
    """
    return sorted(path for path in parent.iterdir() if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir())


def partials_of(root: Path, pid: int) -> Iterator[Path]:
    """Directories of checkpoints that process `pid` is writing below a peer's state directory."""
    return checkpoints_directory(root).glob(f"stage-*/{PARTIAL}*-{pid}")


def descriptions_of_peers(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Stage, number of commits and description of every checkpoint of the peers whose state directories are in `root`."""
    for path in root.glob(f"*/checkpoints/stage-*/step-*/{DESCRIPTION}"):
        stage, step = path.parent.parent.name.removeprefix("stage-"), path.parent.name.removeprefix("step-")
        if stage.isdecimal() and step.isdecimal():
            yield int(stage), int(step), path
