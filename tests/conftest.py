"""What holds for every test: hypothesis measures no time, and a command that ran in a test's process leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine a deadline would fail tests which are right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands configure the process's logging; tests that look at the log need pytest's."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", "swarm", "models", "launch")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
