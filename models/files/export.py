"""A directory that transformers loads, shard by shard. Owns its files; must not know stages or the swarm."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import GenerationConfig, PreTrainedModel

from models.files.byte_tokenizer import write_byte_tokenizer
from models.files.conversion import as_saved
from models.files.shards import INDEX_FILE, SINGLE_FILE, block_of
from models.files.stored_codes import without_method
from swarm.base.errors import ConfigError, StorageError
from swarm.stage.saved.tensor_file import save_file
from swarm.wire.compression import all_finite

GENERATION_FILE = "generation_config.json"
SHARD_BYTES = 5 * 10**9
_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the files are like: as the base's, where there is one."""

    #: Of parameters that `dtypes` does not name.
    dtype: torch.dtype
    #: Of single tensors, by their names in the files.
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    #: Names of the base's tensors; None if they are not known.
    names: frozenset[str] | None = None
    #: `generation_config.json` of the base.
    generation: bytes | None = None
    shard_bytes: int = SHARD_BYTES


def write_model(
    directory: str | os.PathLike[str],
    names: Iterable[str],
    read: Callable[[str], torch.Tensor],
    lm: PreTrainedModel,
    form: Form,
    *,
    buffers: Mapping[str, torch.Tensor],
    byte_tokenizer: bool,
) -> None:
    """Write the weights, one shard in memory at a time, and what describes them; an old model stays until the new one is whole.

    Args:
        directory: is made if it is missing.
        names: of parameters, each tied one once, in the order in which they are read.
        read: gives a parameter's values, on any device.
        lm: the whole model, without memory.
        form: what the files are like.
        buffers: written as they are.
        byte_tokenizer: write a `tokenizer.json` for tokens that are bytes.

    Raises:
        ConfigError: a value does not fit the type that it is written in.
        StorageError: if the directory cannot be written.
    """
    groups = [list(group) for _, group in groupby(names, block_of)]  # a layer at a time: what is made of several is in one
    outlines = lm.state_dict()
    files = _planned(groups, outlines, lm, form, buffers)
    path = Path(directory)
    fields = without_method(lm.config.to_dict())
    fields.update(architectures=[type(lm).__name__], dtype=str(form.dtype).removeprefix("torch."))
    fields.pop("_attn_implementation", None)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_shards(path, groups, read, lm, files, buffers)
        _put_in_place(path, files)
        (path / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        if form.generation is not None:
            (path / GENERATION_FILE).write_bytes(form.generation)
        else:
            GenerationConfig.from_model_config(lm.config).save_pretrained(path)
        if byte_tokenizer:
            write_byte_tokenizer(path)
    except (ConfigError, ValueError):
        raise
    except Exception as error:  # safetensors raises its own type for a full disk
        raise StorageError(f"cannot write the model to {path}: {error}") from error
    finally:
        for name in files.tensors:
            with contextlib.suppress(OSError):
                (path / (name + _PARTIAL)).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Files:
    """Which tensors each file holds, the type of each, whether names are the files' own, and the index."""

    tensors: dict[str, list[str]]
    dtypes: dict[str, torch.dtype]
    converts: bool
    index: dict[str, Any] | None


def _planned(
    groups: list[list[str]],
    outlines: Mapping[str, torch.Tensor],
    lm: PreTrainedModel,
    form: Form,
    buffers: Mapping[str, torch.Tensor],
) -> _Files:
    """From shapes alone. The names are the base's, if transformers' own rules give them; the model's, if those are the base's."""
    own = {name: outlines[name] for names in groups for name in names}
    saved = {name: x for names in groups for name, x in as_saved(lm, {name: outlines[name] for name in names}).items()}
    keeps_own = form.names is not None and not saved.keys() <= form.names and own.keys() <= form.names
    parameters = own if keeps_own else saved
    dtypes = {name: form.dtypes.get(name, form.dtype) if x.is_floating_point() else x.dtype for name, x in parameters.items()} | {
        name: x.dtype for name, x in buffers.items()
    }
    shapes = {name: x.shape for name, x in (*parameters.items(), *buffers.items())}
    empty = {name: torch.empty(shapes[name], dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    split = split_torch_state_dict_into_shards(
        empty, filename_pattern="model{suffix}.safetensors", max_shard_size=form.shard_bytes
    )
    index = {
        "metadata": {"total_parameters": sum(x.numel() for x in lm.parameters()), **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    return _Files(split.filename_to_tensors, dtypes, not keeps_own, index if split.is_sharded else None)


def _write_shards(
    path: Path,
    groups: list[list[str]],
    read: Callable[[str], torch.Tensor],
    lm: PreTrainedModel,
    files: _Files,
    buffers: Mapping[str, torch.Tensor],
) -> None:
    file_of = {name: file for file, names in files.tensors.items() for name in names}
    waiting: dict[str, dict[str, torch.Tensor]] = {}

    def add(name: str, value: torch.Tensor) -> None:
        file = file_of[name]
        held = waiting.setdefault(file, {})
        held[name] = value.to(files.dtypes[name]).contiguous()
        if value.is_floating_point() and not all_finite(held[name]):
            kind = str(files.dtypes[name]).removeprefix("torch.")
            raise ConfigError(f"{name} has values that {kind} cannot hold: export with another --dtype, such as bfloat16")
        if len(held) == len(files.tensors[file]):
            save_file(waiting.pop(file), path / (file + _PARTIAL))

    for name, value in buffers.items():
        add(name, value)
    for names in groups:
        values = {name: read(name).detach().cpu() for name in names}
        for name, value in (as_saved(lm, values) if files.converts else values).items():
            add(name, value)


def _put_in_place(path: Path, files: _Files) -> None:
    """The new files become the model, and what an older one left goes: loaders would take it for a part of this one."""
    for name in files.tensors:
        os.replace(path / (name + _PARTIAL), path / name)
    if files.index is None:
        (path / INDEX_FILE).unlink(missing_ok=True)
    else:
        (path / INDEX_FILE).write_text(json.dumps(files.index, indent=2, sort_keys=True) + "\n")
        (path / SINGLE_FILE).unlink(missing_ok=True)
    for shard in path.glob("model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"):
        if shard.name not in files.tensors:
            shard.unlink()
