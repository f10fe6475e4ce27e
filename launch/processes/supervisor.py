"""Starts a launcher's worker process again when it crashes: same command, same port, same state directory.

Owns when that is done and how long is waited before it; must not know what the worker serves. The worker ends with its
supervisor, however that ends, and a stop signal is handed on to it once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.arguments import EXIT_DONE, EXIT_USAGE
from launch.processes.signals import heeded_signals

logger = logging.getLogger(__name__)

#: Seconds before the first restart; doubled each time up to the longest, and back after a life of that length.
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


class Supervisor:
    """One worker after another.

    Args:
        command: gives the worker's command line, for the file descriptor it reports to and its last `serving` report
            (None until it served for the first time).
        first_backoff_s: seconds before the first restart.
    """

    def __init__(
        self, command: Callable[[int, dict[str, Any] | None], Sequence[str]], *, first_backoff_s: float = FIRST_BACKOFF_S
    ) -> None:
        self._command = command
        self._first_backoff_s = first_backoff_s
        self._stopped = threading.Event()
        self._worker: subprocess.Popen[bytes] | None = None
        self._served: dict[str, Any] | None = None
        #: The worker's present life has come to serve.
        self._serves = False

    def run(self) -> int:
        """Until the worker ends by itself, is told to, or cannot begin; its exit code."""
        for number in heeded_signals():
            signal.signal(number, self._hand_on)
        backoff_s = self._first_backoff_s
        while True:
            began = time.monotonic()
            code = self._one_life()
            if code < 0 and self._served is None and not self._stopped.is_set():
                logger.error(
                    "the worker was killed by %s before it served, and is not started again; if nobody did that, its machine "
                    "may lack memory for it",
                    signal.Signals(-code).name,
                )
            is_refused = code == EXIT_USAGE and self._serves  # by what it serves: so it would be the next time
            if code == EXIT_DONE or is_refused or self._stopped.is_set() or self._served is None:
                return code if code >= 0 else 128 - code
            if time.monotonic() - began > LONGEST_BACKOFF_S:
                backoff_s = self._first_backoff_s
            how = f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
            logger.error("the worker %s; it is started again in %g s", how, backoff_s)
            if self._stopped.wait(backoff_s):
                return EXIT_DONE
            backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)

    def _one_life(self) -> int:
        self._serves = False
        read_fd, write_fd = os.pipe()
        try:
            # A session of its own: a Ctrl-C at the terminal is for the supervisor, which hands it on.
            self._worker = subprocess.Popen(self._command(write_fd, self._served), pass_fds=(write_fd,), start_new_session=True)
        finally:
            os.close(write_fd)
        if self._stopped.is_set():  # a signal came while it was being started
            self._worker.send_signal(signal.SIGTERM)
        with os.fdopen(read_fd, "rb") as reports:
            for line in reports:  # until the worker has gone
                report = json.loads(line)
                if report["event"] == "serving":
                    self._served, self._serves = report, True
                elif self._served is not None:
                    self._served |= report  # such as the stage that it went to
        return self._worker.wait()

    def _hand_on(self, number: int, frame: object) -> None:
        again = self._stopped.is_set()
        self._stopped.set()
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGKILL if again else number)
            self._worker.send_signal(signal.SIGCONT)  # one that was stopped would never hear of it
