"""AdamW (Loshchilov & Hutter, arXiv 1711.05101): Adam with decoupled weight decay."""

from __future__ import annotations

import torch

from swarm.stage.flat import empty_flat
from swarm.stage.moments import OptimizerState
from swarm.stage.optimizers.adam import Adam


class AdamW(Adam):
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
        new_masters = empty_flat(masters.numel(), dtype=masters.dtype, device=masters.device)
        kept = 1.0 - learning_rate * self.config.weight_decay

        def take(part: slice, moved: torch.Tensor) -> None:
            for some, has_decay in self.decays(part):
                torch.mul(masters[some], kept if has_decay else 1.0, out=new_masters[some])
            new_masters[part].sub_(moved)

        return new_masters, self.moved(total, state, size=learning_rate, factor=factor, take=take)


class AdamW8bit(AdamW):
    """AdamW whose moments are 8-bit codes."""

    in_8_bits = True
