"""Configuration: errors are one line that names the field, presets fill in, and any change is another run."""

from __future__ import annotations

import json

import pytest

from swarm.base.config import TIMING_PRESETS, RunConfig, Timing, parse_config, parse_config_bytes, run_id_of
from swarm.base.errors import ConfigError

#: Another valid value for every field; a new field must be added here, so that nobody forgets that it changes the run.
OTHER_VALUES: dict[str, object] = {
    "name": "other",
    "model": "gpt2-tiny",
    "model_options": {"hidden_size": 8},
    "weights": {"a": "b"},
    "weights_source": "a/b@c",
    "frozen": ["a.*"],
    "lora": {"r": 4},
    "num_stages": 4,
    "sequence_length": 65,
    "micro_batch_size": 4,
    "target_batch_size": 128,
    "total_steps": 61,
    "optimizer": "adamw8bit",
    "learning_rate": 1e-3,
    "beta1": 0.8,
    "beta2": 0.9,
    "epsilon": 1e-7,
    "weight_decay": 0.1,
    "no_decay": ("norms",),
    "max_grad_norm": 2.0,
    "lr_schedule": "linear",
    "warmup_steps": 6,
    "min_lr_ratio": 0.2,
    "precision": "bf16",
    "compression": "none",
    "average_compression": "int8",
    "seed": 1,
    "delay_steps": 1,
    "dataset": "other",
    "data_digest": "1",
    "tokenizer_digest": "1",
    "template_date": "2026-01-31",
    "packing": False,
    "eval_fraction": 0.2,
    "eval_every": 1,
    "eval_samples": 65,
    "checkpoint_every": 21,
    "checkpoint_copies": 3,
    "checkpoint_keep": 3,
    "min_peers_per_stage": 2,
    "powersgd_rank": 2,
    "cocktail_top": 0.1,
    "max_group": 8,
    "mode": "local",
    "inner_batch_size": 8,
    "inner_steps": 2,
    "aggregation": "centered_clip",
    "clip_radius": 0.5,
    "outer_learning_rate": 0.5,
    "outer_momentum": 0.5,
    "fragments": 2,
    "auxiliaries": 1,
}
_LOCAL: dict[str, object] = {"mode": "local", "inner_batch_size": 8}
#: What a field needs beside it.
TOGETHER: dict[str, dict[str, object]] = {
    "mode": {"inner_batch_size": 8},
    "inner_steps": {"mode": "local"},
    "inner_batch_size": {"mode": "local"},
    "fragments": _LOCAL,
    "outer_learning_rate": _LOCAL,
    "outer_momentum": _LOCAL,
    "cocktail_top": {**_LOCAL, "average_compression": "cocktail"},
    "powersgd_rank": {"average_compression": "powersgd"},
    "clip_radius": {"aggregation": "centered_clip"},
}


def message_of(data: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(data, where="run.toml")
    return str(raised.value)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"num_stages": "three"}, "num_stages"),
        ({"num_stages": 2.5}, "num_stages"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"beta2": 1.0}, "beta2"),
        ({"precision": "fp8"}, "precision"),
        ({"compression": "4bit"}, "compression"),
        ({"average_compression": "4bit"}, "average_compression"),
        ({"average_compression": "8bit", "precision": "fp64"}, "average_compression '8bit' excludes precision 'fp64'"),
        ({"optimizer": "sgd"}, "optimizer: Input should be 'adamw', 'adamw8bit' or 'lamb'"),
        ({"optimizer": "adamw8bit", "precision": "fp64"}, "optimizer 'adamw8bit' excludes precision 'fp64'"),
        ({"lr_schedule": "step"}, "lr_schedule"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"delay_steps": 2}, "delay_steps"),
        ({"name": ""}, "name"),
        ({"model_options": [1]}, "model_options"),
        ({"timing": {"stall_s": 0}}, "timing.stall_s"),
        ({"timing": {"stall": 1}}, "timing.stall"),
        ({"timing": 5}, "timing"),
        ({"num_stage": 3}, "num_stage"),
        ({"target_batch_size": 10, "micro_batch_size": 4}, "target_batch_size"),
        ({"target_batch_size": 4, "micro_batch_size": 8}, "target_batch_size"),
        ({"target_batch_size": 10**12}, "target_batch_size 1000000000000 is more than 65536 micro-batches of 8"),
        ({"learning_rate": 1e3}, "learning_rate: Input should be less than or equal to 10"),
        ({"learning_rate": 1e-30}, "learning_rate"),
        ({"epsilon": 1e3}, "epsilon"),
        ({"weight_decay": 1e6}, "weight_decay"),
        ({"max_grad_norm": 1e-30}, "max_grad_norm"),
        ({"average_compression": "cocktail", "cocktail_top": 1e-30, **_LOCAL}, "cocktail_top"),
        ({"aggregation": "centered_clip", "clip_radius": 1e30}, "clip_radius"),
        ({"outer_learning_rate": 1e30, **_LOCAL}, "outer_learning_rate"),
        ({"sequence_length": 10**12}, "sequence_length"),
        ({"micro_batch_size": 10**12}, "micro_batch_size"),
        ({"total_steps": 10**15}, "total_steps"),
        ({"min_peers_per_stage": 10**6}, "min_peers_per_stage"),
        ({"timing": {"record_ttl_s": 1e6}}, "timing.record_ttl_s"),
        ({"timing": {"connect_s": 1e-9}}, "timing.connect_s"),
        ({"timing": {"stall_s": 0.6}}, "timing: stall_s 0.6 is below two heartbeats of 0.5 s (heartbeat_s)"),
    ],
)
def test_an_error_is_one_line_and_names_where_and_which_field(data: dict[str, object], field: str) -> None:
    message = message_of(data)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    assert field in message.removeprefix("run.toml: ")
    assert len(message) < 200


def test_an_unknown_key_is_called_unknown() -> None:
    assert message_of({"batch_size": 8}) == "run.toml: unknown key 'batch_size'"


def test_of_several_mistakes_one_is_named() -> None:
    message = message_of({"num_stages": 0, "seed": -1})
    assert "\n" not in message
    assert "num_stages" in message


def test_a_mistake_in_the_batch_sizes_says_both() -> None:
    message = message_of({"target_batch_size": 10, "micro_batch_size": 4})
    assert message == "run.toml: target_batch_size 10 is not a multiple of micro_batch_size 4"


@pytest.mark.parametrize("preset", list(TIMING_PRESETS))
def test_a_preset_of_timing_by_name(preset: str) -> None:
    by_name = parse_config({"timing": preset}, where="x")
    by_table = parse_config({"timing": {"preset": preset}}, where="x")
    assert by_name.timing == by_table.timing == Timing(**TIMING_PRESETS[preset])


def test_a_field_overrides_its_preset() -> None:
    timing = parse_config({"timing": {"preset": "wan", "stall_s": 7.5}}, where="x").timing
    assert timing == Timing(**{**TIMING_PRESETS["wan"], "stall_s": 7.5})


def test_presets_grow_with_distance() -> None:
    local, lan, wan = (Timing(**TIMING_PRESETS[name]) for name in ("local", "lan", "wan"))
    for field in Timing.model_fields:
        assert getattr(local, field) <= getattr(lan, field) <= getattr(wan, field), field


@pytest.mark.parametrize("preset", list(TIMING_PRESETS))
def test_a_preset_leaves_time_for_what_it_waits_for(preset: str) -> None:
    timing = Timing(**TIMING_PRESETS[preset])
    assert timing.heartbeat_s * 4 <= timing.stall_s, "some heartbeats may be lost"
    assert timing.connect_s < timing.stall_s
    assert timing.record_ttl_s / 3 >= timing.heartbeat_s
    assert timing.stage_lost_s > timing.stall_s


def test_an_unknown_preset_lists_the_known_ones() -> None:
    message = message_of({"timing": "moon"})
    assert message == "run.toml: timing preset 'moon' is none of local, lan, wan"


@pytest.mark.parametrize("preset", [["lan"], {"name": "lan"}, 3, None])
def test_a_preset_that_is_no_name_is_a_config_error(preset: object) -> None:
    message = message_of({"timing": {"preset": preset}})
    assert "\n" not in message
    assert "preset" in message


def test_the_given_tables_are_not_modified() -> None:
    timing = {"preset": "lan", "stall_s": 3.0}
    data = {"timing": timing}
    parse_config(data, where="x")
    assert data == {"timing": {"preset": "lan", "stall_s": 3.0}}


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3  # type: ignore[misc]


def test_every_field_says_what_it_is() -> None:
    for model in (RunConfig, Timing):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_every_field_has_another_value_here() -> None:
    assert set(OTHER_VALUES) == set(RunConfig.model_fields) - {"timing"}


@pytest.mark.parametrize("field", [*OTHER_VALUES, *(f"timing.{name}" for name in Timing.model_fields)])
def test_the_run_id_changes_with_any_field(field: str) -> None:
    base = RunConfig()
    if field.startswith("timing."):
        name = field.removeprefix("timing.")
        other = parse_config({"timing": {name: getattr(base.timing, name) + 1.0}}, where="x")
    else:
        assert getattr(base, field) != OTHER_VALUES[field]
        beside = TOGETHER.get(field, {})
        base = parse_config({} if field in ("mode", "inner_batch_size", "inner_steps") else beside, where="x")
        other = parse_config({field: OTHER_VALUES[field], **beside}, where="x")
    assert run_id_of(other.to_bytes()) != run_id_of(base.to_bytes())


def test_the_run_id_is_that_of_the_bytes() -> None:
    assert run_id_of(b"{}") != run_id_of(b"{ }"), "the creator's bytes count, verbatim"
    assert run_id_of(RunConfig().to_bytes()) == run_id_of(RunConfig().to_bytes())
    assert len(run_id_of(b"")) == 64


def test_equal_configurations_give_equal_bytes() -> None:
    one = parse_config({"seed": 3, "name": "x", "model_options": {"a": 1, "b": 2}}, where="x")
    other = parse_config({"model_options": {"b": 2, "a": 1}, "name": "x", "seed": 3, "timing": "local"}, where="y")
    assert one.to_bytes() == other.to_bytes()


def test_a_peer_reads_the_creators_bytes() -> None:
    config = parse_config({"seed": 3, "timing": {"preset": "wan", "lease_s": 0.125}, "learning_rate": 0.1}, where="x")
    assert parse_config_bytes(config.to_bytes()) == config


@pytest.mark.parametrize(
    "config_bytes",
    [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b'{"seed": -1}', b'{"new_field": 1}', b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "number", "no utf-8", "bad value", "unknown", "deep"],
)
def test_bytes_that_are_no_configuration_are_a_config_error(config_bytes: bytes) -> None:
    with pytest.raises(ConfigError, match=r"not understood by this version|is damaged") as raised:
        parse_config_bytes(config_bytes)
    assert "\n" not in str(raised.value)


def test_a_newer_creators_unknown_field_is_named() -> None:
    """Whoever joins a run of a newer version must learn which field its own version lacks."""
    data = json.loads(RunConfig().to_bytes())
    with pytest.raises(ConfigError, match="new_field"):
        parse_config_bytes(json.dumps({**data, "new_field": 1}).encode())


@pytest.mark.parametrize(("samples", "tickets"), [(0, 0), (1, 1), (8, 1), (9, 2), (64, 8)])
def test_an_evaluation_covers_all_its_samples(samples: int, tickets: int) -> None:
    assert RunConfig(micro_batch_size=8, eval_samples=samples).eval_tickets == tickets


def test_a_step_uses_the_parameters_of_so_many_commits() -> None:
    assert [RunConfig(delay_steps=0).base_step(step) for step in range(4)] == [0, 1, 2, 3]
    assert [RunConfig(delay_steps=1).base_step(step) for step in range(4)] == [0, 0, 1, 2]
    assert RunConfig(micro_batch_size=8, target_batch_size=64).tickets_per_step == 8
