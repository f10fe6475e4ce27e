"""The metrics file: one JSON line per committed step, appended as it commits. Knows no peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError


class MetricsFile:
    """Appends lines to `path`; None writes nowhere.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = path.open("a", buffering=1) if path is not None else None
        except OSError as error:
            raise ConfigError(f"--metrics {path}: {error.strerror}") from None

    def append(self, line: dict[str, Any]) -> None:
        """Write one line, whole."""
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
