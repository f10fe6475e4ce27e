"""Arrays that are files: read as they are asked for, and let go. Must not know what they hold."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as a read-only array. It stays readable when the file is removed.

    Raises:
        OSError: there is no such file.
    """
    if not path.stat().st_size:
        return np.empty(0, dtype)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    memory.madvise(mmap.MADV_RANDOM)  # samples come from anywhere: what lies around them is not read with them
    return np.frombuffer(memory, dtype)


def let_go(array: np.ndarray) -> None:
    """Give back the memory that reading a mapped array took; it can be read again. Nothing happens to other arrays."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    if base is not None:
        base.madvise(mmap.MADV_DONTNEED)
