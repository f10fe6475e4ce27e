"""Adam's moments and its direction on flat tensors, as separately rounded elementwise operations.

No fused kernel and no fused multiply-add, so that a CPU and a GPU that start from the same bits end on the same bits,
wherever the moments are and in whichever form (`moments.py`). Owns the pass over all elements; what becomes of the
direction is up to `adamw.py` and `lamb.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from swarm.stage.moments import FIRST, SECOND, OptimizerState, square_root
from swarm.stage.optimizers.interface import Optimizer

#: Elements that one pass handles: its temporaries stay in a CPU's cache, and take a small part of a GPU's memory.
CHUNK = {"cpu": 2**16, "cuda": 2**25}


class Adam(Optimizer):
    """The moments of Adam, whatever is done with them."""

    def moved(
        self,
        total: torch.Tensor,
        state: OptimizerState,
        *,
        size: float,
        factor: float,
        take: Callable[[slice, torch.Tensor], object],
    ) -> OptimizerState:
        """Make new moments, a part of the elements after another.

        Args:
            total, state, factor: see `Optimizer.update`.
            size: what the first moment is multiplied with, beside the correction of its bias.
            take: gets each part, and its `size` times first moment over root of second one, which it may change.

        Returns:
            The new state; bias is corrected by its own number of updates.
        """
        config, moments = self.config, self.moments
        num_updates = state.num_updates + 1
        size = size / (1.0 - config.beta1**num_updates)
        root = 1.0 / math.sqrt(1.0 - config.beta2**num_updates)  # a GPU divides by a number in just this way
        num_elements, dtype, device = total.numel(), total.dtype, total.device
        new = moments.empty()
        chunk = CHUNK[device.type]
        scratch = [
            torch.empty(min(num_elements, chunk), dtype=dtype, device=device) for _ in range(2 if moments.is_in_place else 4)
        ]
        for piece in moments.parts(chunk):
            part = piece.elements
            scaled, other, *more = (buffer[: part.stop - part.start] for buffer in scratch)
            one, two = more or (scaled, scaled)
            torch.mul(total[part], factor, out=scaled)
            old = moments.read(state, FIRST, piece, one)
            first = torch.mul(old, config.beta1, out=moments.place(new, FIRST, piece, one))
            first.add_(torch.mul(scaled, 1.0 - config.beta1, out=other))
            old = moments.read(state, SECOND, piece, two)
            second = torch.mul(old, config.beta2, out=moments.place(new, SECOND, piece, two))
            second.add_(scaled.mul_(scaled).mul_(1.0 - config.beta2))
            moments.write(new, FIRST, piece, first)
            moments.write(new, SECOND, piece, second)
            denominator = square_root(second, out=scaled).mul_(root).add_(config.epsilon)
            take(part, torch.mul(first, size, out=other).div_(denominator))
        return OptimizerState(new, num_updates)
