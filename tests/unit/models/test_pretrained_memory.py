"""A stage that is loaded takes its own bytes of memory: no second copy, whole or of a shard, exists at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.models.test_pretrained import run_of, save_llama

ROOT = Path(__file__).parents[3]
PROBE = """
import sys, threading, time
from pathlib import Path
from models.registry import factory_of
from models.files.shards import Directory
from swarm.base.config import parse_config_bytes
from swarm.stage.compute import StageCompute
from swarm.stage.moments import Moments

def rss_anon():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

config, directory = parse_config_bytes(sys.argv[1].encode()), Directory(sys.argv[2])
warm = StageCompute(factory_of(config.model_copy(update={"weights": {}}), source=None), 0, precision="fp32", seed=0)
idle, peak, ended = rss_anon(), [0], threading.Event()

def watch():
    while not ended.is_set():
        peak[0] = max(peak[0], rss_anon())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
compute = StageCompute(factory_of(config, source=directory), 1, precision="fp32", seed=0)
masters = compute.initial_masters()
moments = Moments(compute.layout, dtype=masters.dtype, device="cpu").zero()
ended.set()
thread.join()
print(compute.layout.num_elements * 4, max(peak[0], rss_anon()) - idle)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_a_stage_takes_its_bytes_and_no_more(tmp_path: Path) -> None:
    import torch

    save_llama(tmp_path, dtype=torch.bfloat16, shard_size="25MB", hidden_size=1024, intermediate_size=2048, vocab_size=512)
    command = [sys.executable, "-W", "ignore", "-c", PROBE, run_of(tmp_path).to_bytes().decode(), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    stage_bytes, taken = map(int, done.stdout.split())
    assert stage_bytes > 64e6, "or the buffers for reading would weigh too much"
    assert taken <= 1.15 * stage_bytes
    assert taken >= 0.9 * stage_bytes, "it was measured"
