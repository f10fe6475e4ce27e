"""Samples: finite, indexable, of one shape. Owns how a batch is made of them; must not know where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swarm.base.errors import ConfigError
from swarm.feed.mapped import let_go

#: What a label says where nothing is to be learnt.
IGNORED_LABEL = -100


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

    def token_bounds(self) -> tuple[int, int] | None:
        """The least and the largest token id of all; None if there is none, or if these are no tokens."""
        ...


class TokenWindows:
    """Windows of one row of tokens: `input_ids` and `labels`, int64 [B, T]; `labels[t]` is the token after `t`."""

    def __init__(self, tokens_N: np.ndarray, sequence_length: int) -> None:
        self._tokens_N = tokens_N
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._tokens_N) - 1) // self._length)

    @property
    def num_tokens(self) -> int:
        """Labels of all windows."""
        return len(self) * self._length

    def take(self, indices: np.ndarray) -> Batch:
        """The windows with these indices, as arrays of shape [len(indices), T]."""
        window_BT = indices[:, None] * self._length + np.arange(self._length + 1)
        tokens_BT = self._tokens_N[window_BT].astype(np.int64)
        let_go(self._tokens_N)
        return Batch({"input_ids": tokens_BT[:, :-1].copy()}, {"labels": tokens_BT[:, 1:].copy()})

    def update(self, digest: Any) -> None:
        """Feed all values to a digest."""
        digest.update(f"tokens {len(self._tokens_N)}\0".encode())
        for tokens in self._blocks():
            digest.update(tokens.astype("<u4").tobytes())

    def _blocks(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self._tokens_N), 2**20):
            yield self._tokens_N[start : start + 2**20]
            let_go(self._tokens_N)

    def token_bounds(self) -> tuple[int, int] | None:
        """The lowest and the highest token."""
        found = [bounds for tokens in self._blocks() if (bounds := bounds_of(tokens)) is not None]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None


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
        """The rows with these indices of every array."""
        return Batch(
            {name: array[indices] for name, array in self.inputs.items()},
            {name: array[indices] for name, array in self.labels.items()},
        )

    def slice(self, start: int, end: int) -> ArraySamples:
        """The samples from `start` to `end`, as views."""
        return ArraySamples(
            {name: array[start:end] for name, array in self.inputs.items()},
            {name: array[start:end] for name, array in self.labels.items()},
        )

    def update(self, digest: Any) -> None:
        """Feed names, dtypes, shapes and values to a digest."""
        for kind, arrays in (("input", self.inputs), ("label", self.labels)):
            for name in sorted(arrays):
                array = np.ascontiguousarray(arrays[name])
                array = array.astype(array.dtype.newbyteorder("<"), copy=False)
                digest.update(f"{kind} {name} {array.dtype.str} {array.shape}\0".encode())
                digest.update(array.tobytes())

    def token_bounds(self) -> tuple[int, int] | None:
        """The smallest and the largest token of `input_ids` and of the `labels` that are trained; None without tokens."""
        if "input_ids" not in self.inputs:
            return None
        labels = self.labels.get("labels", np.empty(0, np.int64))
        found = [bounds_of(self.inputs["input_ids"]), bounds_of(labels[labels != IGNORED_LABEL])]
        low, high = zip(*(bounds for bounds in found if bounds is not None), strict=True)
        return min(low), max(high)


def bounds_of(tokens: np.ndarray) -> tuple[int, int] | None:
    """Least and largest of them, if there are any."""
    return (int(tokens.min()), int(tokens.max())) if tokens.size else None
