"""Many examples in a few long arrays, which may be a file's. Owns their layout; must not know tokenizers or samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.feed.mapped import let_go


@dataclass(frozen=True)
class Example:
    """One conversation: unsigned tokens [n], and bool [n]: is this token learnt?"""

    tokens: np.ndarray
    trained: np.ndarray

    def first_trained(self) -> int:
        """The index of the first token that is learnt from one before it; n if there is none."""
        after = self.trained[1:]
        return 1 + int(after.argmax()) if after.any() else len(self.tokens)


@dataclass(frozen=True)
class Examples:
    """Examples one after the other, in the order of their conversations. E: examples, C: conversations, N: tokens of all."""

    tokens_N: np.ndarray
    trained_N: np.ndarray
    #: Where each begins, and where the last ends: int64 [E + 1].
    starts: np.ndarray
    #: `Example.first_trained` of each: int64 [E].
    first_trained: np.ndarray
    #: Which is the first of each conversation, and how many there are: int64 [C + 1].
    conversations: np.ndarray

    @staticmethod
    def of(conversations: Iterable[Sequence[Example]]) -> Examples:
        """Those of some conversations, in memory."""
        groups = [list(group) for group in conversations]
        examples = [example for group in groups for example in group]
        return Examples(
            np.concatenate([np.empty(0, np.uint8), *(example.tokens for example in examples)]),
            np.concatenate([np.empty(0, bool), *(example.trained for example in examples)]),
            _edges(len(example.tokens) for example in examples),
            np.array([example.first_trained() for example in examples], np.int64),
            _edges(len(group) for group in groups),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Example:
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        return Example(self.tokens_N[begin:end], self.trained_N[begin:end])

    def let_go(self) -> None:
        """Give back the memory that reading them took, where they are a file's."""
        let_go(self.tokens_N)
        let_go(self.trained_N)

    @property
    def num_conversations(self) -> int:
        """C."""
        return len(self.conversations) - 1

    def part(self, first: int, stop: int) -> Examples:
        """The examples of the conversations from `first` to before `stop`, as views."""
        begin, end = int(self.conversations[first]), int(self.conversations[stop])
        return Examples(
            self.tokens_N,
            self.trained_N,
            self.starts[begin : end + 1],
            self.first_trained[begin:end],
            self.conversations[first : stop + 1] - begin,
        )


def _edges(sizes: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)
