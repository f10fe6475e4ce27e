"""A data set on the hub is fetched, one split of it, and trained with one command; what came once is enough for the next time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from swarm.testing.processes import environment, launcher
from tests.integration.hub_stand_in import COMMIT, HubStandIn

REPOSITORY = "owner/small-set"
OPEN = """
import sys
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.datasets import open_dataset
from swarm.feed.tokenizers import ByteTokenizer
config = RunConfig(sequence_length=4, eval_fraction=0.0, eval_samples=0)
for source in sys.argv[1:]:
    try:
        tokens = open_dataset(config, source, None, ByteTokenizer()).train._tokens_N
        print(bytes(tokens).decode().replace("\\n\\n", " "))
    except ConfigError as error:
        print(error)
"""


def write(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def hub_environment(hub: HubStandIn, home: Path) -> dict[str, str]:
    told = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**environment(), **told, "XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}


def opened(hub: HubStandIn, home: Path, *sources: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", OPEN, *sources]
    done = subprocess.run(command, env=hub_environment(hub, home), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_data_set_of_the_hub_is_trained_with_one_command(tmp_path: Path) -> None:
    data, home, metrics = tmp_path / "set", tmp_path / "home", tmp_path / "metrics.jsonl"
    write(data / "data" / "train-00000-of-00002.jsonl", *["the first part of it"] * 30)
    write(data / "data" / "train-00001-of-00002.jsonl", *["the second part of it"] * 30)
    write(data / "data" / "test-00000-of-00001.jsonl", "held out")
    (data / "README.md").write_text("a card that nobody learns")
    with HubStandIn(data, REPOSITORY, kind="datasets") as hub:
        sizes = ("--stages", 1, "--peers-per-stage", 1, "--steps", 2, "--target-batch-size", 8, "--eval-samples", 4)
        command = launcher("local", "--data", f"hub:{REPOSITORY}@main#train", *sizes, "--metrics", metrics)
        done = subprocess.run(
            command, env=hub_environment(hub, home), capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert sorted(hub.fetched) == [f"data/train-{number:05d}-of-00002.jsonl" for number in range(2)]
    assert len(metrics.read_text().splitlines()) == 2
    assert "60 rows of text" in done.stdout + done.stderr
    assert "left out: data/test-00000-of-00001.jsonl" in done.stdout + done.stderr
    assert f"hub:{REPOSITORY}@{COMMIT} names the same for ever" in done.stdout + done.stderr
    [entry] = [path for path in (home / "swarm" / "tokens").iterdir() if path.is_dir()]
    assert (entry / "tokens").stat().st_size > 1000, "the tokens of the run are kept once"


def test_splits_configurations_and_what_is_wrong_with_a_name(tmp_path: Path) -> None:
    data, home = tmp_path / "set", tmp_path / "home"
    write(data / "train.jsonl", "training")
    write(data / "test.jsonl", "testing it")
    write(data / "odd" / "a.jsonl", "first odd one")
    write(data / "odd" / "b.jsonl", "second odd one")
    hub_name = f"hub:{REPOSITORY}"
    with HubStandIn(data, REPOSITORY, kind="datasets") as hub:
        asked = (
            hub_name,
            f"{hub_name}#test",
            f"{hub_name}@{COMMIT}#validation",
            "hub:owner/none",
            "hub:nobody/x/y",
            f"{hub_name}#a/b",
        )
        training, testing, missing, unknown, no_name, no_config = opened(hub, home, *asked)
    assert (training, testing) == ("training", "testing it")
    assert missing.endswith("holds no split 'validation'; those that file names tell: test, train")
    assert unknown.startswith("data hub:owner/none: from the hub: ")
    assert no_name == "data hub:nobody/x/y: a data set on the hub is hub:owner/name, with @revision and #split if wanted"
    assert no_config.endswith("its card lists no configuration")
    # The hub is gone.
    assert opened(hub, home, f"{hub_name}@{COMMIT}#test") == ["testing it"]
    assert "it is not in the cache" in opened(hub, tmp_path / "empty", hub_name)[0]
    odd = [{"split": "train", "path": ["odd/a*"]}, {"split": "test", "path": "odd/b.jsonl"}]
    card = {"configs": [{"config_name": "odd", "data_files": odd}, {"config_name": "even", "data_files": "t*.jsonl"}]}
    with HubStandIn(data, REPOSITORY, kind="datasets", card=card) as hub:
        asked = (f"{hub_name}#odd/train", f"{hub_name}#odd/test", hub_name, f"{hub_name}#odd/dev", f"{hub_name}#even/train")
        first, second, which, split, pattern = opened(hub, home, *asked)
    assert (first, second) == ("first odd one", "second odd one")
    assert which.endswith("its configurations are odd, even; name one: #CONFIG/SPLIT")
    assert split.endswith("holds no file of the split 'dev'; its card lists test, train: name one with #SPLIT")
    assert pattern == "testing it training"
