"""Where a prompt ends and what follows it begins: the same tokens are trained as by TRL's SFTTrainer, differences named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.feed.chat import ChatReader
from swarm.feed.tokenizers import DirectoryTokenizer
from tests.unit.feed.boundaries import ROWS, TABLE, Row, example_of, write_tokenizer

THEIRS = {row["name"]: row for row in json.loads(TABLE.read_text())["rows"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    directory: Path = tmp_path_factory.mktemp("boundaries")
    write_tokenizer(directory)
    return DirectoryTokenizer(str(directory))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_tokens_that_are_trained_are_those_that_trl_trains(row: Row, tokenizer: DirectoryTokenizer) -> None:
    example, theirs = example_of(row, ChatReader(tokenizer)), THEIRS[row.name]
    ours = {"tokens": example.tokens.tolist(), "trained": [int(x) for x in example.trained]}
    assert (ours == {key: theirs[key] for key in ours}) == (not row.difference), (ours, theirs)


def test_the_two_differences_are_what_they_are_called(tokenizer: DirectoryTokenizer) -> None:
    spaces, brought = (row for row in ROWS if row.difference)
    ours, theirs = example_of(brought, ChatReader(tokenizer)), THEIRS[brought.name]
    assert theirs["tokens"] == [0, *ours.tokens], "TRL begins it twice"
    assert theirs["trained"] == [0, *ours.trained]
    ours, theirs = example_of(spaces, ChatReader(tokenizer)), THEIRS[spaces.name]
    assert theirs["tokens"] == ours.tokens.tolist()
    assert [tokenizer._tokenizer.decode([token]) for token in ours.tokens] == ["<|begin|>", "yes", " ", " no", "<|end|>"]
    assert (theirs["trained"], ours.trained.tolist()) == ([0, 0, 1, 1, 1], [False, False, False, True, True])
