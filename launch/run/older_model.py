"""Files of an older model in a directory that an export writes to: who loads it must not get parts of both.

Owns which files belong to a model. Must not know how they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swarm.feed.tokenizers import TOKENIZER_FILES

_MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)
_Identity = tuple[int, int]


class OlderModel:
    """What is in a directory before an export.

    Args:
        directory: need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self._model = _found(directory, _MODEL)
        self._tokenizer = _found(directory, TOKENIZER_FILES)

    def remove(self) -> list[str]:
        """Remove what the export has not written anew, and return the names.

        Files of a tokenizer stay if none of them was written: the export had no tokenizer.
        """
        stale = _unchanged(self._model)
        if len(tokenizer := _unchanged(self._tokenizer)) < len(self._tokenizer):
            stale += tokenizer
        for path in stale:
            path.unlink()
        return sorted(path.name for path in stale)


def _found(directory: Path, patterns: Sequence[str]) -> dict[Path, _Identity]:
    return {path: _identity(path) for pattern in patterns for path in directory.glob(pattern) if path.is_file()}


def _identity(path: Path) -> _Identity:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def _unchanged(files: dict[Path, _Identity]) -> list[Path]:
    return [path for path, identity in files.items() if path.is_file() and _identity(path) == identity]
