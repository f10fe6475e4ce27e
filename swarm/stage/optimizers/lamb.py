"""LAMB (You et al., arXiv 1904.00962, algorithm 2): Adam whose step is as long, for each tensor, as the tensor itself.

A stage holds whole tensors, and every peer of it updates all of them, so a tensor's norms are known where they are needed.
They must be the same bits at every peer, and so are summed by elementwise additions in a fixed order.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from swarm.stage.flat import empty_flat
from swarm.stage.moments import OptimizerState
from swarm.stage.optimizers.adam import Adam

#: Elements whose squares are added up at a time, the same on every device: a sum's order must not depend on it.
_BLOCK = 2**16


class Lamb(Adam):
    """LAMB with the configuration's betas, epsilon and weight decay; a tensor's norm is not bounded before it scales the step."""

    def update(
        self,
        masters: torch.Tensor,
        total: torch.Tensor,
        state: OptimizerState,
        *,
        step: int,
        learning_rate: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, OptimizerState]:
        """Make one update; where a tensor or its direction is zero, the direction is taken as it is."""
        new_masters = empty_flat(masters.numel(), dtype=masters.dtype, device=masters.device)
        decay = self.config.weight_decay

        def take(part: slice, direction: torch.Tensor) -> None:
            for some, has_decay in self.decays(part):
                if has_decay:
                    mine = slice(some.start - part.start, some.stop - part.start)
                    direction[mine].add_(torch.mul(masters[some], decay))
            new_masters[part].copy_(direction)

        new_state = self.moved(total, state, size=1.0, factor=factor, take=take)
        offsets = self.moments.layout.trained.offsets
        tensors = [slice(start, end) for start, end in pairwise(offsets) if start < end]
        squares = [squares_of(vector[some]) for some in tensors for vector in (masters, new_masters)]
        norms = [math.sqrt(square) for square in (torch.stack(squares).tolist() if squares else ())]
        for some, own, way in zip(tensors, norms[::2], norms[1::2], strict=True):
            trust = own / way if own > 0.0 and way > 0.0 else 1.0
            direction = new_masters[some].mul_(learning_rate * trust)
            torch.sub(masters[some], direction, out=direction)
        return new_masters, new_state


def squares_of(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of `values` [n] as a 0-d fp64 tensor on their device, to the bit the same on every device."""
    sums = [
        _folded(values[start : start + _BLOCK].to(torch.float64, copy=True).square_())
        for start in range(0, values.numel(), _BLOCK)
    ]
    return _folded(torch.stack(sums)) if sums else torch.zeros((), dtype=torch.float64, device=values.device)


def _folded(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` [n], by adding the second half to the first until one is left; they are overwritten."""
    while values.numel() > 1:
        half = (values.numel() + 1) // 2
        values[: values.numel() - half].add_(values[half:])
        values = values[:half]
    return values[0]
