"""The trainer's source of batches: ticket -> arrays. Owns the check that it is the run's data; must not know peers."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.feed.datasets import Batch, DataFacts, Dataset, open_dataset
from swarm.feed.order import sample_indices
from swarm.feed.packing import PackedExamples
from swarm.feed.token_files import TokenCache
from swarm.feed.tokenizers import DATE_OF_NO_RUN, open_tokenizer

__all__ = ["Batch", "Feed", "describe_data", "open_feed"]


class Feed:
    """Batches of one run; every call gives fresh arrays."""

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        self._config = config
        self._dataset = dataset
        self.data_digest: str = dataset.digest()
        self.num_samples: int = len(dataset.train)
        self.facts: DataFacts = dataset.facts()

    def batch(self, ticket: Ticket) -> Batch:
        """The micro-batch that `ticket` names: a function of the ticket, the run and its data alone."""
        return self._dataset.train.take(sample_indices(ticket, self._config, self.num_samples))

    def eval_batches(self) -> list[Batch]:
        """The first `eval_samples` held-out samples, or all if there are fewer; the last batch may be short."""
        samples = self._dataset.evaluation
        total = 0 if samples is None else min(len(samples), self._config.eval_samples)
        size = self._config.micro_batch_size
        starts = range(0, total, size)
        return [samples.take(np.arange(start, min(start + size, total))) for start in starts] if samples else []


def open_feed(
    config: RunConfig,
    data: str | None,
    eval_data: str | None,
    tokenizer: str | None,
    *,
    vocab_size: int | None = None,
    cache: TokenCache | None = None,
) -> Feed:
    """The feed of a run from local paths: see `swarm.feed.datasets` for what `data` and `eval_data` may be.

    Args:
        vocab_size: of the model, where it is known.
        cache: where tokens are kept; by default nowhere.

    Raises:
        ConfigError: if the data or the tokenizer cannot be read, is not that of the run, or has tokens that the model has not.
    """
    encoder = open_tokenizer(tokenizer, date=_date_of(config) or DATE_OF_NO_RUN)
    _require_same("tokenizer", tokenizer or "byte-level", encoder.digest, config.tokenizer_digest)
    dataset = open_dataset(config, data, eval_data, encoder, cache)
    _require_known_tokens(dataset, vocab_size)
    feed = Feed(config, dataset)
    _require_same("data", data or "builtin", feed.data_digest, config.data_digest)
    return feed


def describe_data(
    config: RunConfig,
    data: str | None,
    eval_data: str | None,
    tokenizer: str | None,
    *,
    vocab_size: int | None = None,
    today: datetime.date = DATE_OF_NO_RUN,
    cache: TokenCache | None = None,
) -> dict[str, Any]:
    """What a run's creator writes into its `RunConfig`, under its field names, and the vocabulary's size.

    Args:
        vocab_size: of the model, where it is known.
        today: what a chat template that asks is told, from now on by all peers, if the run has no date yet.
        cache: where tokens are kept; by default nowhere.

    Returns:
        `dataset`, `data_digest`, `tokenizer_digest`, `template_date` (str) and `vocab_size` (int, of the tokenizer);
        `facts` are the data's counts (`DataFacts`);
        `cost_apart` is what a sample for each example would take, as part of a sentence, or None where there are none.

    Raises:
        ConfigError: if the data or the tokenizer cannot be read, or the data has tokens that the model has not.
    """
    date = _date_of(config) or today
    encoder = open_tokenizer(tokenizer, date=date)
    dataset = open_dataset(config, data, eval_data, encoder, cache)
    _require_known_tokens(dataset, vocab_size)
    return {
        "dataset": dataset.name,
        "data_digest": dataset.digest(),
        "tokenizer_digest": encoder.digest,
        "template_date": date.isoformat() if dataset.has_told_date else config.template_date,
        "vocab_size": encoder.vocab_size,
        "facts": dataset.facts(),
        "cost_apart": dataset.train.cost_apart() if isinstance(dataset.train, PackedExamples) else None,
    }


def _date_of(config: RunConfig) -> datetime.date | None:
    return datetime.date.fromisoformat(config.template_date) if config.template_date else None


def _require_known_tokens(dataset: Dataset, vocab_size: int | None) -> None:
    """Once, here: a GPU that looks an unknown token up computes nothing any more until its process is started again."""
    if vocab_size is None:
        return
    for token in dataset.token_bounds() or ():
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"data {dataset.name}: holds token {token}, and the model has tokens 0 to {vocab_size - 1}; use its own "
                "tokenizer (--tokenizer), or a larger model_options.vocab_size"
            )


def _require_same(what: str, source: str, digest: str, expected: str) -> None:
    if expected and digest != expected:
        raise ConfigError(
            f"{what} {source} is not the run's: its digest is {digest[:12]}, the run has {expected[:12]}; "
            f"give the same {what} as the run's creator"
        )
