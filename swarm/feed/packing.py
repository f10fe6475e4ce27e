"""Examples of several lengths -> samples of one length. Owns the packing; must not know tokenizers or files.

Several short examples share one sample: `position_ids` start again at 0 with each, which is how the models know that nothing
must pass from one to the next. Where a model cannot keep them apart, the run says `packing = False`. An example of n tokens
fills n - 1 places: each place holds a token, and the label is the token after it in the same example, or -100 where that is
not trained. What is left of a sample is padding that nothing looks at: it comes last, and its labels are -100.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.feed.chat import Example
from swarm.feed.samples import IGNORED_LABEL, Batch, bounds_of

logger = logging.getLogger(__name__)

#: Samples that are filled at a time: an example goes into the first one that has room.
_OPEN_SAMPLES = 64


@dataclass
class _Open:
    room: int
    members: list[int]


class PackedExamples:
    """`input_ids`, `position_ids` and `labels`, int64 [B, T].

    Args:
        examples: cut to `sequence_length` + 1 tokens; left out, and counted, if nothing trained is left then.
        sequence_length: T.
        packed: False gives each example a sample of its own.
    """

    def __init__(self, examples: Iterable[Example], sequence_length: int, *, packed: bool) -> None:
        self._length = sequence_length
        self._examples: list[Example] = []
        self.num_cut = self.num_left_out = 0
        for example in examples:
            cut = Example(example.tokens[: sequence_length + 1], example.trained[: sequence_length + 1])
            if not cut.trained[1:].any():
                self.num_left_out += 1
                continue
            self.num_cut += len(cut.tokens) < len(example.tokens)
            self._examples.append(cut)
        self._samples = self._pack(packed)
        if self.num_cut or self.num_left_out:
            logger.warning(
                "%d examples are cut to sequence_length %d, %d are left out: nothing to learn is left of them",
                self.num_cut,
                sequence_length,
                self.num_left_out,
            )

    def _pack(self, packed: bool) -> list[list[int]]:
        """First fit, in the order of the examples; a sample that is full, or the oldest of too many, is closed."""
        if not packed:
            return [[index] for index in range(len(self._examples))]
        done: list[list[int]] = []
        filling: list[_Open] = []
        for index, example in enumerate(self._examples):
            size = len(example.tokens) - 1
            place = next((sample for sample in filling if sample.room >= size), None)
            if place is None:
                if len(filling) == _OPEN_SAMPLES:
                    done.append(filling.pop(0).members)
                place = _Open(self._length, [])
                filling.append(place)
            place.room -= size
            place.members.append(index)
            if not place.room:
                filling.remove(place)
                done.append(place.members)
        return done + [sample.members for sample in filling]

    def cost_apart(self) -> str:
        """What a sample of its own for each example takes, beside these samples, as part of a sentence."""
        num_tokens, num_alone, num_shared = sum(len(e.tokens) - 1 for e in self._examples), len(self._examples), len(self)
        part_alone, part_shared = (num_tokens / max(1, number * self._length) for number in (num_alone, num_shared))
        return (
            f"{num_alone} examples take {num_alone} samples, of which {part_alone:.0%} are tokens and the rest is padding, "
            f"instead of {num_shared} with {part_shared:.0%}"
        )

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, indices: np.ndarray) -> Batch:
        """The samples with these indices, as arrays of shape [len(indices), T]."""
        shape = (len(indices), self._length)
        inputs_BT, labels_BT = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        positions_BT = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            start = 0
            for member in self._samples[index]:
                example = self._examples[member]
                end = start + len(example.tokens) - 1
                inputs_BT[row, start:end] = example.tokens[:-1]
                labels_BT[row, start:end] = np.where(example.trained[1:], example.tokens[1:].astype(np.int64), IGNORED_LABEL)
                # The padding goes on with the last example's positions: it needs no boundary of its own.
                positions_BT[row, start:] = np.arange(self._length - start)
                start = end
        return Batch({"input_ids": inputs_BT, "position_ids": positions_BT}, {"labels": labels_BT})

    def update(self, digest: Any) -> None:
        """Feed all values to a digest."""
        digest.update(f"examples {len(self._examples)}\0".encode())
        for example in self._examples:
            digest.update(f"{len(example.tokens)}\0".encode())
            digest.update(example.tokens.astype("<u4").tobytes())
            digest.update(np.packbits(example.trained).tobytes())

    def token_bounds(self) -> tuple[int, int] | None:
        """The lowest and the highest token."""
        found = [bounds for example in self._examples if (bounds := bounds_of(example.tokens)) is not None]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None
