"""Tensors written as one safetensors file. Owns the file's permissions, which the library narrows to its owner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch


def save_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write `tensors` to `path`, readable for whom the umask says.

    Raises:
        OSError, SafetensorError: the disk refuses; nothing is left at `path`.
    """
    try:
        path.touch()
        mode = path.stat().st_mode
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
