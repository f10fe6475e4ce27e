"""One configuration from preset, file and command line, in this order of precedence."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from launch import recut
from launch.local import parse, resolve_plan
from launch.run.averaging_notes import warnings
from launch.run.models import copy_tokenizer, vocab_size_of
from launch.run.run_files import DataPaths, build_config, create_run, read_run_file, require_same, still_needed
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.feed.feed import open_feed
from swarm.feed.tokenizers import DirectoryTokenizer
from tests.unit.feed.chat_tokenizer import TEMPLATE, write_chat_tokenizer


def resolve(*argv: str):
    return resolve_plan(parse(list(argv)))


def test_without_anything_the_run_has_the_defaults() -> None:
    config, plan = resolve()
    assert config == RunConfig()
    assert (plan.peers_per_stage, plan.trainers) == (2, 1)


def test_the_command_line_overrides_the_file_which_overrides_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('num_stages = 2\nseed = 5\n[timing]\npreset = "lan"\nstall_s = 7\n[local]\ntrainers = 3\n')
    config, plan = resolve("--run", str(path), "--stages", "4", "--set", "timing.lease_s=9", "--peers-per-stage", "1")
    assert (config.num_stages, config.seed, config.total_steps) == (4, 5, RunConfig().total_steps)
    assert (config.timing.stall_s, config.timing.lease_s, config.timing.connect_s) == (7.0, 9.0, 3.0)
    assert (plan.peers_per_stage, plan.trainers) == (1, 3)


@pytest.mark.parametrize(("value", "message"), [("0", "0 is not a whole number"), ("1025", "1025 is more than 1024")])
def test_a_number_of_processes_that_no_machine_starts_is_refused(tmp_path: Path, value: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[local]\npeers_per_stage = {value}\n")
    with pytest.raises(ConfigError, match=rf"run\.toml: local\.peers_per_stage: {message}"):
        resolve("--run", str(path))


def test_a_timing_preset_can_be_named_and_refined() -> None:
    config, _ = resolve("--timing", "wan", "--set", "timing.stall_s=30")
    assert (config.timing.stall_s, config.timing.connect_s) == (30.0, 10.0)


def test_fields_are_spelt_with_dashes_or_underscores() -> None:
    config, _ = resolve("--learning_rate", "1e-2", "--target-batch-size=32", "--steps", "7")
    assert (config.learning_rate, config.target_batch_size, config.total_steps) == (1e-2, 32, 7)


def test_model_options_merge_with_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model_options]\nhidden_size = 32\nnum_hidden_layers = 4\n")
    config, _ = resolve("--run", str(path), "--set", "model_options.hidden_size=48")
    assert config.model_options == {"hidden_size": 48, "num_hidden_layers": 4}


def test_paths_are_relative_to_the_file_and_no_part_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    path = tmp_path / "run.toml"
    path.write_text('data = "text.txt"\nsequence_length = 8\neval_samples = 4\n')
    config, plan = resolve("--run", str(path))
    assert plan.paths.data == str(tmp_path / "text.txt")
    created = create_run(config, plan.paths)
    assert len(created.data_digest) == 64
    assert str(tmp_path) not in created.to_bytes().decode()


def test_data_other_than_the_run_states_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'data_digest = "{"0" * 64}"\n')
    config, plan = resolve("--run", str(path))
    with pytest.raises(ConfigError, match=r"data_digest: .*: name the run's data with --data"):
        create_run(config, plan.paths)


@pytest.mark.parametrize(
    ("fields", "vocab_size"),
    [
        ({"model": "llama-tiny"}, 256),
        ({"model": "causal-lm", "model_options": {"model_type": "llama", "vocab_size": 99}}, 99),
        ({"model": "pretrained", "model_options": {"text_config": {"vocab_size": 7}}}, 7),
        ({"model": "causal-lm", "model_options": {"model_type": "llama"}}, None),
        ({"model": "package.module:factory"}, None),
    ],
)
def test_how_many_tokens_a_model_knows_is_told_without_building_it(fields: dict[str, object], vocab_size: int | None) -> None:
    assert vocab_size_of(RunConfig.model_validate(fields)) == vocab_size


def test_a_run_whose_data_has_tokens_that_its_model_has_not_is_refused_by_its_creator() -> None:
    config = RunConfig(model="causal-lm", model_options={"model_type": "llama", "vocab_size": 100})
    with pytest.raises(ConfigError, match="and the model has tokens 0 to 99"):
        create_run(config, DataPaths())


def test_a_tokenizer_larger_than_the_model_is_refused_only_for_tokens_that_the_data_has(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / "tokenizer")
    tokenizer = DirectoryTokenizer(str(tmp_path / "tokenizer"))
    known = tokenizer.vocab_size - 1
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("abcd " * 40)
    other.write_text(text.read_text() + tokenizer._tokenizer.decode([known]))
    config = RunConfig(
        model="causal-lm", model_options={"model_type": "llama", "vocab_size": known}, sequence_length=8, eval_samples=0
    )
    run = create_run(config, DataPaths(data=str(text), tokenizer=str(tmp_path / "tokenizer")))
    assert run.model_options["vocab_size"] == known
    with pytest.raises(ConfigError, match=rf"data other\.txt: holds token {known}, and the model has tokens 0 to {known - 1}"):
        create_run(config, DataPaths(data=str(other), tokenizer=str(tmp_path / "tokenizer")))
    unsaid = config.model_copy(update={"model_options": {"model_type": "llama"}})
    run = create_run(unsaid, DataPaths(data=str(other), tokenizer=str(tmp_path / "tokenizer")))
    assert run.model_options["vocab_size"] == tokenizer.vocab_size, "a model that is made here takes the tokenizer's"


def test_a_template_that_writes_the_date_is_told_the_day_of_the_runs_creation_for_ever(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / "tokenizer", template="[{{ strftime_now('%d %b %Y %H:%M') }}]" + TEMPLATE)
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    paths = DataPaths(data=str(chat), tokenizer=str(tmp_path / "tokenizer"))
    new_year, next_day = datetime.date(2026, 12, 31), datetime.date(2027, 1, 1)
    config = RunConfig(sequence_length=40, eval_samples=0, micro_batch_size=1, target_batch_size=1)
    run = create_run(config, paths, today=new_year)
    assert run.template_date == "2026-12-31"
    again = create_run(run, paths, today=next_day)
    assert again.to_bytes() == run.to_bytes(), "the run goes on after midnight"
    feed = open_feed(run, paths.data, None, paths.tokenizer)  # as a trainer that joins does, whatever its clock says
    tokens = feed.batch(Ticket(0, 0)).inputs["input_ids"][0]
    text = DirectoryTokenizer(str(tmp_path / "tokenizer"))._tokenizer.decode(tokens.tolist())
    assert text.startswith("[31 Dec 2026 00:00]<|user|>one")
    assert create_run(config, paths, today=next_day).data_digest != run.data_digest
    given = create_run(config.model_copy(update={"template_date": "2026-12-31"}), paths, today=next_day)
    assert given.to_bytes() == run.to_bytes(), "who gives the date gets the same run on any day"


def test_a_run_whose_template_asks_for_no_date_has_none(tmp_path: Path) -> None:
    assert create_run(RunConfig(), DataPaths(), today=datetime.date(2026, 12, 31)).template_date == ""
    with pytest.raises(ConfigError, match="template_date: "):
        resolve("--template-date", "yesterday")


def test_a_state_directory_belongs_to_one_run(tmp_path: Path) -> None:
    config = RunConfig()
    (tmp_path / "run.json").write_bytes(config.to_bytes())
    require_same(config.to_bytes(), config, tmp_path)
    with pytest.raises(ConfigError, match="seed"):
        require_same(config.to_bytes(), RunConfig(seed=1), tmp_path)
    indented = json.dumps(json.loads(config.to_bytes()), indent=2).encode()
    with pytest.raises(ConfigError, match="was changed by hand: put the file back as it was"):
        require_same(indented, config, tmp_path)
    older = {key: value for key, value in json.loads(config.to_bytes()).items() if key != "packing"}
    with pytest.raises(ConfigError, match="a run of another version"):
        require_same(json.dumps(older).encode(), config, tmp_path)


def test_a_state_directory_alone_names_its_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(RunConfig(seed=9).to_bytes())
    config, plan = resolve("--state-dir", str(tmp_path))
    assert config.seed == 9
    assert plan.stored_config == RunConfig(seed=9).to_bytes()


def test_what_is_given_for_a_run_that_is_resumed_is_held_against_that_run(tmp_path: Path) -> None:
    stored = RunConfig(mode="local", inner_batch_size=8, average_compression="cocktail", learning_rate=1e-2)
    (tmp_path / "run.json").write_bytes(stored.to_bytes())
    config, plan = resolve("--state-dir", str(tmp_path), "--cocktail-top", "0.2", "--learning-rate", "1e-2")
    assert config == stored, "the same options again, or some of them, are the same run"
    config, plan = resolve("--state-dir", str(tmp_path), "--outer-learning-rate", "0.5")
    assert plan.stored_config is not None
    with pytest.raises(ConfigError, match=r"holds another run \(outer_learning_rate differ\).*recut_run"):
        require_same(plan.stored_config, config, tmp_path)
    with pytest.raises(ConfigError, match=r"run\.json with command line: average_compression 'cocktail' sends differences of"):
        resolve("--state-dir", str(tmp_path), "--mode", "sync", "--inner-batch-size", "0")


def test_options_of_local_runs_that_nobody_gave_are_the_published_ones_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def lines_of(*argv: str) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "launch.run.run_files"):
            config, plan = resolve("--mode", "local", *argv)
            created = create_run(config, plan.paths)
            create_run(created, plan.paths)
        assert config.outer_learning_rate == created.outer_learning_rate
        return [x.getMessage() for x in caplog.records if "mode local" in x.getMessage() or x.levelname == "WARNING"]

    assert lines_of("--average-compression", "cocktail") == [
        "mode local, as CocktailSGD was published: inner_steps 1, outer_learning_rate 1, outer_momentum 0, fragments 10"
    ]
    assert lines_of("--average-compression", "cocktail", "--fragments", "2", "--outer-learning-rate", "0.9") == [
        "mode local, as CocktailSGD was published: inner_steps 1, outer_momentum 0"
    ]
    assert lines_of("--inner-steps", "8") == [
        "mode local, as DiLoCo was published: outer_learning_rate 0.7, outer_momentum 0.9, fragments 1"
    ]
    given = ("--inner-steps", "8", "--outer-learning-rate", "0.7", "--outer-momentum", "0.9", "--fragments", "1")
    assert lines_of(*given) == []


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ({"inner_steps": 1}, "1 inner steps are too few for outer_momentum 0.9: with 1 the loss"),
        ({"inner_steps": 4, "outer_momentum": 0.5}, "4 inner steps are too few for outer_momentum 0.5"),
        ({"inner_batch_size": 32}, "at most 2 inner steps are"),
        ({"inner_batch_size": 8, "min_peers_per_stage": 2}, "at most 4 inner steps are"),
        ({"inner_batch_size": 8}, ""),
        ({"inner_steps": 8}, ""),
        ({"inner_steps": 1, "outer_momentum": 0.0}, ""),
        ({"average_compression": "cocktail"}, ""),
        ({"mode": "sync", "average_compression": "uniform8"}, "average_compression 'uniform8' loses 36 % of a gradient's norm"),
        ({"mode": "sync", "average_compression": "powersgd"}, ""),
    ],
)
def test_what_is_known_to_cost_loss_is_warned_of(options: dict[str, object], begin: str) -> None:
    said = warnings(RunConfig(**{"mode": "local", **options}))  # type: ignore[arg-type]
    assert [line[: len(begin)] for line in said] == ([begin] if begin else [])
    assert all("\n" not in line for line in said)


def test_a_run_that_goes_on_keeps_what_it_recorded_and_one_that_is_cut_anew_follows_its_new_compressor(tmp_path: Path) -> None:
    """A run of before says one fragment, 0.7 and 0.9, whatever its compressor; a synchronous one says so too, and used none."""
    before = {"mode": "local", "outer_learning_rate": 0.7, "outer_momentum": 0.9, "fragments": 1, "inner_batch_size": 8}
    old = RunConfig(**before, average_compression="cocktail")  # type: ignore[arg-type]
    assert b"inner_steps" not in old.to_bytes(), "its bytes are those of before there was such an option"
    (tmp_path / "run.json").write_bytes(old.to_bytes())
    config, plan = resolve("--state-dir", str(tmp_path), "--mode", "local", "--average-compression", "cocktail")
    assert config == old
    assert plan.stored_config is not None
    require_same(plan.stored_config, config, tmp_path)

    def cut(run: RunConfig, *argv: str) -> tuple[int, float, float, int]:
        new = recut.new_config(run, recut.parse(["--checkpoints", str(tmp_path), "--out", str(tmp_path / "new"), *argv]))
        return new.inner_steps, new.outer_learning_rate, new.outer_momentum, new.fragments

    assert cut(RunConfig(), "--mode", "local", "--average-compression", "cocktail") == (1, 1.0, 0.0, 10)
    assert cut(old, "--seed", "0", "--learning-rate", "0.1") == (0, 0.7, 0.9, 1)
    chosen = RunConfig(mode="local", inner_steps=8, outer_learning_rate=0.5, outer_momentum=0.5)
    assert cut(chosen, "--average-compression", "cocktail") == (8, 0.5, 0.5, 10)


def test_what_a_model_is_made_of_is_kept_where_the_run_that_is_resumed_is_named_again(tmp_path: Path) -> None:
    stored = RunConfig(model="llama-tiny", model_options={"hidden_size": 32}, seed=4)
    (tmp_path / "run.json").write_bytes(stored.to_bytes())
    config, _ = resolve("--state-dir", str(tmp_path), "--model", "llama-tiny", "--seed", "4")
    assert config == stored
    config, _ = resolve("--state-dir", str(tmp_path), "--model", "gpt2-tiny")
    assert config.model_options == {}


def test_what_is_given_for_a_run_that_is_cut_anew_is_held_against_that_run(tmp_path: Path) -> None:
    def options(*argv: str):
        return recut.parse(["--checkpoints", str(tmp_path), "--out", str(tmp_path / "new"), *argv])

    old = RunConfig(average_compression="powersgd", powersgd_rank=8)
    assert recut.new_config(old, options("--powersgd-rank", "2")).average_compression == "powersgd"
    assert recut.new_config(old, options("--average-compression", "none")).powersgd_rank == 8, "inherited: it harms nobody"
    with pytest.raises(ConfigError, match="outer_momentum belongs to mode 'local', and mode is 'sync'"):
        recut.new_config(old, options("--outer-momentum", "0.5"))


def test_a_run_read_back_keeps_its_bytes(tmp_path: Path) -> None:
    stored = RunConfig(seed=3).to_bytes() + b"\n"
    (tmp_path / "run.json").write_bytes(stored)
    assert read_run_file(tmp_path / "run.json").config_bytes == stored


def test_a_run_goes_on_with_the_tokenizer_that_it_kept_and_asks_for_its_data(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("what is paris madrid " * 400)
    paths = DataPaths(data=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "model"))
    run = create_run(RunConfig(sequence_length=8, eval_samples=4), paths)
    state = tmp_path / "state"
    state.mkdir()
    (state / "run.json").write_bytes(run.to_bytes())
    assert still_needed(run, state) == ["--data", "PATH", "--tokenizer", "DIR"]
    copy_tokenizer(tmp_path / "model", None, state / "tokenizer")
    assert still_needed(run, state) == ["--data", "PATH"]

    config, plan = resolve("--state-dir", str(state), "--data", paths.data)
    assert plan.paths == DataPaths(data=paths.data, tokenizer=str(state / "tokenizer"))
    require_same(run.to_bytes(), create_run(config, plan.paths), state)
    copy_tokenizer(state / "tokenizer", None, state / "tokenizer")  # as `launch_local` keeps what it was given

    config, plan = resolve("--state-dir", str(state))
    with pytest.raises(ConfigError, match=r"the run's data is text\.txt: name it with --data"):
        create_run(config, plan.paths)


def test_what_the_seed_does_not_make_is_needed_again(tmp_path: Path) -> None:
    assert still_needed(RunConfig(), tmp_path) == []
    assert still_needed(RunConfig(model="pretrained"), tmp_path) == []
    assert still_needed(RunConfig(model="pretrained", frozen=("a.*",)), tmp_path) == ["--model", "DIR"]


QWEN3_NEXT = ("--model", "causal-lm", "--set", "model_options.model_type=qwen3_next")


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Ten of them, of 20 tokens each (as bytes, with the separator)."""
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": "0123456789", "completion": "01234567"}\n' * 10)
    return path


def test_examples_share_samples_where_the_model_keeps_them_apart(conversations: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, plan = resolve("--data", str(conversations), "--sequence-length", "64", "--eval-samples", "0")
    assert create_run(config, plan.paths).packing
    assert not caplog.messages


def test_where_examples_would_see_each_other_each_has_a_sample_which_is_told_with_what_it_costs(
    conversations: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config, plan = resolve(
        *QWEN3_NEXT, "--data", str(conversations), "--sequence-length", "64", "--eval-samples", "0", "--eval-fraction", "0"
    )
    run = create_run(config, plan.paths)
    assert not run.packing
    (line,) = caplog.messages
    assert line == (
        "no examples share a sample: qwen3_next has a state that goes on from one token to the next. 10 examples take 10 "
        "samples, of which 30% are tokens and the rest is padding, instead of 4 with 74%"
    )
    state = tmp_path / "state"
    state.mkdir()
    (state / "run.json").write_bytes(run.to_bytes())
    again, plan = resolve("--state-dir", str(state), "--data", str(conversations))
    assert create_run(again, plan.paths) == run, "the run that goes on is the same"
    assert len(caplog.messages) == 1


def test_examples_that_would_see_each_other_share_no_sample_even_if_somebody_asks(conversations: Path) -> None:
    config, plan = resolve(*QWEN3_NEXT, "--data", str(conversations), "--packing", "true")
    with pytest.raises(ConfigError, match=r"packing: examples .* would see each other: qwen3_next has a state .* say false"):
        create_run(config, plan.paths)
    config, plan = resolve(*QWEN3_NEXT, "--packing", "true")
    assert create_run(config, plan.paths).packing, "text has no examples"


def test_the_owner_of_a_model_says_whether_it_keeps_examples_apart(conversations: Path) -> None:
    for words, expected in (((), False), (("--packing", "true"), True), (("--packing", "false"), False)):
        config, plan = resolve("--model", "package.module:factory", "--data", str(conversations), *words)
        assert create_run(config, plan.paths).packing is expected


def test_a_new_run_says_what_does_not_decay_and_an_old_one_goes_on_as_it_was(tmp_path: Path) -> None:
    config, plan = resolve("--eval-samples", "4")
    assert create_run(config, plan.paths).no_decay == ("norms", "biases")
    config, plan = resolve("--eval-samples", "4", "--no-decay", "biases,*.embed_tokens.*")
    assert create_run(config, plan.paths).no_decay == ("biases", "*.embed_tokens.*")
    config, plan = resolve("--eval-samples", "4", "--no-decay", "")
    everything = create_run(config, plan.paths)
    assert everything.no_decay == ()
    # As a run from before the choice wrote it: the same bytes, and so the same run.
    kept = tmp_path / "run.json"
    kept.write_bytes(everything.to_bytes())
    assert b"no_decay" not in kept.read_bytes()
    old = read_run_file(kept)
    assert old.config_bytes == kept.read_bytes()
    assert create_run(build_config(old, {}), plan.paths).to_bytes() == kept.read_bytes()
    require_same(kept.read_bytes(), create_run(build_config(old, {}), plan.paths), tmp_path)
