"""Which ways of averaging go together: the configuration against the table in averaging/MODES.md."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import swarm.averaging
from swarm.base.choices import COMPRESSOR_FACTS
from swarm.base.config import BELONGS_TO, RunConfig, default_of, parse_config, parse_config_bytes
from swarm.base.errors import ConfigError

TABLE = Path(swarm.averaging.__file__).parent / "MODES.md"
CODES = tuple(COMPRESSOR_FACTS)


def allowed() -> set[tuple[str, int, str, bool, str]]:
    """(mode, delay_steps, average_compression, fragments > 1, aggregation) of every row of the table."""
    found = set()
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[5] == "yes":
            mode, delays, codes, fragments, aggregations, _ = cells
            found |= set(
                itertools.product(
                    [mode],
                    map(int, delays.split(" or ")),
                    codes.split(", "),
                    {"1": [False], "any": [False, True]}[fragments],
                    aggregations.split(" or "),
                )
            )
    return found


def is_allowed(data: dict[str, object]) -> bool:
    try:
        parse_config(data, where="run.toml")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_the_configuration_allows_what_the_table_allows(mode: str) -> None:
    table = allowed()
    assert {row[2] for row in table} == set(CODES)
    for delay, code, split, aggregation in itertools.product([0, 1], CODES, [False, True], ["mean", "centered_clip"]):
        data = {
            "mode": mode,
            "delay_steps": delay,
            "average_compression": code,
            "fragments": 2 if split else 1,
            "aggregation": aggregation,
            "inner_steps": 2 if mode == "local" else 0,
        }
        assert ((mode, delay, code, split, aggregation) in table) == is_allowed(data), data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mode": "local"}, "mode 'local' needs inner_steps, such as 20"),
        ({"mode": "local", "inner_steps": 2, "inner_batch_size": 8}, "one of inner_steps and inner_batch_size, not both"),
        ({"mode": "local", "inner_steps": 3}, "64 is not a multiple of 3 inner_steps times micro_batch_size 8"),
        ({"mode": "local", "inner_batch_size": 12}, "inner_batch_size 12 is not a multiple of micro_batch_size 8"),
        ({"mode": "local", "inner_batch_size": 128}, "inner_batch_size 128 is above target_batch_size 64"),
        ({"mode": "local", "inner_batch_size": 8, "delay_steps": 1}, "mode 'local' excludes delay_steps"),
        (
            {"mode": "local", "inner_steps": 8, "average_compression": "powersgd", "fragments": 2},
            "'powersgd' sends whole matrices: it excludes fragments",
        ),
        ({"average_compression": "cocktail"}, "'cocktail' sends differences of models: it needs mode 'local'"),
        ({"inner_steps": 8}, "inner_steps belongs to mode 'local', and mode is 'sync': leave it at 0 or set mode"),
        ({"inner_batch_size": 8}, "inner_batch_size belongs to mode 'local', and mode is 'sync': leave it at 0 or set mode"),
        (
            {"powersgd_rank": 8},
            "powersgd_rank belongs to average_compression 'powersgd', and average_compression is 'none': "
            "leave it at 4 or set average_compression",
        ),
        ({"min_lr_ratio": 0.5, "lr_schedule": "constant"}, "min_lr_ratio belongs to lr_schedule 'linear' or 'cosine'"),
        ({"mode": "local", "inner_batch_size": 8, "fragments": 61}, "61 fragments in 60 steps"),
        ({"fragments": 2}, "fragments belongs to mode 'local'"),
        ({"aggregation": "centered_clip", "average_compression": "powersgd"}, "it excludes average_compression 'powersgd'"),
        ({"auxiliaries": 1, "average_compression": "powersgd"}, "they exclude average_compression 'powersgd'"),
        ({"auxiliaries": 1, "aggregation": "centered_clip"}, "they exclude aggregation 'centered_clip'"),
        ({"auxiliaries": 1, "mode": "local", "inner_batch_size": 8, "fragments": 2}, "they exclude fragments"),
        ({"aggregation": "centered_clip", "mode": "local", "inner_batch_size": 8, "fragments": 2}, "it excludes fragments"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(data, where="run.toml")
    assert message in str(raised.value)


#: For each option that belongs to something: a value of its own, and what else a run that uses it needs.
USES: dict[str, tuple[object, dict[str, object]]] = {
    "min_lr_ratio": (0.5, {}),
    "powersgd_rank": (8, {}),
    "cocktail_top": (0.5, {"mode": "local", "inner_batch_size": 8}),
    "clip_radius": (2.0, {}),
    "inner_batch_size": (8, {}),
    "inner_steps": (2, {}),
    "outer_learning_rate": (0.5, {"inner_batch_size": 8}),
    "outer_momentum": (0.5, {"inner_batch_size": 8}),
    "fragments": (2, {"inner_batch_size": 8}),
}


def belongings() -> dict[str, tuple[str, set[str]]]:
    """What the table says that each option belongs to."""
    rows = [line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 3 and " = " in row[1]]
    split = [(options.split(", "), what.partition(" = ")) for options, what, _ in cells]
    return {option: (field, set(values.split(" or "))) for options, (field, _, values) in split for option in options}


def test_the_table_says_what_each_option_belongs_to() -> None:
    assert belongings() == {option: (field, set(values)) for option, (field, values) in BELONGS_TO.items()}
    assert USES.keys() == BELONGS_TO.keys()


@pytest.mark.parametrize("option", BELONGS_TO)
def test_an_option_of_another_mode_is_refused_where_it_was_set(option: str) -> None:
    value, beside = USES[option]
    field, values = BELONGS_TO[option]
    for used in values:
        assert is_allowed({option: value, field: used, **beside})
    other = {"lr_schedule": "constant"}.get(field, default_of(field))
    unused = {option: value, field: other}
    with pytest.raises(ConfigError) as raised:
        parse_config(unused, where="run.toml")
    message = str(raised.value)
    assert message.startswith(f"run.toml: {option} belongs to {field} ")
    assert f", and {field} is {other!r}: leave it at " in message
    default = default_of(option)
    assert is_allowed({**unused, option: default}), "every saved run states its defaults"


def test_a_run_that_was_saved_with_an_option_that_nothing_uses_still_loads() -> None:
    saved = RunConfig(powersgd_rank=8, outer_momentum=0.5)
    assert parse_config_bytes(saved.to_bytes()) == saved
    again = parse_config({**saved.model_dump(), "seed": 3}, where="x", given={"seed"})
    assert again.powersgd_rank == 8
