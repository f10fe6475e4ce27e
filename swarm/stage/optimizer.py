"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat tensors, as separately rounded elementwise operations.

No fused kernel and no fused multiply-add, so that a CPU and a GPU that start from the same bits end on the same bits.
Out of place: the tensors of an older version may still be held by a live autograd graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from swarm.base.config import RunConfig


@dataclass(frozen=True)
class OptimizerState:
    """First and second moment, flat, in the masters' dtype, after `num_updates` updates."""

    first: torch.Tensor
    second: torch.Tensor
    num_updates: int

    @classmethod
    def zero(cls, masters: torch.Tensor) -> OptimizerState:
        return cls(torch.zeros_like(masters), torch.zeros_like(masters), 0)


def adamw(
    config: RunConfig, masters: torch.Tensor, gradient: torch.Tensor, state: OptimizerState, *, learning_rate: float
) -> tuple[torch.Tensor, OptimizerState]:
    """One update.

    Args:
        config: betas, epsilon and weight decay.
        masters: flat [N] parameters, fp32 or fp64; not modified.
        gradient: flat [N], same dtype; used as scratch space afterwards.
        state: not modified.
        learning_rate: of this step.

    Returns:
        New masters and new state.
    """
    num_updates = state.num_updates + 1
    first = (state.first * config.beta1).add_(gradient * (1.0 - config.beta1))
    second = (state.second * config.beta2).add_(gradient.mul_(gradient).mul_(1.0 - config.beta2))
    denominator = second.sqrt().div_(math.sqrt(1.0 - config.beta2**num_updates)).add_(config.epsilon)
    step = (first * (learning_rate / (1.0 - config.beta1**num_updates))).div_(denominator)
    return (masters * (1.0 - learning_rate * config.weight_decay)).sub_(step), OptimizerState(first, second, num_updates)
