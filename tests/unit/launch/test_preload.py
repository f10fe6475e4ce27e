"""What the fork server imports: nothing for a model that nobody knows, and no transformers for a model that needs none."""

from __future__ import annotations

import subprocess
import sys

from launch.processes.preload import modules_for
from swarm.base.config import RunConfig

PRELOAD = """
import sys
from launch.processes.preload import everything
try:
    everything(sys.argv[1])
except Exception as error:
    print(type(error).__name__, sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_model_that_nobody_knows_is_refused_before_anything_is_imported() -> None:
    argv = [sys.executable, "-c", PRELOAD, RunConfig(model="nonsense").to_bytes().decode()]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["ConfigError []"], done.stderr


def test_transformers_is_imported_unless_the_model_is_a_users_own() -> None:
    own = modules_for(RunConfig(model="tests.unit.models.mlp_classifier:factory"))
    assert "torch" in own
    assert modules_for(RunConfig()) == (*own, "transformers")
