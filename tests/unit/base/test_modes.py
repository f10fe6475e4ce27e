"""Which ways of averaging go together: the configuration against the table in averaging/MODES.md."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest

import swarm.averaging
from swarm.base.config import RunConfig, parse_config
from swarm.base.errors import ConfigError

TABLE = Path(swarm.averaging.__file__).parent / "MODES.md"
CODES = get_args(RunConfig.model_fields["average_compression"].annotation)


def allowed() -> set[tuple[str, int, str, bool, str]]:
    """(mode, delay_steps, average_compression, fragments > 1, aggregation) of every row of the table."""
    found = set()
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[5] == "yes":
            mode, delays, codes, fragments, aggregations, _ = cells
            found |= set(itertools.product(
                [mode], map(int, delays.split(" or ")), codes.split(", "), {"1": [False], "any": [False, True]}[fragments],
                aggregations.split(" or "),
            ))  # fmt: skip
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
            "mode": mode, "delay_steps": delay, "average_compression": code, "fragments": 2 if split else 1,
            "aggregation": aggregation, "inner_batch_size": 8 if mode == "local" else 0,
        }  # fmt: skip
        assert ((mode, delay, code, split, aggregation) in table) == is_allowed(data), data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mode": "local"}, "needs an inner_batch_size that is a multiple of micro_batch_size 8, not 0"),
        ({"mode": "local", "inner_batch_size": 12}, "multiple of micro_batch_size 8, not 12"),
        ({"mode": "local", "inner_batch_size": 128}, "inner_batch_size 128 is above target_batch_size 64"),
        ({"mode": "local", "inner_batch_size": 8, "delay_steps": 1}, "mode 'local' excludes delay_steps"),
        ({"mode": "local", "inner_batch_size": 8, "average_compression": "powersgd"}, "mode 'local' has 'cocktail'"),
        ({"average_compression": "cocktail"}, "'cocktail' sends differences of models: it needs mode 'local'"),
        ({"inner_batch_size": 8}, "inner_batch_size belongs to mode 'local', and mode is 'sync'"),
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
