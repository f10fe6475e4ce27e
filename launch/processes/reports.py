"""What a peer's process tells the process that started it, for display. Knows no peer.

`launch_local` hands each child a `PipeReports`; a launcher started by hand reports to nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

_MAX_REPORT_BYTES = 4000  # below PIPE_BUF, so that a line is written whole


class Reports:
    """Reports to nobody."""

    def send(self, event: str, **values: Any) -> None:
        """Report `event` with JSON-able `values`."""

    def failed(self, line: str) -> None:
        """Report why this process is about to exit."""
        self.send("failed", message=line[:1000])


NO_REPORTS = Reports()


class PipeReports(Reports):
    """Writes JSON lines to a pipe that all children of one parent share. One that finds the pipe full is dropped."""

    def __init__(self, name: str, write_fd: int) -> None:
        self._name = name
        self._fd = write_fd
        os.set_blocking(write_fd, False)

    def send(self, event: str, **values: Any) -> None:
        """Write the report as one line, unless it is too long or the pipe is full."""
        line = json.dumps({"from": self._name, "event": event, **values}).encode() + b"\n"
        if len(line) <= _MAX_REPORT_BYTES:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._fd, line)
