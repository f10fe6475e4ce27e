"""What nobody says of a new run follows from the model that it begins with, and its data; a run that has begun keeps its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.arguments import EXIT_USAGE
from launch.local import main, parse, resolve_plan
from launch.run.composing import _created
from launch.run.kept_run import KeptRun
from launch.run.run_files import create_run, read_run_file, require_same
from launch.run.step_lines import facts_text
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.feed import open_feed
from tests.unit.feed.chat_tokenizer import write_chat_tokenizer

DEMONSTRATION = RunConfig()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_chat_tokenizer(directory)
    config = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 96}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": np.zeros((4, 4), np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """100 examples of one window each, if windows are as short as they are."""
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": "what is", "completion": "paris"}\n' * 100)
    return path


def created(*argv: object) -> tuple[RunConfig, str]:
    """The run of a command line of `launch_local`, and what that says of the values it took."""
    config, plan = resolve_plan(parse([str(word) for word in argv]))
    run = create_run(config, plan.paths, left_open=plan.left_open)
    return run, plan.left_open.told(run)


def chosen(run: RunConfig) -> tuple[int, int, int, float]:
    return run.total_steps, run.sequence_length, run.warmup_steps, run.learning_rate


def test_a_fine_tuned_model_is_trained_for_an_epoch_at_its_usual_rate(model: Path, chat: Path) -> None:
    batch = ("--packing", "false", "--target-batch-size", 8, "--eval-fraction", 0.1, "--optimizer", "adamw")
    run, told = created("--model", model, "--data", chat, *batch)
    assert chosen(run) == (12, 96, 1, 2e-5), "90 samples, 8 a step; no more tokens than the model takes"
    assert told == ("not said, and so taken: 1 epoch (total_steps 12), sequence_length 96, warmup_steps 1, learning_rate 2e-05")
    run, told = created("--model", model, "--data", chat, *batch, "--lora", "r=2", "--epochs", 4.5, "--warmup-steps", 0)
    assert chosen(run) == (51, 96, 0, 2e-4)
    assert told == "not said, and so taken: sequence_length 96, learning_rate 0.0002"
    given = ("--steps", 100, "--sequence-length", 32, "--learning-rate", "1e-5")
    run, told = created("--model", model, "--data", chat, *batch, *given)
    assert chosen(run) == (100, 32, 3, 1e-5)
    assert told == "not said, and so taken: warmup_steps 3"


def test_a_long_model_is_trained_on_1024_tokens_and_a_nested_limit_holds(model: Path, chat: Path) -> None:
    for config, expected in (({"max_position_embeddings": 131072}, 1024), ({"text_config": {"n_positions": 80}}, 80), ({}, 1024)):
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **config}))
        resolved, _ = resolve_plan(parse(["--model", str(model), "--data", str(chat)]))
        assert resolved.sequence_length == expected


def test_what_begins_from_random_values_or_has_no_data_keeps_the_values_of_the_demonstration(model: Path, chat: Path) -> None:
    for words in ((), ("--data", chat), ("--model", model)):
        resolved, plan = resolve_plan(parse([str(word) for word in words]))
        assert chosen(resolved) == chosen(DEMONSTRATION)
        assert plan.left_open.told(resolved) == ""
    run, told = created("--data", chat, "--epochs", 0.5, "--target-batch-size", 8, "--packing", "false")
    assert (run.total_steps, run.warmup_steps, told) == (6, DEMONSTRATION.warmup_steps, "")


def test_an_epoch_counts_the_samples_that_a_model_gets_which_lets_examples_see_each_other(chat: Path) -> None:
    words = ("--model", "causal-lm", "--data", chat, "--epochs", 1, "--target-batch-size", 8, "--sequence-length", 64)
    assert created(*words, "--set", "model_options.model_type=qwen3_next")[0].total_steps == 12
    assert created(*words, "--set", "model_options.model_type=llama")[0].total_steps == 3


def test_warm_up_counts_what_the_schedule_counts(model: Path, chat: Path) -> None:
    words = ("--model", model, "--data", chat, "--target-batch-size", 160, "--steps", 10)
    assert created(*words)[0].warmup_steps == 1
    assert created(*words, "--mode", "local", "--inner-steps", 20)[0].warmup_steps == 6


def test_a_rate_far_above_the_usual_is_warned_of(model: Path, chat: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ("--model", model, "--data", chat, "--steps", 9)
    created(*words, "--learning-rate", "2e-4")
    created(*words, "--learning-rate", "2e-3", "--lora", "r=2")
    created(*words, "--optimizer", "lamb")
    assert not [line for line in caplog.messages if "learning_rate" in line]
    created(*words, "--learning-rate", "3e-3")
    assert "learning_rate 0.003 is 150 times what such a model is usually trained with, 2e-05" in caplog.messages


def test_steps_and_epochs_together_are_refused(
    model: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--epochs", "2", "--steps", "9"]) == EXIT_USAGE
    assert "--epochs: --steps says how long the run is too; give one of them" in capsys.readouterr().err
    run = tmp_path / "run.toml"
    run.write_text(f'model = "{model}"\ndata = "{chat}"\nepochs = 2\ntotal_steps = 9\n')
    with pytest.raises(ConfigError, match=r"run\.toml: epochs: total_steps says how long the run is too"):
        created("--run", run)
    run.write_text("epochs = 0\n")
    with pytest.raises(ConfigError, match=r"run\.toml: epochs: 0 is no number above 0"):
        created("--run", run)
    run.write_text(f'model = "{model}"\ndata = "{chat}"\nepochs = 2\npacking = false\ntarget_batch_size = 8\n')
    assert created("--run", run)[0].total_steps == 23
    assert created("--run", run, "--steps", 7)[0].total_steps == 7, "the command line is over the file"
    assert created("--run", run, "--epochs", 1)[0].total_steps == 12


def test_a_run_that_has_begun_goes_on_as_recorded(model: Path, chat: Path, tmp_path: Path) -> None:
    """As one from a time with other defaults: the same file, and the same command line, are the same run."""
    words = ("--model", model, "--data", chat, "--packing", "false", "--target-batch-size", 8)
    old = {"steps": 60, "sequence-length": 64, "warmup-steps": 5, "learning-rate": 3e-3, "no-decay": ""}
    stored, _ = created(*words, *(word for name, value in old.items() for word in (f"--{name}", value)))
    state, run_file = tmp_path / "state", tmp_path / "run.toml"
    state.mkdir()
    (state / "run.json").write_bytes(stored.to_bytes())
    run_file.write_text(f'model = "{model}"\ndata = "{chat}"\npacking = false\ntarget_batch_size = 8\n')
    for again in (("--data", chat, "--model", model), ("--run", run_file), words):
        run, told = created("--state-dir", state, *again)
        require_same(stored.to_bytes(), run, state)
        assert told == ""
    kept = KeptRun(config=stored.to_bytes().decode(), port=4000)
    file = read_run_file(run_file)
    assert _created(file, {}, file.paths, kept) == stored, "and a backbone that is started again serves the same run"
    run_file.write_text(run_file.read_text() + "seed = 7\n")
    file = read_run_file(run_file)
    assert chosen(_created(file, {}, file.paths, kept)) == (12, 96, 1, 2e-5), "another run has nothing of it"


def test_epochs_go_on_as_the_same_number_of_steps(model: Path, chat: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--data", chat, "--packing", "false", "--target-batch-size", 8, "--epochs", 2)
    run, _ = created(*words)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run.json").write_bytes(run.to_bytes())
    require_same(run.to_bytes(), created(*words, "--state-dir", tmp_path / "state")[0], tmp_path)


def test_the_data_are_told_in_one_line(chat: Path) -> None:
    config = RunConfig(sequence_length=16, total_steps=9, target_batch_size=8, packing=False, eval_samples=4)
    feed = open_feed(config, str(chat), None, None)
    assert facts_text(feed.facts, config) == (
        "data: 100 rows, 0 left out; 90 windows to train on, 10 held out; 1,170 tokens, 630 trained; 0 examples cut, 0 left out; "
        "9 steps make 0.8 epochs"
    )
    assert facts_text(dataclasses.replace(feed.facts, rows={}, tokens=None), config) == (
        "data: 90 windows to train on, 10 held out; 9 steps make 0.8 epochs"
    )
