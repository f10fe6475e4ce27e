"""A process's hold on its state directory, and how one is told from others. Does not read what is kept there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from swarm.base.errors import ConfigError

#: A run's configuration, a peer's identity, the addresses it knows, its checkpoints and its tickets.
_MARKS = ("run.json", "identity.json", "contacts.json", "checkpoints", "tickets")


def is_state_directory(directory: Path) -> bool:
    """Whether a local run or a peer keeps its state in `directory`."""
    return any((directory / mark).exists() for mark in _MARKS)


def claim_directory(directory: Path) -> None:
    """Create `directory` and hold it for the life of this process; the lock leaves no file behind.

    Raises:
        ConfigError: it cannot be created, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)  # closed, and so released, by the end of the process
    except OSError as error:
        raise ConfigError(f"state directory {directory}: {error.strerror}; choose another --state-dir") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"state directory {directory} is in use: wait until what uses it has ended, or choose another --state-dir"
        ) from None
