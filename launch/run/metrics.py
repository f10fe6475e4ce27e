"""The metrics file: one JSON line per committed step, appended as it commits. Knows no peer.

A step stands in it once for each run: when a run that was set back, or started again, commits a step anew, the lines of
what it left behind are taken off the end of the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: Of every line.
_BEGINNING = b'{"step":'


class MetricsFile:
    """Appends lines to `path`; None writes nowhere.

    Raises:
        ConfigError: the file cannot be opened, another process writes it, or it holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        #: Of the lines at the file's end that belong to one run: where each begins, by step, with its head.
        self._lines: dict[int, tuple[int, str]] = {}
        self._run: str | None = None
        self._path = path
        self._is_failing = False
        try:
            # A pipe or a terminal cannot be read back: there every line is written.
            self._is_new = path is not None and not path.exists()
            self._is_kept = path is not None and (path.is_file() or self._is_new)
            self._file = path.open("a+b" if self._is_kept else "wb", buffering=0) if path is not None else None
            if self._is_kept:
                self._read()
        except BlockingIOError:
            raise ConfigError(f"--metrics {path}: another process writes it; name another file") from None
        except OSError as error:
            raise ConfigError(f"--metrics {path}: {error.strerror}") from None

    def _read(self) -> None:
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.seek(0)
        offset = 0
        for text in self._file.readlines():
            if not text.startswith(_BEGINNING[: len(text)]):
                raise ConfigError(f"--metrics {self._path} holds something else than metrics; name another file")
            if not text.endswith(b"\n"):  # its writer was killed halfway
                self._file.truncate(offset)
                break
            try:
                line = json.loads(text)
                self._note(line["run"], line["step"], offset, line["head"])
            except (ValueError, KeyError, TypeError):
                self._lines.clear()
                self._run = None
            offset += len(text)

    def _note(self, run: str, step: int, offset: int, version_id: str) -> None:
        if run != self._run:
            self._lines.clear()
            self._run = run
        self._lines[step] = (offset, version_id)

    def append(self, line: dict[str, Any]) -> None:
        """Write one line, whole, unless it stands there; a disk that refuses is told once, and costs the line."""
        if self._file is None:
            return
        run, step, version_id = line["run"], line["step"], line["head"]
        if run == self._run and self._lines.get(step, (0, ""))[1] == version_id:
            return
        last = max(self._lines, default=step) if run == self._run else step
        if step > last + 1:
            logger.warning(
                "--metrics %s: %s missing, committed while nobody wrote there",
                self._path,
                f"step {step - 1} is" if step == last + 2 else f"steps {last + 1} to {step - 1} are",
            )
        try:
            self._forget_from(run, step)
            offset = self._file.seek(0, os.SEEK_END) if self._is_kept else 0
            self._write(offset, json.dumps(line).encode() + b"\n")
        except OSError as error:
            if not self._is_failing:
                logger.error("--metrics %s: %s; training goes on, its steps are not written there", self._path, error.strerror)
            self._is_failing = True
            return
        self._is_failing = False
        if self._is_kept:
            self._note(run, step, offset, version_id)

    def _forget_from(self, run: str, step: int) -> None:
        """`step` is committed anew: what stands there of it and of later ones did not last."""
        assert self._file is not None
        left = [known for known in self._lines if known >= step] if run == self._run else []
        if left:
            self._file.truncate(min(self._lines[known][0] for known in left))
            for known in left:
                del self._lines[known]

    def _write(self, offset: int, content: bytes) -> None:
        assert self._file is not None
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(offset)
            raise

    def close(self) -> None:
        """A file that was made here goes again if no line was written: nobody answered, or the run was refused."""
        if self._file is None:
            return
        if self._is_new and self._path is not None:
            with contextlib.suppress(OSError):
                if not os.fstat(self._file.fileno()).st_size:
                    self._path.unlink()
        self._file.close()
