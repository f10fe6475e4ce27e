"""A process's hold on its state directory, and how one is told from others. Does not read what is kept there."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from swarm.base.errors import ConfigError

#: A run's configuration, a peer's identity, the addresses it knows, its checkpoints and its tickets.
_MARKS = ("run.json", "identity.json", "contacts.json", "served.json", "checkpoints", "tickets")
#: What used a directory may still be ending, in seconds: children of a process that was killed take about three.
ENDING_S = 5.0
_LOOK_EVERY_S = 0.1
logger = logging.getLogger(__name__)


def is_state_directory(directory: Path) -> bool:
    """Whether a local run or a peer keeps its state in `directory`."""
    return any((directory / mark).exists() for mark in _MARKS)


def claim_directory(directory: Path, *, wait_s: float = ENDING_S) -> None:
    """Create `directory` and hold it for the life of this process; the lock leaves no file behind. May block for `wait_s`.

    Raises:
        ConfigError: it cannot be created, or another process holds it and goes on to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)  # closed, and so released, by the end of the process
    except OSError as error:
        raise ConfigError(f"state directory {directory}: {error.strerror}; choose another --state-dir") from None
    until = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() >= until:
                break
        if not is_told:
            is_told = True
            logger.warning("state directory %s is in use; waiting %g s for what uses it to end", directory, wait_s)
        time.sleep(_LOOK_EVERY_S)
    os.close(descriptor)
    raise ConfigError(f"state directory {directory} is in use: wait until what uses it has ended, or choose another --state-dir")
