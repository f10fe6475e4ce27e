"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat tensors, as separately rounded elementwise operations.

No fused kernel and no fused multiply-add, so that a CPU and a GPU that start from the same bits end on the same bits,
wherever the moments are and in whichever form (`moments.py`).
"""

from __future__ import annotations

import math

import torch

from swarm.stage.flat import empty_flat
from swarm.stage.moments import FIRST, SECOND, OptimizerState, square_root
from swarm.stage.optimizers.interface import Optimizer

#: Elements that one pass handles: its temporaries stay in a CPU's cache, and take a small part of a GPU's memory.
_CHUNK = {"cpu": 2**16, "cuda": 2**25}


class AdamW(Optimizer):
    """AdamW with the configuration's betas, epsilon and weight decay."""

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
        """Make one update; bias is corrected by the state's own number of updates, not by `step`."""
        config, moments = self.config, self.moments
        num_updates = state.num_updates + 1
        size = learning_rate / (1.0 - config.beta1**num_updates)
        root = 1.0 / math.sqrt(1.0 - config.beta2**num_updates)  # a GPU divides by a number in just this way
        num_elements, dtype, device = masters.numel(), masters.dtype, masters.device
        new_masters = empty_flat(num_elements, dtype=dtype, device=device)
        new = moments.empty()
        chunk = _CHUNK[device.type]
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
            moved = torch.mul(first, size, out=other).div_(denominator)
            torch.mul(masters[part], 1.0 - learning_rate * config.weight_decay, out=new_masters[part]).sub_(moved)
        return new_masters, OptimizerState(new, num_updates)


class AdamW8bit(AdamW):
    """AdamW whose moments are 8-bit codes."""

    in_8_bits = True
