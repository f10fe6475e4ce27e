"""What is trained of data as people bring them: the tokens and masks that TRL's SFTTrainer makes of the same rows.

`shapes.json` was written by TRL (`python -m tests.unit.feed.trl_shapes`), with `assistant_only_loss` for messages. Text is
one row of tokens here, cut into windows, and TRL makes a sample of each: its rows one after the other are the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.feed.chat import Tally, rows_text
from swarm.feed.token_files import TokenCache
from swarm.feed.tokenising import tokenised
from swarm.feed.tokenizers import DirectoryTokenizer
from tests.unit.feed.boundaries import SPECIAL, write_tokenizer
from tests.unit.feed.shapes import MARKED_TEMPLATE, PLAIN_TEMPLATE, SHAPES, TABLE, Shape
from tests.unit.feed.trl_shapes import trl_rows

THEIRS = {entry["name"]: entry["examples"] for entry in json.loads(TABLE.read_text())["shapes"]}


@pytest.fixture(scope="module", params=[MARKED_TEMPLATE, PLAIN_TEMPLATE], ids=["marked", "plain"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    directory = tmp_path_factory.mktemp("shapes")
    write_tokenizer(directory, request.param, SPECIAL)
    return DirectoryTokenizer(str(directory))


def trained_of(shape: Shape, tokenizer: DirectoryTokenizer, directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Tokens and masks of a source, and what is told of its rows."""
    entry = tokenised(str(shape.write(directory)), tokenizer, TokenCache(None))
    tally = Tally.from_notes(entry.notes["tally"])
    if isinstance(entry.content, np.ndarray):
        return [{"tokens": entry.content.tolist(), "trained": [1] * len(entry.content)}], rows_text(tally.shapes)
    examples = [entry.content[index] for index in range(len(entry.content))]
    return [{"tokens": e.tokens.tolist(), "trained": e.trained.astype(int).tolist()} for e in examples], tally.told()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_is_trained_of_a_file_is_what_trl_trains(shape: Shape, tokenizer: DirectoryTokenizer, tmp_path: Path) -> None:
    ours, told = trained_of(shape, tokenizer, tmp_path)
    theirs = THEIRS[shape.name]
    if "text" in shape.trl[0]:
        tokens = [token for row in theirs for token in row["tokens"]][:-1]  # nothing follows that the last one's end would split
        theirs = [{"tokens": tokens, "trained": [1] * len(tokens)}]
    assert (ours == theirs) == (not shape.difference), (ours, theirs)
    assert told == shape.counted


def test_trl_still_trains_what_the_table_says(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    write_tokenizer(tmp_path, MARKED_TEMPLATE, SPECIAL)
    chosen = [shape for shape in SHAPES if shape.name in ("messages, lines", "messages with calls of tools", "Alpaca, CSV")]
    rows = [row for shape in chosen for row in shape.trl]
    assert trl_rows(tmp_path, rows) == [row for shape in chosen for row in THEIRS[shape.name]]
