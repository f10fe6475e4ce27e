"""Committed stage state on disk: safetensors, written atomically, each directory bound to one head.

Layout: `<root>/checkpoints/stage-<k>/step-<n>/{parameters,optimizer}.safetensors` and `checkpoint.json` (record, stage,
configuration). A directory appears under its name only when it is complete. Knows no network.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, StorageError
from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout
from swarm.stage.optimizer import OptimizerState
from swarm.stage.versions import Version
from swarm.wire.messages import CommitRecord


@dataclass(frozen=True)
class StageCheckpoint:
    """One stage's part of a checkpoint, on disk."""

    directory: Path
    stage: int
    record: CommitRecord
    config_bytes: bytes

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters by name, in the masters' dtype.

        Raises:
            StorageError: if the file is missing, truncated or not what was written.
        """
        path = self.directory / "parameters.safetensors"
        meta = json.loads((self.directory / "checkpoint.json").read_text())
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path}: {error}") from None
        if digest_of(tensors[name] for name in sorted(tensors)) != meta["parameters_digest"]:
            raise StorageError(f"{path}: the digest differs from the one written with it")
        return tensors


def write_checkpoint(
    root: Path, stage: int, version: Version, optimizer: OptimizerState, layout: Layout, config: RunConfig, *,
    config_bytes: bytes,
) -> Path:  # fmt: skip
    """Write one stage's committed state and prune all but the newest `checkpoint_keep`.

    Raises:
        StorageError: if the disk refuses; what was there before is intact.
    """
    parent = root / "checkpoints" / f"stage-{stage}"
    target = parent / f"step-{version.num_commits:08d}"
    partial = parent / f".partial-{version.num_commits:08d}-{os.getpid()}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        parameters = {n: t.detach().cpu().contiguous() for n, t in layout.named(version.masters).items()}
        moments: dict[str, torch.Tensor] = {}
        for kind, flat in (("first", optimizer.first), ("second", optimizer.second)):
            moments |= {f"{kind}/{n}": t.detach().cpu().contiguous() for n, t in layout.named(flat).items()}
        save_file(_unshared(parameters), partial / "parameters.safetensors", metadata={"format": "pt"})
        save_file(_unshared(moments), partial / "optimizer.safetensors", metadata={"format": "pt"})
        meta = {
            "stage": stage,
            "num_updates": optimizer.num_updates,
            "record": version.record.model_dump(mode="json"),
            "config": config_bytes.decode(),
            "parameters_digest": digest_of(parameters[name] for name in sorted(parameters)),
            "optimizer_digest": digest_of(moments[name] for name in sorted(moments)),
        }
        (partial / "checkpoint.json").write_text(json.dumps(meta))
        for file in partial.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"cannot write checkpoint {target}: {error}") from None
    for old in sorted(parent.glob("step-*"))[: -config.checkpoint_keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of one flat tensor as tensors of their own: safetensors refuses shared memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def scan(roots: Iterable[Path]) -> list[StageCheckpoint]:
    """Every complete stage checkpoint below `roots`, at any depth.

    Raises:
        ConfigError: if a root does not exist.
    """
    found = []
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such directory; name the state directory of a run or of its peers")
        for path in sorted(root.glob("**/checkpoints/stage-*/step-*/checkpoint.json")):
            try:
                meta = json.loads(path.read_text())
                record = CommitRecord.model_validate(meta["record"])
                found.append(StageCheckpoint(path.parent, int(meta["stage"]), record, meta["config"].encode()))
            except (OSError, ValueError, KeyError) as error:
                raise StorageError(f"{path}: not a checkpoint description: {error}") from None
    return found


def find_complete(roots: Iterable[Path], *, step: int | None = None) -> list[StageCheckpoint]:
    """One checkpoint for each stage, all of the same head: the newest that is complete, or that of `step` commits.

    Raises:
        ConfigError: if there is none; says which stages are missing at the newest head.
    """
    roots = list(roots)
    by_head: dict[str, dict[int, StageCheckpoint]] = {}
    for checkpoint in scan(roots):
        if step is None or checkpoint.record.step + 1 == step:
            by_head.setdefault(checkpoint.record.head, {}).setdefault(checkpoint.stage, checkpoint)
    where = ", ".join(str(root) for root in roots)
    best: list[StageCheckpoint] | None = None
    missing = ""
    for stages in sorted(by_head.values(), key=lambda s: next(iter(s.values())).record.step, reverse=True):
        record = next(iter(stages.values())).record
        absent = [k for k in range(len(record.members)) if k not in stages]
        if not absent:
            best = [stages[k] for k in sorted(stages)]
            break
        missing = missing or f"; at step {record.step + 1} stages {absent} are missing"
    if best is None:
        wanted = "" if step is None else f" of step {step}"
        raise ConfigError(f"no checkpoint{wanted} that is complete over all stages in {where}{missing}")
    return best
