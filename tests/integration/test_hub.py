"""A hub id instead of a directory: only what is needed is fetched, and what came is what the run states."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swarm.testing.processes import environment
from tests.integration.hub_stand_in import COMMIT, HubStandIn

REPOSITORY = "owner/small-model"
OPTIONS = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "mlp.up_proj.weight": (24, 16),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
    **{f"self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
}

CREATE = """
import pathlib
import sys
from launch.run.models import fields_of
from launch.run.run_files import DataPaths, create_run
from swarm.base.config import RunConfig
tokenizer, *steps = sys.argv[1:]
for place, gone in zip(steps[::2], steps[1::2]):
    if gone:
        pathlib.Path(gone).unlink()  # from the cache, before this run is created
    config = RunConfig(num_stages=2, sequence_length=8, **fields_of(place, {}))
    print(create_run(config, DataPaths(model=place, tokenizer=tokenizer)).to_bytes().decode())
"""
LOAD = """
import sys
from launch.run.models import weights_for
from models.registry import factory_of
from swarm.base.config import parse_config_bytes
from swarm.base.errors import ConfigError
for text, place in zip(sys.argv[1::2], sys.argv[2::2]):
    config = parse_config_bytes(text.encode())
    try:
        module = factory_of(config, source=weights_for(config, place or None)).build(1)
        print(float(module.model.layers[1].mlp.up_proj.weight[3, 5]), float(module.lm_head.weight[2, 1]))
    except ConfigError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedding, each layer, and norm with head in a shard of their own."""
    directory = tmp_path_factory.mktemp("hub_model")
    rng = np.random.default_rng(1)
    shards = {
        "model-00001-of-00004.safetensors": {"model.embed_tokens.weight": (32, 16)},
        "model-00002-of-00004.safetensors": {f"model.layers.0.{n}": s for n, s in SHAPES.items()},
        "model-00003-of-00004.safetensors": {f"model.layers.1.{n}": s for n, s in SHAPES.items()},
        "model-00004-of-00004.safetensors": {"model.norm.weight": (16,), "lm_head.weight": (32, 16)},
    }
    weight_map = {}
    for file, tensors in shards.items():
        save_file({name: rng.standard_normal(s).astype(np.float32) for name, s in tensors.items()}, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(OPTIONS))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    vocab = {"<unk>": 0, **{chr(97 + i): 1 + i for i in range(26)}}
    (directory / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "normalizer": None,
                "post_processor": None,
                "decoder": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "added_tokens": [],
                "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
            }
        )
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def python(code: str, hub: HubStandIn, cache: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {
        **environment(),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", code, *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_a_hub_id_fetches_only_the_shards_of_the_stage(model: Path, tokenizer: Path, tmp_path: Path) -> None:
    with HubStandIn(model, REPOSITORY) as hub:
        made = python(CREATE, hub, tmp_path / "creator", str(tokenizer), REPOSITORY, "")
        assert made.returncode == 0, made.stderr
        config = json.loads(made.stdout)
        assert sorted(hub.fetched) == ["config.json", "model.safetensors.index.json"], "the hub states the digests"
        assert config["weights_source"] == f"{REPOSITORY}@{COMMIT}"
        assert sorted(config["weights"]) == sorted(path.name for path in model.glob("*.safetensors"))

        hub.fetched.clear()
        other = {**config, "weights": {**config["weights"], "model-00003-of-00004.safetensors": "0" * 64}}
        wanted = [made.stdout, "", json.dumps(other), str(model), made.stdout, "owner/none"]
        loaded = python(LOAD, hub, tmp_path / "peer", *wanted)
        assert loaded.returncode == 0, loaded.stderr
        assert sorted(name for name in hub.fetched if name.startswith("model-")) == [
            "model-00003-of-00004.safetensors",
            "model-00004-of-00004.safetensors",
        ]
        values, refused, unknown = loaded.stdout.splitlines()
        layer = load_file(model / "model-00003-of-00004.safetensors")["model.layers.1.mlp.up_proj.weight"]
        version_id = load_file(model / "model-00004-of-00004.safetensors")["lm_head.weight"]
        assert [float(x) for x in values.split()] == pytest.approx([layer[3, 5], version_id[2, 1]])
        assert "is not the run's: model-00003-of-00004.safetensors has digest" in refused, "a directory is no better"
        assert unknown.startswith("model owner/none: no such directory here, and from the hub: ")
        assert "cache" not in unknown, "the hub has spoken"
    # The hub is gone: what a peer had fetched is enough for it, and who has everything creates the same run.
    again = python(LOAD, hub, tmp_path / "peer", made.stdout, "")
    assert again.stdout.splitlines() == [values], again.stderr
    assert f"taking commit {COMMIT} from the cache" in again.stderr
    cache = tmp_path / "offline" / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(model, cache / "snapshots" / COMMIT)
    branch = cache / "refs" / "main"
    branch.parent.mkdir()
    branch.write_text(COMMIT)
    steps = [REPOSITORY, "", f"{REPOSITORY}@{COMMIT}", "", REPOSITORY, str(branch)]
    offline = python(CREATE, hub, tmp_path / "offline", str(tokenizer), *steps)
    assert offline.stdout == 3 * made.stdout, offline.stderr
    assert not branch.exists(), "the last was created from a commit that no branch names"
    nowhere = python(CREATE, hub, tmp_path / "empty", str(tokenizer), REPOSITORY, "")
    assert "it is not in the cache" in nowhere.stderr
    assert os.environ.get("HF_ENDPOINT") is None, "only the processes above played with it"
