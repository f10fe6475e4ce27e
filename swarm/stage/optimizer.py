"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat tensors, as separately rounded elementwise operations.

No fused kernel and no fused multiply-add, so that a CPU and a GPU that start from the same bits end on the same bits.
Out of place: the tensors of an older version may still be held by a live autograd graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from swarm.base.config import RunConfig
from swarm.stage.flat import empty_flat


@dataclass(frozen=True)
class OptimizerState:
    """First and second moment, flat, in the masters' dtype, after `num_updates` updates."""

    first: torch.Tensor
    second: torch.Tensor
    num_updates: int

    @classmethod
    def zero(cls, masters: torch.Tensor) -> OptimizerState:
        """Before the first update. On a CPU the moments take memory only once they are written to."""
        return cls(_zeros_like(masters), _zeros_like(masters), 0)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return torch.zeros_like(tensor)
    return torch.from_numpy(np.zeros(tensor.shape, dtype=tensor.numpy().dtype))


#: Elements that one pass handles: its temporaries stay in a CPU's cache, and take a small part of a GPU's memory.
_CHUNK = {"cpu": 2**16, "cuda": 2**25}


def adamw(
    config: RunConfig, masters: torch.Tensor, gradient: torch.Tensor, state: OptimizerState, *, learning_rate: float,
    factor: float = 1.0,
) -> tuple[torch.Tensor, OptimizerState]:  # fmt: skip
    """One update.

    Args:
        config: betas, epsilon and weight decay.
        masters: flat [N] parameters, fp32 or fp64; not modified.
        gradient: flat [N], same dtype; not modified.
        state: not modified.
        learning_rate: of this step.
        factor: the gradient is multiplied with it first.

    Returns:
        New masters and new state.
    """
    num_updates = state.num_updates + 1
    size = learning_rate / (1.0 - config.beta1**num_updates)
    root = 1.0 / math.sqrt(1.0 - config.beta2**num_updates)  # a GPU divides by a number in just this way
    size_N, dtype, device = masters.numel(), masters.dtype, masters.device
    new_masters, new_first, new_second = (empty_flat(size_N, dtype=dtype, device=device) for _ in range(3))
    chunk = min(size_N, _CHUNK[device.type])
    one, two = (torch.empty(chunk, dtype=dtype, device=device) for _ in range(2))
    for start in range(0, size_N, chunk):
        part = slice(start, start + chunk)
        scaled, other = one[: size_N - start], two[: size_N - start]
        torch.mul(gradient[part], factor, out=scaled)
        first = torch.mul(state.first[part], config.beta1, out=new_first[part])
        first.add_(torch.mul(scaled, 1.0 - config.beta1, out=other))
        second = torch.mul(state.second[part], config.beta2, out=new_second[part])
        second.add_(scaled.mul_(scaled).mul_(1.0 - config.beta2))
        denominator = _sqrt(second, out=scaled).mul_(root).add_(config.epsilon)
        step = torch.mul(first, size, out=other).div_(denominator)
        torch.mul(masters[part], 1.0 - learning_rate * config.weight_decay, out=new_masters[part]).sub_(step)
    return new_masters, OptimizerState(new_first, new_second, num_updates)


def _sqrt(tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Correctly rounded. On a CPU torch takes it from a vector library that is off by a bit once in 150 times."""
    if tensor.device.type != "cpu":
        return torch.sqrt(tensor, out=out)
    np.sqrt(tensor.numpy(), out=out.numpy())
    return out
