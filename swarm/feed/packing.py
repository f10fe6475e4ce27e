"""Examples of several lengths -> samples of one length. Owns the packing; must not know tokenizers or files.

Several short examples share one sample: `position_ids` start again at 0 with each, which is how the models know that nothing
must pass from one to the next. Where a model cannot keep them apart, the run says `packing = False`. An example of n tokens
fills n - 1 places: each place holds a token, and the label is the token after it in the same example, or -100 where that is
not trained. What is left of a sample is padding that nothing looks at: it comes last, and its labels are -100.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.feed.examples import Examples
from swarm.feed.memo import NO_MEMO, Memo
from swarm.feed.samples import IGNORED_LABEL, Batch, bounds_of

logger = logging.getLogger(__name__)

#: Samples that are filled at a time: an example goes into the first one that has room.
_OPEN_SAMPLES = 64
#: Examples that are read one after the other before the memory that it took is given back.
_LET_GO_EVERY = 4096


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
        memo: remembers which examples share a sample.
    """

    def __init__(self, examples: Examples, sequence_length: int, *, packed: bool, memo: Memo = NO_MEMO) -> None:
        self._length = sequence_length
        self._examples = examples
        lengths = np.diff(examples.starts)
        #: Tokens of each example that are taken; the indices of those that have something to learn in them.
        self._sizes = np.minimum(lengths, sequence_length + 1)
        self._kept = np.flatnonzero(examples.first_trained < self._sizes)
        self.num_cut = int((lengths[self._kept] > sequence_length + 1).sum())
        self.num_left_out = len(examples) - len(self._kept)
        plan = memo.arrays(f"packing 1 {sequence_length} {packed}", lambda: self._plan(packed))
        #: The examples of all samples one after the other, and where those of each sample begin.
        self._members, self._starts = plan["members"], plan["starts"]
        self.num_trained_tokens = int(plan["trained"])
        if self.num_cut or self.num_left_out:
            logger.warning(
                "%d examples are cut to sequence_length %d, %d are left out: nothing to learn is left of them",
                self.num_cut,
                sequence_length,
                self.num_left_out,
            )

    @property
    def num_tokens(self) -> int:
        """Places of samples that hold a token rather than padding."""
        return int(self._sizes[self._kept].sum()) - len(self._kept)

    def _plan(self, packed: bool) -> dict[str, np.ndarray]:
        members, starts = array("q"), array("q", [0])
        for sample in self._pack(packed):
            members.extend(sample)
            starts.append(len(members))
        trained = sum(int(np.count_nonzero(trained[1:])) for _, trained in self._all())
        return {"members": np.array(members, np.int64), "starts": np.array(starts, np.int64), "trained": np.array(trained)}

    def _pack(self, packed: bool) -> Iterable[list[int]]:
        """First fit, in the order of the examples; a sample that is full, or the oldest of too many, is closed."""
        if not packed:
            yield from ([int(index)] for index in self._kept)
            return
        filling: list[_Open] = []
        for index in map(int, self._kept):
            size = int(self._sizes[index]) - 1
            place = next((sample for sample in filling if sample.room >= size), None)
            if place is None:
                if len(filling) == _OPEN_SAMPLES:
                    yield filling.pop(0).members
                place = _Open(self._length, [])
                filling.append(place)
            place.room -= size
            place.members.append(index)
            if not place.room:
                filling.remove(place)
                yield place.members
        yield from (sample.members for sample in filling)

    def _all(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The examples that are kept, in their order."""
        for number, index in enumerate(map(int, self._kept)):
            yield self._example(index)
            if number % _LET_GO_EVERY == 0:
                self._examples.let_go()
        self._examples.let_go()

    def _example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and whether they are trained, cut."""
        example, size = self._examples[index], int(self._sizes[index])
        return example.tokens[:size], example.trained[:size]

    def cost_apart(self) -> str:
        """What a sample of its own for each example takes, beside these samples, as part of a sentence."""
        num_alone, num_shared = len(self._kept), len(self)
        part_alone, part_shared = (self.num_tokens / max(1, number * self._length) for number in (num_alone, num_shared))
        return (
            f"{num_alone} examples take {num_alone} samples, of which {part_alone:.0%} are tokens and the rest is padding, "
            f"instead of {num_shared} with {part_shared:.0%}"
        )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def take(self, indices: np.ndarray) -> Batch:
        """The samples with these indices, as arrays of shape [len(indices), T]."""
        shape = (len(indices), self._length)
        inputs_BT, labels_BT = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        positions_BT = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            start = 0
            for member in self._members[self._starts[index] : self._starts[index + 1]]:
                tokens, trained = self._example(int(member))
                end = start + len(tokens) - 1
                inputs_BT[row, start:end] = tokens[:-1]
                labels_BT[row, start:end] = np.where(trained[1:], tokens[1:].astype(np.int64), IGNORED_LABEL)
                # The padding goes on with the last example's positions: it needs no boundary of its own.
                positions_BT[row, start:] = np.arange(self._length - start)
                start = end
        self._examples.let_go()
        return Batch({"input_ids": inputs_BT, "position_ids": positions_BT}, {"labels": labels_BT})

    def update(self, digest: Any) -> None:
        """Feed all values to a digest."""
        digest.update(f"examples {len(self._kept)}\0".encode())
        for tokens, trained in self._all():
            digest.update(f"{len(tokens)}\0".encode() + tokens.astype("<u4").tobytes() + np.packbits(trained).tobytes())

    def token_bounds(self) -> tuple[int, int] | None:
        """The lowest and the highest token."""
        found = [bounds for tokens, _ in self._all() if (bounds := bounds_of(tokens)) is not None]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None
