"""Differences of models, a fragment of the parameters at a time: streaming DiLoCo (arXiv 2501.18512) and CocktailSGD.

Fragment `step % P` of the P holds every P-th element. Each peer's own copy keeps what was not sent: the other fragments
wait for their turn, and what a sparse code left out stays in the copy too. So does, at the reducer, what the code lost of
the sum; it is added to the next one (CocktailSGD, Wang et al., ICML 2023, section 3). With P = 10 and a code that keeps a
fifth of the elements a parameter takes 0.1825 bits. For local runs: contributions are `tokens * (outer - own copy)`.

Invariant: the token-weighted mean of own copies, plus what reducers carry, is the same before and after a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.averaging.compressors.interface import Compressed, Compression, Contribution
from swarm.averaging.reduction import Code, GroupVector


@dataclass(frozen=True)
class _KeptBack:
    residual: torch.Tensor | None
    carry: torch.Tensor | None


class Fragments:
    """One fragment of the parameters in each step; see `Compressor`."""

    keeps_back: ClassVar[bool] = True

    def __init__(self, num_elements: int, num_fragments: int, code: Code = Code()) -> None:
        self._num_elements = num_elements
        self._num_fragments = num_fragments
        self._code = code
        #: [N]: what this peer's copy has, as `outer - own copy`, and the others have not heard of; None: nothing.
        self.residual: torch.Tensor | None = None
        #: [N]: what this peer as a reducer owes to the others, in units of the mean; None: nothing.
        self.carry: torch.Tensor | None = None

    def compress(self, contribution: Contribution) -> Compression:
        """Sum the fragment whose turn it is, in one exchange."""
        flat, tokens, all_tokens = contribution.flat, contribution.tokens[contribution.me], sum(contribution.tokens)
        fragment = slice(contribution.step % self._num_fragments, None, self._num_fragments)
        num_elements = len(range(self._num_elements)[fragment])
        values = None if flat is None else flat[fragment].contiguous()
        carry = None if self.carry is None else self.carry[fragment] * all_tokens
        vector = GroupVector(num_elements, values, self._code, carry)
        result = yield vector
        total = torch.zeros(self._num_elements, dtype=result.total.dtype)
        total[fragment] = result.total
        residual, new_carry = self.residual, self.carry
        if flat is not None and (self._num_fragments > 1 or result.counted is not None):
            residual = flat / tokens
            left = 0.0 if result.counted is None or values is None else (values - result.counted) / tokens
            residual[fragment] = left
        if result.lost is not None:
            new_carry = torch.zeros_like(total) if self.carry is None else self.carry.clone()
            owed = new_carry[fragment]
            owed[slice(*result.own)] = result.lost / all_tokens
            new_carry[fragment] = owed
        return Compressed(total, _KeptBack(residual, new_carry))

    def adopt(self, state: _KeptBack) -> None:
        """Keep what the committed compression left unsent."""
        self.residual, self.carry = state.residual, state.carry

    def forget(self) -> None:
        """Drop what was kept back."""
        self.residual = self.carry = None
