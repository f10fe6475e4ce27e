"""PowerSGD (Vogels et al., arXiv 1905.13727, algorithm 1): each matrix as a product of two thin ones, with error feedback.

M is the gradient plus the residual. The group sums P = M Q, everyone orthonormalises it alike, the group sums Q = M^T P,
and the average is P Q^T. A peer keeps the residual M - P Q_own^T of its own matrix, the local form, which stays bounded
when members come and go. Q starts from the last committed one; a newcomer, and the first step, draw it from the run's seed.
Vectors, and matrices that would not get smaller, travel as they are, in the first exchange.

Everyone must end on the same bits: what is the same for all (the sums) goes through elementwise operations and sums in a
fixed order only, never through a matrix product, whose order depends on the machine.

Invariant: average + mean of residuals = mean of M, whatever Q is.
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
    residual: torch.Tensor | None
    factors: list[torch.Tensor]


class PowerSgd:
    """Each matrix as a product of two thin ones; see `Compressor`."""

    keeps_back: ClassVar[bool] = True

    def __init__(self, layout: Layout, *, rank: int, seed: int) -> None:
        """Have nothing kept back yet.

        Args:
            layout: of the flat vector.
            rank: columns of the thin matrices.
            seed: of the run: the first Q is the same at every peer.
        """
        self._num_elements = layout.num_elements
        self._rank = rank
        self._seed = seed
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
        #: [N]: what the others have not heard of; None: nothing.
        self.residual: torch.Tensor | None = None
        self._factors: list[torch.Tensor] = []

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
            mine = flat if self.residual is None else flat + self.residual
        if len(contribution.tokens) == 1:  # nothing travels
            whole = yield GroupVector(self._num_elements, mine)
            return Compressed(whole.total, _Feedback(None if mine is not None else self.residual, self._factors))
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
        residual = self.residual
        if mine is not None and own is not None:
            residual = torch.zeros_like(mine)
            for x, p, q in zip(self._matrices, left, own, strict=True):
                x.of(residual).copy_(x.of(mine) - p @ q.T)
        return Compressed(total, _Feedback(residual, right))

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
        self.residual, self._factors = state.residual, state.factors

    def forget(self) -> None:
        """Drop what was kept back."""
        self.residual, self._factors = None, []


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
