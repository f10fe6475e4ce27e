"""From a source to training and held-out samples. Owns the held-out part and the digest; must not know tickets or steps.

A source of text (the builtin text, files, a directory of them; see `sources`) is one row of tokens: its documents are
joined and cut into windows of `sequence_length + 1` tokens with stride `sequence_length`, so that each token but the
first is a label exactly once; a last part that fills no window is left out. A source of conversations or instructions
becomes examples, several to a sample (`chat`, `packing`). A custom source is a dotted path to a factory that returns
arrays.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarm.base.config import RunConfig
from swarm.base.dotted import import_factory, is_dotted
from swarm.base.errors import ConfigError
from swarm.feed.chat import ChatReader, Example
from swarm.feed.packing import PackedExamples
from swarm.feed.samples import ArraySamples, Batch, Samples, TokenWindows
from swarm.feed.sources import BUILTIN, Record, records_of
from swarm.feed.tokenizers import Tokenizer
from swarm.feed.turns import is_conversation

__all__ = ["ArraySamples", "Batch", "Dataset", "TokenWindows", "open_dataset"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples, the latter perhaps none."""

    name: str
    train: Samples
    evaluation: Samples | None

    def digest(self) -> str:
        """64 hex digits over all values: equal on any machine that reads the same data."""
        digest = hashlib.sha256(b"swarm data 1\0")
        for part, samples in (("train", self.train), ("evaluation", self.evaluation)):
            digest.update(f"{part}\0".encode())
            if samples is not None:
                samples.update(digest)
        return digest.hexdigest()


def open_dataset(config: RunConfig, data: str | None, eval_data: str | None, tokenizer: Tokenizer) -> Dataset:
    """Read `data` (None is the builtin text) and hold out `eval_data`, or the last `eval_fraction` of `data`.

    Raises:
        ConfigError: one line naming the file (and line), or the dotted path, and what is wrong.
    """
    source = data or BUILTIN
    if source != BUILTIN and not os.path.exists(source) and is_dotted(source):
        if eval_data is not None:
            raise ConfigError(f"data {source}: a custom dataset brings its own evaluation samples, not {eval_data}")
        return _custom(source, config)
    train = _read(source, tokenizer)
    wants_eval = config.eval_samples > 0 and (eval_data is not None or config.eval_fraction > 0)
    if eval_data is not None:
        held_out = _samples(_read(eval_data, tokenizer), config, eval_data, required=wants_eval)
    else:
        split = len(train) - math.floor(len(train) * config.eval_fraction)
        if split == len(train) and wants_eval and not isinstance(train, np.ndarray):
            logger.warning(
                "data %s: %g (eval_fraction) of %d conversations is less than one: nothing is held out, nothing is "
                "evaluated; eval_data names data for that",
                source,
                config.eval_fraction,
                len(train),
            )
            wants_eval = False
        held_out = _samples(train[split:], config, f"the held-out part of {source}", required=wants_eval)
        train = train[:split]
    samples = _samples(train, config, source, required=True)
    return Dataset(_name_of(source), samples, held_out if len(held_out) else None)


#: A row of tokens, or the examples of each conversation: what is held out shares no conversation with what is trained.
Content = np.ndarray | Sequence[Sequence[Example]]


def _samples(content: Content, config: RunConfig, where: str, *, required: bool) -> Samples:
    length = config.sequence_length
    if isinstance(content, np.ndarray):
        samples: Samples = TokenWindows(content, length)
        problem = f"{len(content)} tokens are too few for one sample of {length} + 1"
    else:
        samples = PackedExamples(itertools.chain.from_iterable(content), length, packed=config.packing)
        problem = f"of {len(content)} conversations none has anything to learn within sequence_length {length}"
    if required and not len(samples):
        raise ConfigError(f"data {where}: {problem}")
    return samples


def _read(source: str, tokenizer: Tokenizer) -> Content:
    """Everything in `source`: a row of tokens if it holds text, examples if it holds conversations.

    Raises:
        ConfigError: it holds neither, or both.
    """
    records = records_of(source)
    first = next(records, None)
    if first is None:
        raise ConfigError(f"data {source}: holds no text")
    records = itertools.chain([first], records)
    if not is_conversation(first[1]):
        return _row(records, source, tokenizer)
    reader = ChatReader(tokenizer)
    examples = [_examples(record, reader, where) for where, record in records]
    tally = reader.tally
    logger.log(logging.INFO if tally.is_plain() else logging.WARNING, "data %s: %s", source, tally.told())
    return examples


def _examples(record: Record, reader: ChatReader, where: str) -> Sequence[Example]:
    if not is_conversation(record):
        raise ConfigError(f'{where}: has neither "messages" nor "prompt" and "completion", as the records before it')
    return reader.examples_of(record, where)


def _row(records: Iterator[tuple[str, Record]], source: str, tokenizer: Tokenizer) -> np.ndarray:
    """All documents in one row, each with the tokenizer's own first tokens, split by what ends one."""
    row: list[np.ndarray] = []
    for where, record in records:
        text = record.get("text")
        if not isinstance(text, str):
            raise ConfigError(f'{where}: has no string field "text", and no "messages" or "prompt" and "completion"')
        if text:
            ids = tokenizer.encode(text)
            before, after = tokenizer.framing(ids)
            row += [before, ids, after]
    if not row:
        raise ConfigError(f"data {source}: holds no text")
    return np.concatenate(row[:-1])


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
