"""The metrics file: one JSON line per committed step, appended as it commits. Knows no peer.

A step stands in it once for each run: when a run that was set back, or started again, commits a step anew, the lines of
what it left behind are taken off the end of the file. Each line has room for the loss of an evaluation, which is known later:
so nothing that was written moves, and whoever follows the file sees whole lines. docs/metrics.md lists the fields.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: Of every line.
_BEGINNING = b'{"step":'
#: The last field of a line, and the width of its value: blanks fill what that leaves.
_EVALUATION = b', "eval_loss": '
_WIDTH = 24


@dataclass(frozen=True)
class _Line:
    """Where the line of a step begins, the head that it is of, and the tokens of the run up to it, where all are known."""

    offset: int
    version_id: str
    total_tokens: int | None
    #: Where the loss of an evaluation goes; None in a line that has no room for it.
    slot: int | None


class MetricsFile:
    """Appends lines to `path`; None writes nowhere.

    Raises:
        ConfigError: the file cannot be opened, another process writes it, or it holds something else.
    """

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        #: Of the lines at the file's end that belong to one run, by step.
        self._lines: dict[int, _Line] = {}
        self._run: str | None = None
        self._clock = clock
        self._began = clock()
        #: Of earlier lives of the run's trainer.
        self._earlier_s = 0.0
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
                at = text.rfind(_EVALUATION)
                slot = None if at < 0 else offset + at + len(_EVALUATION)
                self._note(line["run"], line["step"], _Line(offset, line["head"], line.get("total_tokens"), slot))
                self._earlier_s = float(line.get("elapsed_s") or 0.0)
            except (ValueError, KeyError, TypeError):
                self._lines.clear()
                self._run = None
            offset += len(text)

    def _note(self, run: str, step: int, line: _Line) -> None:
        self._begin(run)
        self._lines[step] = line

    def _begin(self, run: str) -> None:
        if run != self._run:
            self._lines.clear()
            self._run, self._earlier_s = run, 0.0

    def append(self, line: dict[str, Any]) -> None:
        """Write one line, whole, unless it stands there; a disk that refuses is told once, and costs the line."""
        if self._file is None:
            return
        run, step, version_id = line["run"], line["step"], line["head"]
        if run == self._run and step in self._lines and self._lines[step].version_id == version_id:
            return
        last = max(self._lines, default=step) if run == self._run else step
        if step > last + 1:
            logger.warning(
                "--metrics %s: %s missing, committed while nobody wrote there",
                self._path,
                f"step {step - 1} is" if step == last + 2 else f"steps {last + 1} to {step - 1} are",
            )
        before = self._lines.get(step - 1) if run == self._run else None
        known = before.total_tokens if before is not None else 0 if step == 1 else None
        total_tokens = None if known is None else known + line["tokens"]
        try:
            self._forget_from(run, step)
            self._begin(run)
            more = {"total_tokens": total_tokens, "elapsed_s": self._earlier_s + self._clock() - self._began}
            offset = self._file.seek(0, os.SEEK_END) if self._is_kept else 0
            content = json.dumps({**line, **more}).encode()[:-1] + _EVALUATION
            self._write(offset, content + b"null".ljust(_WIDTH) + b"}\n")
        except OSError as error:
            if not self._is_failing:
                logger.error("--metrics %s: %s; training goes on, its steps are not written there", self._path, error.strerror)
            self._is_failing = True
            return
        self._is_failing = False
        self._note(run, step, _Line(offset, version_id, total_tokens, offset + len(content) if self._is_kept else None))

    def evaluate(self, run: str, step: int, version_id: str, loss: float) -> None:
        """Write the loss of an evaluation into the line of its step, if that stands here; a disk that refuses costs it."""
        line = self._lines.get(step) if run == self._run else None
        if self._path is None or line is None or line.slot is None or line.version_id != version_id or not math.isfinite(loss):
            return
        try:
            with self._path.open("r+b", buffering=0) as file:
                file.seek(line.slot)
                file.write(f"{loss:.12g}".encode().ljust(_WIDTH))
        except OSError as error:
            logger.error("--metrics %s: %s; the evaluation of step %d is not written there", self._path, error.strerror, step)

    def _forget_from(self, run: str, step: int) -> None:
        """`step` is committed anew: what stands there of it and of later ones did not last."""
        assert self._file is not None
        left = [known for known in self._lines if known >= step] if run == self._run else []
        if left:
            if self._is_kept:
                self._file.truncate(min(self._lines[known].offset for known in left))
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
