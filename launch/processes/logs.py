"""How a process speaks: log lines on stderr and announcements on stdout, as text or JSON. Knows no peer."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _JsonFormatter(logging.Formatter):
    """One object per line: `time` (UTC, ISO 8601), `level`, `logger`, `message`, and `traceback` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(log_format: str, level: str, *, quiet: bool) -> None:
    """Send this process's log to stderr; `quiet` leaves errors only. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.ERROR if quiet else logging.WARNING)
    # Libraries speak from warnings up; this package speaks at the level asked for.
    for name in ("swarm", "models", "launch"):
        logging.getLogger(name).setLevel(logging.ERROR if quiet else _LEVELS[level])


def console(**options: Any) -> Console:
    """With rich's `options`, for tables on stdout; a reader that has gone is a BrokenPipeError, as of `print`."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Plain(**options)


class Announcer:
    """Prints what a person who started the process waits for, one line each, to stdout."""

    def __init__(self, program: str, log_format: str, *, quiet: bool) -> None:
        self._program = program
        self._json = log_format == "json"
        self._quiet = quiet

    def say(self, text: str, **values: Any) -> None:
        """Print `text` after the program's name; as JSON it is joined by `values`."""
        self.line(text if self._json else f"{self._program}: {text}", **values)

    def line(self, text: str, **values: Any) -> None:
        """Print `text` alone; as JSON it is joined by `values`."""
        if not self._quiet:
            # A log on a full disk, or a reader that has gone, is no reason to stop.
            with contextlib.suppress(OSError):
                print(json.dumps({"program": self._program, "message": text, **values}) if self._json else text, flush=True)
