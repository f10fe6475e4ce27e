"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat tensors, as separately rounded elementwise operations.

No fused kernel and no fused multiply-add, so that a CPU and a GPU that start from the same bits end on the same bits,
wherever the moments are and in whichever form (`moments.py`). Out of place: the tensors of an older version may still be
held by a live autograd graph.
"""

from __future__ import annotations

import math

import torch

from swarm.base.config import RunConfig
from swarm.stage.flat import empty_flat
from swarm.stage.layout import Layout
from swarm.stage.moments import FIRST, SECOND, Moments, OptimizerState, square_root

#: Elements that one pass handles: its temporaries stay in a CPU's cache, and take a small part of a GPU's memory.
_CHUNK = {"cpu": 2**16, "cuda": 2**25}


def moments_for(config: RunConfig, layout: Layout, *, dtype: torch.dtype, device: str, offload: bool = False) -> Moments:
    """How the moments are kept that a stage's peers share. In a local run they are the outer update's, always numbers.

    Args:
        config: `optimizer` says in which form.
        layout: of the stage's trained parameters.
        dtype: of the masters.
        device: of the masters.
        offload: the moments stay in main memory.
    """
    in_8_bits = config.optimizer == "adamw8bit" and config.mode == "sync"
    return Moments(layout, dtype=dtype, device=device, in_8_bits=in_8_bits, home="cpu" if offload else None)


def own_moments_for(config: RunConfig, shared: Moments) -> Moments:
    """How a peer's own moments are kept in a local run."""
    return shared.alike(in_8_bits=config.optimizer == "adamw8bit")


def adamw(
    config: RunConfig,
    moments: Moments,
    masters: torch.Tensor,
    gradient: torch.Tensor,
    state: OptimizerState,
    *,
    learning_rate: float,
    factor: float = 1.0,
) -> tuple[torch.Tensor, OptimizerState]:
    """One update.

    Args:
        config: betas, epsilon and weight decay.
        moments: how `state` is kept.
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
    new_masters = empty_flat(size_N, dtype=dtype, device=device)
    new = moments.empty()
    chunk = _CHUNK[device.type]
    scratch = [torch.empty(min(size_N, chunk), dtype=dtype, device=device) for _ in range(2 if moments.is_in_place else 4)]
    for piece in moments.parts(chunk):
        part = piece.elements
        scaled, other, *more = (buffer[: part.stop - part.start] for buffer in scratch)
        one, two = more or (scaled, scaled)
        torch.mul(gradient[part], factor, out=scaled)
        old = moments.read(state, FIRST, piece, one)
        first = torch.mul(old, config.beta1, out=moments.place(new, FIRST, piece, one))
        first.add_(torch.mul(scaled, 1.0 - config.beta1, out=other))
        old = moments.read(state, SECOND, piece, two)
        second = torch.mul(old, config.beta2, out=moments.place(new, SECOND, piece, two))
        second.add_(scaled.mul_(scaled).mul_(1.0 - config.beta2))
        moments.write(new, FIRST, piece, first)
        moments.write(new, SECOND, piece, second)
        denominator = square_root(second, out=scaled).mul_(root).add_(config.epsilon)
        step = torch.mul(first, size, out=other).div_(denominator)
        torch.mul(masters[part], 1.0 - learning_rate * config.weight_decay, out=new_masters[part]).sub_(step)
    return new_masters, OptimizerState(new, num_updates)
