"""Committed stage state on disk: safetensors, written atomically, each directory bound to one version.

Owns what the files hold: tensors by name, and a description of records, stage, configuration and digests; where they lie
says `places.py`. A directory appears under its name only when it is complete. The best one is never pruned. Knows no network.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from swarm.base.config import RunConfig, first_problem
from swarm.base.errors import ConfigError, StorageError
from swarm.base.replace_file import replace_file
from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout
from swarm.stage.moments import Moments, OptimizerState
from swarm.stage.saved.places import (
    BEST_FILE,
    DESCRIPTION,
    OLD,
    PARTIAL,
    TENSOR_FILES,
    checkpoints_directory,
    stage_directories,
    stage_directory,
    step_name,
    steps_in,
    tensor_path,
)
from swarm.stage.saved.tensor_file import save_file
from swarm.stage.versions import StageState, make_version
from swarm.wire.messages import CommitRecord

#: Tells files from others that take their places.
FileIdentity = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class StageCheckpoint:
    """One stage's part of a checkpoint, on disk."""

    directory: Path
    stage: int
    record: CommitRecord
    previous: CommitRecord | None
    num_updates: int
    digests: dict[str, str]
    config_bytes: bytes
    #: Tells its files from later ones; taken before its description was read.
    identity: FileIdentity
    #: Evaluation loss at it, of the one that is the best of its peer.
    best_loss: float | None = None

    @property
    def is_there(self) -> bool:
        """It was neither pruned nor replaced since it was found."""
        return _identity(self.directory) == self.identity

    def _load(self, name: str, tick: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
        path = tensor_path(self.directory, name)
        try:
            _require_file(path)
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from None
        if name not in self.digests:
            raise _damaged(path, "no digest was written with it")
        if digest_of((tensors[key] for key in sorted(tensors)), tick=tick) != self.digests[name]:
            raise _damaged(path, "the digest differs from the one written with it")
        return tensors

    def check(self, tick: Callable[[], None] = lambda: None) -> None:
        """Read every file to its end; `tick` is called, from any thread, as often as something was read.

        Raises:
            StorageError: as `parameters`.
        """
        for name in TENSOR_FILES if self.previous is not None else TENSOR_FILES[:2]:
            self._load(name, tick)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters by name, in the masters' dtype.

        Raises:
            StorageError: if the file is missing, truncated or not what was written.
        """
        return self._load("parameters")

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, as `first/<name>`, `second/<name>` and so on: see `Moments.entries`.

        Raises:
            StorageError: as `parameters`.
        """
        return self._load("optimizer")

    def state(self, moments: Moments, *, record: CommitRecord, dtype: torch.dtype, device: str) -> StageState:
        """The whole state, as it was committed; its version carries `record`, which is of the same version.

        Raises:
            StorageError: if a file is damaged, or is that of another model.
        """

        found, own = self.moments(), moments.layout
        optimizer = OptimizerState(
            {name: self._flat(found, layout, str(moments.home), f"{name}/") for name, (_, layout) in moments.entries.items()},
            self.num_updates,
        )
        previous = None
        if self.previous is not None:
            previous = make_version(self.previous, own, self._flat(self._load("previous"), own, device), dtype)
        return StageState(make_version(record, own, self.masters(own, device=device), dtype), optimizer, previous)

    def masters(self, layout: Layout, *, device: str) -> torch.Tensor:
        """The parameters, flat [N].

        Raises:
            StorageError: as `state`.
        """
        return self._flat(self.parameters(), layout, device)

    def _flat(self, tensors: dict[str, torch.Tensor], layout: Layout, device: str, prefix: str = "") -> torch.Tensor:
        try:
            named = [tensors[prefix + name] for name in layout.names]
            dtypes = {t.dtype for t in named}
            if len(dtypes) > 1:
                raise ValueError("tensors of several dtypes")
            return layout.flatten(named, dtype=named[0].dtype if named else torch.float32, device=device)
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            raise StorageError(f"{self.directory}: does not fit this stage's parameters: {error}") from None


def _identity(directory: Path) -> FileIdentity:
    """The identity of all files of a checkpoint; a copy that keeps the time of its change has another one."""
    found = []
    for path in (directory / DESCRIPTION, *(tensor_path(directory, name) for name in TENSOR_FILES)):
        try:
            stat = path.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_ctime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _require_file(path: Path) -> None:
    """Check that `path` can be read to an end.

    Raises:
        OSError: it cannot be opened, in the system's words; or it is no file.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    path.open("rb").close()


def _damaged(path: Path, what: object) -> StorageError:
    said = what.strerror if isinstance(what, OSError) and what.strerror else what
    reason = " ".join(str(said).split())[:300]
    return StorageError(f"{path} is damaged ({reason}): put an intact copy in its place, delete its directory, or name another")


def write_checkpoint(
    root: Path, stage: int, state: StageState, moments: Moments, config: RunConfig, *, config_bytes: bytes
) -> Path:
    """Write one stage's committed state and prune all but the newest `checkpoint_keep` and the one that all stages have.

    Raises:
        StorageError: if the disk refuses; what was there before is intact.
    """
    version, optimizer = state.version, state.optimizer
    parent = stage_directory(root, stage)
    target = parent / step_name(version.num_commits)
    partial = parent / f"{PARTIAL}{version.num_commits:08d}-{os.getpid()}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        layout = moments.layout
        parts: dict[str, dict[str, tuple[Layout, torch.Tensor]]] = {
            "parameters": {"": (layout, version.masters)},
            "optimizer": {f"{name}/": (entry[1], optimizer.tensors[name]) for name, entry in moments.entries.items()},
        }
        if state.previous is not None:
            parts["previous"] = {"": (layout, state.previous.masters)}
        digests = {}
        for name, flats in parts.items():  # one after another: each is a copy of its tensors
            tensors = {key: value for prefix, flat in flats.items() for key, value in _named(*flat, prefix).items()}
            save_file(tensors, tensor_path(partial, name))
            digests[name] = digest_of(tensors[key] for key in sorted(tensors))
            del tensors
        meta = {
            "stage": stage,
            "num_updates": optimizer.num_updates,
            "record": version.record.model_dump(mode="json"),
            "previous": state.previous.record.model_dump(mode="json") if state.previous is not None else None,
            "config": config_bytes.decode(),
            "blake3": digests,
        }
        (partial / DESCRIPTION).write_text(json.dumps({**meta, "digest": _digest_of(meta)}))
        for file in partial.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        _put_in_place(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"cannot write checkpoint {target}: {error}") from None
    with suppress(OSError):  # the next time prunes what is left
        _prune(parent, target, config.checkpoint_keep, version.record.saved)
    return target


def _digest_of(meta: dict[str, object]) -> str:
    """The digest of a description without its digest."""
    return blake3(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename, moving an older checkpoint of the same step aside first; it comes back if the rename is refused."""
    if not target.exists():
        partial.rename(target)
        return
    aside = target.with_name(f"{OLD}{target.name}-{os.getpid()}")
    target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def mark_best(checkpoint: Path, loss: float) -> None:
    """Make `checkpoint` (what `write_checkpoint` returned) the best of its stage at this peer.

    Raises:
        StorageError: if the disk refuses; the mark that was there before is intact.
    """
    target = checkpoint.parent / BEST_FILE
    try:
        replace_file(target, json.dumps({"directory": checkpoint.name, "loss": loss}).encode())
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error}") from None


def best_loss(parent: Path) -> tuple[str, float] | None:
    """Name and evaluation loss of the best checkpoint in the stage's directory `parent`; None if none is marked."""
    try:
        best = json.loads((parent / BEST_FILE).read_text())
        return str(best["directory"]), float(best["loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def saved_steps(root: Path, stage: int, steps: Iterable[int]) -> tuple[int, ...]:
    """Tell of which of `steps`, numbers of commits, the stage has a checkpoint below `root`, by their names; ascending."""
    directory = stage_directory(root, stage)
    return tuple(sorted(step for step in set(steps) if (directory / step_name(step)).is_dir()))


def _prune(parent: Path, written: Path, keep: int, saved: int) -> None:
    """Keep what was just written, the best, and the newest others (after a set-back there may be later steps).

    So does that of `saved` commits, which all stages have: until they have a newer one the run can go on from no other.
    """
    best = best_loss(parent)
    others = [path for path in steps_in(parent) if path != written and not (best and path.name == best[0])]
    for old in others[: max(0, len(others) - (keep - 1))]:
        if old.name != step_name(saved):
            with suppress(OSError):  # at once: who reads them does not find half of one
                old.rename(old.with_name(f"{OLD}{old.name}-{os.getpid()}"))
    for left in [*parent.glob(f"{PARTIAL}*"), *parent.glob(f"{OLD}*")]:  # of processes that were killed
        if left.is_file():
            left.unlink(missing_ok=True)
        elif left != written:
            shutil.rmtree(left, ignore_errors=True)


def _named(layout: Layout, flat: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
    """Parameters by name as tensors of their own: safetensors refuses views of shared memory."""
    return {prefix + name: view.detach().cpu().clone() for name, view in layout.named(flat).items()}


def scan(roots: Iterable[Path], *, stage: int | None = None, damaged: list[StorageError] | None = None) -> list[StageCheckpoint]:
    """Every complete stage checkpoint below `roots`, at any depth, by its description: its tensors are not looked at.

    Args:
        roots: directories.
        stage: only checkpoints of this one.
        damaged: takes the errors of checkpoints whose description cannot be read, which are then left out.

    Raises:
        ConfigError: if a root does not exist.
        StorageError: if a description cannot be read and `damaged` is None.
    """

    def refuse(error: StorageError) -> None:
        if damaged is None:
            raise error from None
        damaged.append(error)

    found = []
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such directory; name the state directory of a run or of its peers")
        for path in _descriptions(root, stage, refuse):
            identity = _identity(path.parent)
            try:
                _require_file(path)
                meta = json.loads(path.read_text())
                if isinstance(meta, dict) and "blake3" not in meta and "digests" in meta:
                    raise StorageError(f"{path} was written by an earlier version, which alone can read it")
                if meta.pop("digest") != _digest_of(meta):
                    raise ValueError("its digest differs from the one written with it")
                if path.parent.parent != stage_directory(path.parents[3], meta["stage"]):
                    raise ValueError(f"it is of stage {meta['stage']}")
                previous, best = meta["previous"], best_loss(path.parent.parent)
                found.append(
                    StageCheckpoint(
                        directory=path.parent,
                        stage=int(meta["stage"]),
                        record=CommitRecord.model_validate(meta["record"]),
                        previous=None if previous is None else CommitRecord.model_validate(previous),
                        num_updates=int(meta["num_updates"]),
                        digests=dict(meta["blake3"]),
                        config_bytes=meta["config"].encode(),
                        identity=identity,
                        best_loss=best[1] if best is not None and best[0] == path.parent.name else None,
                    )
                )
            except FileNotFoundError:
                if path.parent.exists():  # else it was pruned since it was listed
                    refuse(_damaged(path, "it is missing"))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StorageError) as error:
                what = f"no description of a checkpoint: {_why(error)}"
                refuse(error if isinstance(error, StorageError) else _damaged(path, what))
    return found


def _descriptions(root: Path, stage: int | None, refuse: Callable[[StorageError], None]) -> Iterator[Path]:
    """The path of every checkpoint's description below `root`, whether it is there or not."""
    own = checkpoints_directory(root)
    try:
        if own.exists():
            next(own.iterdir(), None)
    except OSError as error:  # `glob` says nothing of what it may not read
        refuse(StorageError(f"{own} cannot be read: {error.strerror}"))
    for parent in stage_directories(root, stage):
        try:
            yield from [path / DESCRIPTION for path in steps_in(parent)]
        except OSError as error:
            refuse(StorageError(f"{parent} cannot be read: {error.strerror}"))


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, ValidationError):
        return first_problem(error)
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
