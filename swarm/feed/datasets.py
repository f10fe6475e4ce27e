"""From a source to training and held-out samples. Owns the held-out part, the digest and the counts; must not know tickets.

A source of text (the builtin text, files, a directory of them; see `files`) is one row of tokens: its documents are
joined and cut into windows of `sequence_length + 1` tokens with stride `sequence_length`, so that each token but the
first is a label exactly once; a last part that fills no window is left out. A source of conversations or instructions
becomes examples, several to a sample (`chat`, `packing`). A custom source is a dotted path to a factory that returns
arrays.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarm.base.config import RunConfig
from swarm.base.dotted import import_factory, is_dotted
from swarm.base.errors import ConfigError
from swarm.feed.chat import Tally
from swarm.feed.memo import NO_MEMO, Memo
from swarm.feed.packing import PackedExamples
from swarm.feed.samples import ArraySamples, Batch, Samples, TokenWindows
from swarm.feed.sources import BUILTIN
from swarm.feed.token_files import Content, TokenCache, TokenEntry
from swarm.feed.tokenising import tokenised
from swarm.feed.tokenizers import Tokenizer

__all__ = ["ArraySamples", "Batch", "DataFacts", "Dataset", "TokenWindows", "open_dataset"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a run's data are, in numbers. Of a custom source only the samples are known."""

    #: Rows of each shape that were read, those of the held-out part among them.
    rows: dict[str, int] = field(default_factory=dict)
    #: Rows of which nothing is trained: their answers are empty, marked, or not written by the chat template.
    rows_left_out: int = 0
    #: Training samples (windows of `sequence_length`), and held-out ones.
    samples: int
    eval_samples: int
    #: Tokens in the training samples, without padding, and those that are trained.
    tokens: int | None = None
    trained_tokens: int | None = None
    #: Examples that are cut to `sequence_length`, and those that are left out since nothing trained is left of them then.
    examples_cut: int = 0
    examples_left_out: int = 0


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples, the latter perhaps none."""

    name: str
    train: Samples
    evaluation: Samples | None
    #: What is known of the rows, and whether a chat template asked for the date.
    tally: Tally = field(default_factory=Tally)
    has_told_date: bool = False
    memo: Memo = NO_MEMO

    def digest(self) -> str:
        """64 hex digits over all values: equal on any machine that reads the same data."""
        return str(self.memo.value("digest 1", self._digest))

    def _digest(self) -> str:
        digest = hashlib.sha256(b"swarm data 1\0")
        for part, samples in (("train", self.train), ("evaluation", self.evaluation)):
            digest.update(f"{part}\0".encode())
            if samples is not None:
                samples.update(digest)
        return digest.hexdigest()

    def token_bounds(self) -> tuple[int, int] | None:
        """The least and the largest token id of all samples, if they are tokens."""
        found = self.memo.value("bounds 1", self._bounds)
        return None if found is None else (found[0], found[1])

    def _bounds(self) -> tuple[int, int] | None:
        parts = [samples.token_bounds() for samples in (self.train, self.evaluation) if samples is not None]
        known = [bounds for bounds in parts if bounds is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    def facts(self) -> DataFacts:
        """The counts."""
        told: dict[str, Any] = {}
        if isinstance(self.train, PackedExamples):
            told = {
                "tokens": self.train.num_tokens,
                "trained_tokens": self.train.num_trained_tokens,
                "examples_cut": self.train.num_cut,
                "examples_left_out": self.train.num_left_out,
            }
        elif isinstance(self.train, TokenWindows):
            told = {"tokens": self.train.num_tokens, "trained_tokens": self.train.num_tokens}
        return DataFacts(
            rows=dict(self.tally.shapes),
            rows_left_out=self.tally.empty + self.tally.hollow,
            samples=len(self.train),
            eval_samples=0 if self.evaluation is None else len(self.evaluation),
            **told,
        )


def open_dataset(
    config: RunConfig, data: str | None, eval_data: str | None, tokenizer: Tokenizer, cache: TokenCache | None = None
) -> Dataset:
    """Read `data` (None is the builtin text) and hold out `eval_data`, or the last `eval_fraction` of `data`.

    Args:
        cache: where tokens are kept; by default nowhere.

    Raises:
        ConfigError: one line naming the file (and line), or the dotted path, and what is wrong.
    """
    source, cache = data or BUILTIN, cache or TokenCache(None)
    if source != BUILTIN and not os.path.exists(source) and is_dotted(source):
        if eval_data is not None:
            raise ConfigError(f"data {source}: a custom dataset brings its own evaluation samples, not {eval_data}")
        return _custom(source, config)
    entry = tokenised(source, tokenizer, cache)
    eval_entry = entry if eval_data is None else tokenised(eval_data, tokenizer, cache)
    wants_eval = config.eval_samples > 0 and (eval_data is not None or config.eval_fraction > 0)
    total = _size_of(entry.content)
    split = total if eval_data is not None else total - math.floor(total * config.eval_fraction)
    if eval_data is None and split == total and wants_eval and not isinstance(entry.content, np.ndarray):
        logger.warning(
            "data %s: %g (eval_fraction) of %d conversations is less than one: nothing is held out, nothing is "
            "evaluated; eval_data names data for that",
            source,
            config.eval_fraction,
            total,
        )
        wants_eval = False
    first, where = (split, f"the held-out part of {source}") if eval_data is None else (0, eval_data)
    held_out = _samples(eval_entry, first, _size_of(eval_entry.content), config, where, required=wants_eval)
    samples = _samples(entry, 0, split, config, source, required=True)
    return Dataset(
        _name_of(source),
        samples,
        held_out if len(held_out) else None,
        Tally.from_notes(entry.notes["tally"]),
        bool(entry.notes["told_date"] or eval_entry.notes["told_date"]),
        entry.memo.of(f"{split} {first} {_place_of(eval_entry)} {config.sequence_length} {config.packing}"),
    )


def _place_of(entry: TokenEntry) -> str:
    """Names what it holds, where that is kept."""
    return "" if entry.memo.directory is None else entry.memo.directory.name


def _size_of(content: Content) -> int:
    """Tokens of a row; conversations: what is held out shares no conversation with what is trained."""
    return len(content) if isinstance(content, np.ndarray) else content.num_conversations


def _samples(entry: TokenEntry, first: int, stop: int, config: RunConfig, where: str, *, required: bool) -> Samples:
    length, content = config.sequence_length, entry.content
    if isinstance(content, np.ndarray):
        samples: Samples = TokenWindows(content[first:stop], length)
        problem = f"{stop - first} tokens are too few for one sample of {length} + 1"
    else:
        memo = entry.memo.of(f"{first} {stop}")
        samples = PackedExamples(content.part(first, stop), length, packed=config.packing, memo=memo)
        problem = f"{stop - first} rows have nothing to learn within --sequence-length {length}: give a greater one"
    if required and not len(samples):
        raise ConfigError(f"data {where}: {problem}")
    return samples


def _name_of(source: str) -> str:
    """A name for people: never a path."""
    return (Path(os.path.abspath(source)).name if os.path.exists(source) else source)[:200]


def _custom(dotted: str, config: RunConfig) -> Dataset:
    """A factory is called with the `RunConfig` and returns `train` or `(train, evaluation)`, both `ArraySamples`.

    Without `evaluation`, the last `eval_fraction` of `train` is held out.
    """
    made = import_factory(dotted, "data")(config)
    train, evaluation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(train, ArraySamples) or not isinstance(evaluation, ArraySamples | None):
        raise ConfigError(f"data {dotted}: must return ArraySamples or a pair of them, not {type(made).__name__}")
    if evaluation is None and config.eval_fraction:
        split = len(train) - math.floor(len(train) * config.eval_fraction)
        train, evaluation = train.slice(0, split), train.slice(split, len(train))
    if not len(train):
        raise ConfigError(f"data {dotted}: there are no training samples")
    return Dataset(dotted[:200], train, evaluation if evaluation is not None and len(evaluation) else None)
