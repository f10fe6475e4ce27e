"""Where samples come from. Owns reading, packing, the held-out part and the digest; must not know tickets or steps.

A text source is the builtin text, a text file, a JSONL file (`{"text": ...}` a line) or a directory of those, in the
order of their paths. Its documents are joined to one row of tokens, cut into windows of `sequence_length + 1` tokens
with stride `sequence_length`, so that each token but the first is a label exactly once; a last part that fills no
window is left out. A custom source is a dotted path to a factory that returns arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.dotted import import_factory, is_dotted
from swarm.feed.tokenizers import Tokenizer

BUILTIN = "builtin"
_TEXT_SUFFIXES = (".txt", ".md", ".text")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Batch:
    """Samples that are trained together: named arrays whose first dimension is the batch."""

    inputs: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


class Samples(Protocol):
    """A finite, indexable set of samples of one shape."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> Batch:
        """The samples at `indices` (int64 [B]), in that order."""
        ...

    def update(self, digest: Any) -> None:
        """Feed every value into `digest` (a hashlib object), independent of machine and storage dtype."""
        ...


class TokenWindows:
    """Windows of one row of tokens: `input_ids` and `labels`, int64 [B, T]; `labels[t]` is the token after `t`."""

    def __init__(self, tokens_N: np.ndarray, sequence_length: int) -> None:
        self._tokens_N = tokens_N
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._tokens_N) - 1) // self._length)

    def take(self, indices: np.ndarray) -> Batch:
        window_BT = indices[:, None] * self._length + np.arange(self._length + 1)
        tokens_BT = self._tokens_N[window_BT].astype(np.int64)
        return Batch({"input_ids": tokens_BT[:, :-1].copy()}, {"labels": tokens_BT[:, 1:].copy()})

    def update(self, digest: Any) -> None:
        digest.update(f"tokens {len(self._tokens_N)}\0".encode())
        for start in range(0, len(self._tokens_N), 2**20):
            digest.update(self._tokens_N[start : start + 2**20].astype("<u4").tobytes())


class ArraySamples:
    """Samples of a custom dataset, held in memory: every array is [N, ...].

    Raises:
        ConfigError: if there is no array, or they disagree about N.
    """

    def __init__(self, inputs: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray]) -> None:
        self.inputs = {name: np.asarray(array) for name, array in inputs.items()}
        self.labels = {name: np.asarray(array) for name, array in labels.items()}
        lengths = {name: len(a) if a.ndim else -1 for name, a in [*self.inputs.items(), *self.labels.items()]}
        if not self.inputs or not self.labels:
            raise ConfigError("a custom dataset needs at least one input and one label array")
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise ConfigError(f"the arrays of a custom dataset differ in their number of samples: {lengths}")
        self._num_samples = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._num_samples

    def take(self, indices: np.ndarray) -> Batch:
        return Batch(
            {name: array[indices] for name, array in self.inputs.items()},
            {name: array[indices] for name, array in self.labels.items()},
        )

    def slice(self, start: int, end: int) -> ArraySamples:
        return ArraySamples(
            {name: array[start:end] for name, array in self.inputs.items()},
            {name: array[start:end] for name, array in self.labels.items()},
        )

    def update(self, digest: Any) -> None:
        for kind, arrays in (("input", self.inputs), ("label", self.labels)):
            for name in sorted(arrays):
                array = np.ascontiguousarray(arrays[name])
                array = array.astype(array.dtype.newbyteorder("<"), copy=False)
                digest.update(f"{kind} {name} {array.dtype.str} {array.shape}\0".encode())
                digest.update(array.tobytes())


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
    tokens_N = _tokens(source, tokenizer)
    if eval_data is not None:
        eval_N, eval_source = _tokens(eval_data, tokenizer), eval_data
    else:
        split = len(tokens_N) - math.floor(len(tokens_N) * config.eval_fraction)
        tokens_N, eval_N, eval_source = tokens_N[:split], tokens_N[split:], f"the held-out part of {source}"
    train = TokenWindows(tokens_N, config.sequence_length)
    evaluation = TokenWindows(eval_N, config.sequence_length)
    wants_eval = config.eval_samples > 0 and (eval_data is not None or config.eval_fraction > 0)
    for samples, tokens, where in ((train, tokens_N, source), (evaluation, eval_N, eval_source)):
        if not len(samples) and (samples is train or wants_eval):
            raise ConfigError(
                f"data {where}: {len(tokens)} tokens are too few for one sample of {config.sequence_length} + 1"
            )
    return Dataset(_name_of(source), train, evaluation if len(evaluation) else None)


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


def _tokens(source: str, tokenizer: Tokenizer) -> np.ndarray:
    """All documents of `source` in one row, joined by the tokenizer's separator."""
    row: list[np.ndarray] = []
    for text in _documents(source):
        if text:
            row += [tokenizer.encode(text), tokenizer.separator]
    if not row:
        raise ConfigError(f"data {source}: holds no text")
    return np.concatenate(row[:-1])


def _documents(source: str) -> Iterator[str]:
    if source == BUILTIN:
        yield from _builtin_documents()
        return
    path = Path(source)
    if path.is_dir():
        suffixes = _TEXT_SUFFIXES + _JSONL_SUFFIXES
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in suffixes)
        if not files:
            raise ConfigError(f"data {source}: the directory holds no {', '.join(suffixes)} file")
    elif os.path.exists(source):
        files = [path]
    else:
        raise ConfigError(f"data {source}: no such file or directory")
    for file in files:
        yield from _file_documents(file)


def _builtin_documents() -> Iterator[str]:
    """About 460 KB of English that every CPython ships; its text (thus the data digest) differs between releases."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _file_documents(path: Path) -> Iterator[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"data {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data {path}: byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise ConfigError(f"data {path}: the file is empty")
    if path.suffix not in _JSONL_SUFFIXES:
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _json_text(line, f"data {path}, line {number}")


def _json_text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: is not JSON") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ConfigError(f'{where}: has no string field "text"')
    return record["text"]
