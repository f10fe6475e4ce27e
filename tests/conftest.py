"""What holds for every test: hypothesis measures no time, a command that ran in a test's process leaves no trace, and the two
processes that share the tests end together: what starts processes begins at once in one, simulations in the other."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# On a busy machine a deadline would fail tests which are right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Tests start many Python processes. Without bytecode on disk each of them would compile this package for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands configure the process's logging; tests that look at the log need pytest's."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", "swarm", "models", "launch")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def caches_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens that commands keep for the next one are not kept among those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


#: In this order. Tests that start processes or measure time never meet each other: those of one directory stay in one process.
ORDER = ("integration", "sim", "unit", "contract")
TOGETHER = ("integration", "contract", "test_random_schedules.py")


class _Groups(LoadScopeScheduling):
    """Test by test, but for those of a directory or file of `TOGETHER`, which are one piece of work.

    (`--dist loadgroup` groups nothing with xdist 3.8 under pytest 9.2: the name of the group no longer reaches the scheduler.)
    """

    def _split_scope(self, nodeid: str) -> str:
        parts = nodeid.partition("::")[0].split("/")
        return next((name for name in TOGETHER if name in parts), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups:
    return _Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: one process takes the first group at once, the other the rest."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, bool]:
        directory = item.path.relative_to(here).parts[0]
        return ORDER.index(directory) if directory in ORDER else len(ORDER), item.path.name != "test_random_schedules.py"

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What imports and the collection of tests made stays to the end: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
