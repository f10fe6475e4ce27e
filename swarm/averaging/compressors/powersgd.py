"""PowerSGD (Vogels et al., arXiv 1905.13727, algorithm 1): each matrix as a product of two thin ones, with error feedback.

M is the gradient plus the error. The group sums P = M Q, everyone orthonormalises it alike, the group sums Q = M^T P, and the
average is P Q^T. A peer keeps the error M - P Q_own^T of its own matrix, the local form, which stays bounded when members
come and go: who leaves takes its error with it, who comes has none. In a local run the error stays in the peer's own copy, as
what others have not heard of: its next contribution has it in it.
Q starts from the last committed one; a newcomer, and the first step, draw it from the run's seed.
Vectors, and matrices that would not get smaller, travel as they are, in the first exchange.

Everyone must end on the same bits: what is the same for all (the sums) goes through elementwise operations and sums in a
fixed order only, never through a matrix product, whose order depends on the machine.

Invariant: average + mean of errors = mean of M, whatever Q is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from swarm.averaging.compressors.interface import Compressed, Compression, Contribution
from swarm.averaging.reduction import GroupVector
from swarm.stage.layout import Layout


@dataclass(frozen=True)
class _Matrix:
    """One compressed parameter: elements `start:end` of the flat vector as [rows, columns]."""

    start: int
    end: int
    rows: int
    columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.end].view(self.rows, self.columns)


@dataclass(frozen=True)
class _Feedback:
    error: torch.Tensor | None
    factors: list[torch.Tensor]


class PowerSgd:
    """Each matrix as a product of two thin ones; see `Compressor`."""

    keeps_back: ClassVar[bool] = True

    def __init__(self, layout: Layout, *, rank: int, seed: int, in_copy: bool = False) -> None:
        """Have nothing kept back yet.

        Args:
            layout: of the flat vector.
            rank: columns of the thin matrices.
            seed: of the run: the first Q is the same at every peer.
            in_copy: contributions are tokens times what a copy moved by, and the copy keeps the error.
        """
        self._num_elements = layout.num_elements
        self._rank = rank
        self._seed = seed
        self._in_copy = in_copy
        self._matrices: list[_Matrix] = []
        #: Elements `start:end` that travel as they are.
        self._rest: list[tuple[int, int]] = []
        for start, end, shape in zip(layout.offsets, layout.offsets[1:], layout.shapes, strict=False):
            rows = shape[0] if len(shape) > 1 else 1
            columns = (end - start) // max(1, rows)
            if len(shape) > 1 and (rows + columns) * rank * 2 < end - start:
                self._matrices.append(_Matrix(start, end, rows, columns))
            else:
                self._rest.append((start, end))
        #: [N]: what the others have not heard of, in units of contributions, or of the copy that keeps it; None: nothing.
        self.error: torch.Tensor | None = None
        self._factors: list[torch.Tensor] = []

    @property
    def residual(self) -> torch.Tensor | None:
        """See `Compressor`."""
        return self.error if self._in_copy else None

    def _first_factors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        if not self._factors:
            generator = np.random.Generator(np.random.PCG64(self._seed))
            drawn = [generator.standard_normal((x.columns, self._rank)) for x in self._matrices]
            self._factors = [torch.from_numpy(values) for values in drawn]
        return [factor.to(dtype) for factor in self._factors]

    def compress(self, contribution: Contribution) -> Compression:
        """Sum the two thin factors of every matrix, in two exchanges."""
        flat = contribution.flat
        mine = None
        if flat is not None:
            mine = flat if self.error is None or self._in_copy else flat + self.error
        if len(contribution.tokens) == 1:  # nothing travels
            whole = yield GroupVector(self._num_elements, mine)
            return Compressed(whole.total, _Feedback(None if mine is not None else self.error, self._factors))
        if mine is not None:
            right = self._first_factors(mine.dtype)
            lefts = [(x.of(mine) @ factor).view(-1) for x, factor in zip(self._matrices, right, strict=True)]
            mine_sent = torch.cat([*lefts, *(mine[start:end] for start, end in self._rest)])
        first = yield GroupVector(self._num_lefts + self._num_rest, None if mine is None else mine_sent)
        left = [_orthonormal(part) for part in self._split(first.total, [x.rows for x in self._matrices])]
        own = None
        if mine is not None:
            own = [x.of(mine).T @ p for x, p in zip(self._matrices, left, strict=True)]
        num_rights = sum(x.columns for x in self._matrices) * self._rank
        sent = None if own is None else torch.cat([part.reshape(-1) for part in own] or [torch.empty(0)])
        second = yield GroupVector(num_rights, sent)
        right = list(self._split(second.total, [x.columns for x in self._matrices]))
        total = torch.empty(self._num_elements, dtype=first.total.dtype)
        at = self._num_lefts
        for start, end in self._rest:
            total[start:end] = first.total[at : at + end - start]
            at += end - start
        for x, p, q in zip(self._matrices, left, right, strict=True):
            x.of(total).copy_(_product(p, q))
        error = self.error
        if mine is not None and own is not None:
            error = torch.zeros_like(mine)
            for x, p, q in zip(self._matrices, left, own, strict=True):
                x.of(error).copy_(x.of(mine) - p @ q.T)
            if self._in_copy:
                error /= contribution.tokens[contribution.me]
        return Compressed(total, _Feedback(error, right))

    @property
    def _num_lefts(self) -> int:
        return sum(x.rows for x in self._matrices) * self._rank

    @property
    def _num_rest(self) -> int:
        return sum(end - start for start, end in self._rest)

    def _split(self, flat: torch.Tensor, lengths: list[int]) -> Iterator[torch.Tensor]:
        """Matrices [length, rank] that lie one after another in `flat`."""
        at = 0
        for length in lengths:
            yield flat[at : at + length * self._rank].view(length, self._rank)
            at += length * self._rank

    def adopt(self, state: _Feedback) -> None:
        """Keep what the committed compression left unsent."""
        self.error, self._factors = state.error, state.factors

    def forget(self) -> None:
        """Drop what was kept back."""
        self.error, self._factors = None, []


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt over the columns of [n, r]; a column that depends on those before it becomes 0."""
    columns = matrix.double().numpy().T.copy()
    for i, column in enumerate(columns):
        norm = np.sqrt(np.square(column).sum())
        for _ in range(2):  # twice is enough (Kahan): rounding leaves columns that are not orthogonal
            for other in columns[:i]:
                column -= (column * other).sum() * other
        rest = np.sqrt(np.square(column).sum())
        column[:] = column / rest if rest > 1e-9 * norm and norm > 0 else 0.0
    return torch.from_numpy(columns.T.copy()).to(matrix.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right.T`, one rank after another, each multiplication and addition rounded by itself."""
    total = left[:, :1] * right[:, :1].T
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[:, k : k + 1].T
    return total
