"""A peer that the operating system gives too little memory refuses the stage with the numbers, before it allocates."""

from __future__ import annotations

import re
import resource
import subprocess
from pathlib import Path

import pytest

from swarm.testing.processes import environment, launcher

LIMIT = 2 * 10**9


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_stage_that_does_not_fit_the_limit_of_the_operating_system_is_refused(tmp_path: Path) -> None:
    """The model has 2.2 billion parameters: anything that tried to allocate a stage of it would fail in another way."""
    (tmp_path / "run.toml").write_text(
        'model = "causal-lm"\nnum_stages = 2\n[model_options]\nmodel_type = "llama"\nhidden_size = 4096\n'
        "num_hidden_layers = 8\nintermediate_size = 16384\nnum_attention_heads = 32\ntie_word_embeddings = false\n"
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    command = launcher("stage", "--run", tmp_path / "run.toml", "--stage", 1, "--host", "127.0.0.1", "--device", "cpu")
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limited)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    line = errors.splitlines()[-1]
    found = re.fullmatch(
        r"launch_stage: stage 1 of 2 needs 43\.37 GB for 1,204,850,688 trained parameters \(parameters 4\.82 GB, .*\) and "
        r"16\.8 MB for micro-batches, and this peer has ([0-9.]+) GB \(80% of what is free for it now\); cut the model into more "
        r"stages .*",
        line,
    )
    assert found, line
    assert 0 < float(found[1]) < 0.8 * LIMIT / 1e9
