"""What holds for every test: hypothesis measures no time, a command that ran in a test's process leaves no trace, and what
needs the machine's cores for itself comes last, in one of the two processes that share the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

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


#: Tests here start processes or measure time.
ALONE = ("contract", "integration")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, and what must be alone last."""
    here = Path(__file__).parent

    def needs_the_machine(item: pytest.Item) -> bool:
        return item.path.relative_to(here).parts[0] in ALONE

    for item in filter(needs_the_machine, items):
        item.add_marker(pytest.mark.xdist_group("alone"))
    items.sort(key=lambda item: (needs_the_machine(item), item.path.name != "test_random_schedules.py"))
