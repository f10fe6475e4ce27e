"""A directory that transformers loads. Owns its files; must not know stages or the swarm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from models.files.byte_tokenizer import write_byte_tokenizer
from swarm.base.errors import StorageError
from swarm.stage.saved.tensor_file import save_file


def write_model(
    directory: str | os.PathLike[str],
    state: Mapping[str, torch.Tensor],
    config: PreTrainedConfig,
    *,
    architecture: str,
    dtype: torch.dtype,
    byte_tokenizer: bool,
) -> None:
    """Write `model.safetensors` and `config.json`; an old model stays until the new one is whole.

    Args:
        directory: is made if it is missing.
        state: the Hugging Face `state_dict`, contiguous on the CPU, each tied tensor once.
        config: of the model.
        architecture: name of the model's class.
        dtype: what the parameters are meant to be loaded as.
        byte_tokenizer: write a `tokenizer.json` for tokens that are bytes.

    Raises:
        StorageError: if the directory cannot be written.
    """
    fields = config.to_dict()
    fields.update(architectures=[architecture], dtype=str(dtype).removeprefix("torch."))
    fields.pop("_attn_implementation", None)
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        partial = path / "model.safetensors.partial"
        save_file(state, partial)
        os.replace(partial, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        if byte_tokenizer:
            write_byte_tokenizer(path)
    except Exception as error:  # safetensors raises its own type for a full disk
        raise StorageError(f"cannot write the model to {path}: {error}") from error
