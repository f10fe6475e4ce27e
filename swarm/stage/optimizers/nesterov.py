"""SGD with Nesterov momentum: the outer update of local runs (arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

import torch

from swarm.stage.moments import FIRST, OptimizerState
from swarm.stage.optimizers.interface import Optimizer


class Nesterov(Optimizer):
    """Velocity and parameters: v = m v + d; p = p - lr (d + m v), with the configuration's outer rate and momentum.

    The sum is that of tokens times `outer - own copy`. The first moment, as numbers, is the velocity; the second is not used.
    """

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
        """Update the fragment of `step`; the other parameters stay, and `learning_rate` is that of the inner updates."""
        config = self.config
        fragment = slice(step % config.fragments, None, config.fragments)
        mean = total[fragment] * factor
        before = state.tensors[FIRST]
        velocity = before[fragment].to(masters.device) * config.outer_momentum
        velocity += mean
        masters, first = masters.clone(), before.clone()
        first[fragment] = velocity
        masters[fragment] -= velocity.mul_(config.outer_momentum).add_(mean).mul_(config.outer_learning_rate)
        return masters, OptimizerState({**state.tensors, FIRST: first}, state.num_updates + 1)
