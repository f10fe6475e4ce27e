"""A child's tie to its parent: a child never outlives it, however the parent ends. Knows no peer.

Two ties, since each has a gap: Linux kills the child when its parent dies (`PR_SET_PDEATHSIG`), and everywhere else a
thread sees the end of a pipe that only the parent holds open.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process once its parent, `parent_pid`, is gone (Linux; elsewhere does nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the call above
            os._exit(1)


def watch_pipe(read_fd: int, *, grace_s: float = 3.0) -> threading.Thread:
    """End this process when nobody holds the write end of `read_fd` any more: politely, then after `grace_s` for good.

    Runs in a daemon thread, so that a hung event loop does not keep the process.
    """

    def watch() -> None:
        while True:
            select.select([read_fd], [], [])
            if not os.read(read_fd, 4096):
                break
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    thread = threading.Thread(target=watch, name="lifeline", daemon=True)
    thread.start()
    return thread
