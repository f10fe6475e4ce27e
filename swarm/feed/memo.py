"""What was computed of tokens once, kept beside them. Owns the two kinds of file; must not know what they mean."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.base.replace_file import replace_file


@dataclass(frozen=True)
class Memo:
    """Remembers by name, in files of `directory`; None forgets at once. `about` begins each name."""

    directory: Path | None
    about: str = ""

    def of(self, about: str) -> Memo:
        """The same directory for a part of what this is about."""
        return Memo(self.directory, f"{self.about} {about}")

    def arrays(self, name: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """What `make` gave when it was first asked for `name`."""
        path = self._path(name, ".npz")
        if path is not None:
            with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile, EOFError), np.load(path) as kept:
                return dict(kept)
        made = make()
        _keep(path, lambda: _zipped(made))
        return made

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """As `arrays`, for what JSON can hold."""
        path = self._path(name, ".json")
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                return json.loads(path.read_text())
        made = make()
        _keep(path, lambda: json.dumps(made).encode())
        return made

    def _path(self, name: str, suffix: str) -> Path | None:
        if self.directory is None:
            return None
        return self.directory / (hashlib.sha256(f"{self.about}\0{name}".encode()).hexdigest()[:32] + suffix)


NO_MEMO = Memo(None)


def _keep(path: Path | None, data: Callable[[], bytes]) -> None:
    """Whole or not at all. Where it cannot be written it is computed again next time."""
    if path is not None:
        with contextlib.suppress(OSError):
            replace_file(path, data(), durable=False)


def _zipped(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
