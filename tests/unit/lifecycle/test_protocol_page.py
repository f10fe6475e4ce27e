"""The page that explains the protocol shows the transitions that the code has, and names code that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import swarm
from swarm.lifecycle.micro_batch import MICRO_BATCH
from swarm.lifecycle.peer import PEER
from swarm.lifecycle.step import STEP

ROOT = Path(swarm.__file__).parent
PAGE = (ROOT / "lifecycle" / "PROTOCOL.md").read_text()


@pytest.mark.parametrize("table", [PEER, MICRO_BATCH, STEP], ids=lambda t: t.name)
def test_the_page_shows_every_transition(table):
    section = PAGE.split(f"### {table.name}\n")[1].split("###")[0]
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \|$", section, flags=re.MULTILINE)
    assert {(s, e): n for s, e, n in rows} == dict(table.transitions)


def test_the_page_names_files_that_exist():
    for path in re.findall(r"`((?:stage|lifecycle|averaging|peer|policy)/\w+\.py)`", PAGE):
        assert (ROOT / path).is_file(), f"PROTOCOL.md names {path}"
