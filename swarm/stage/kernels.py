"""What the accumulator does on a CUDA device, without asking the device for anything.

Triton kernels, since both are bound by memory: one looks at gradients (2 bytes an element in bf16), the other adds the
gradients of up to `MAX_TOGETHER` micro-batches in one pass over the fp32 sum (2 bytes for each, and 8 for the sum).
Where Triton is missing, plain torch operations give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

MAX_TOGETHER = 4
_BLOCK = 4096

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Summand:
    """One micro-batch's gradients: they count, times `factor`, if `is_valid` (int32 [1] on the device) is 1."""

    gradients: Gradients
    is_valid: torch.Tensor
    factor: float


def all_within(gradients: Gradients, largest: float, device: torch.device | str) -> torch.Tensor:
    """1 if no element of any gradient is NaN or beyond `largest`, else 0: int32 [1] on `device`."""
    result = torch.ones(1, dtype=torch.int32, device=device)
    for gradient in gradients:
        if gradient is None or gradient.numel() == 0:
            continue
        if gradient.is_cuda and gradient.is_contiguous() and _kernels() is not None:
            _launch(_kernels().look, gradient.numel(), gradient, result, largest)
        else:
            low, high = torch.aminmax(gradient)  # NaN if any element is
            result *= ((low >= -largest) & (high <= largest)).to(torch.int32)
    return result


def add_together(totals: Sequence[torch.Tensor], summands: Sequence[Summand]) -> None:
    """Add up to `MAX_TOGETHER` summands to `totals`, in their order, in place.

    Raises:
        ValueError: a shape or the number of gradients is wrong.
    """
    for summand in summands:
        shapes = [total.shape for total in totals]
        if len(summand.gradients) != len(shapes):
            raise ValueError(f"{len(summand.gradients)} gradients for {len(shapes)} parameters")
        for gradient, shape in zip(summand.gradients, shapes, strict=True):
            if gradient is not None and gradient.shape != shape:
                raise ValueError(f"a gradient of shape {tuple(gradient.shape)} where {tuple(shape)} belongs")
    for position, total in enumerate(totals):
        given = [(s.gradients[position], s.is_valid, s.factor) for s in summands]
        parts = [(gradient, valid, factor) for gradient, valid, factor in given if gradient is not None]
        if total.is_cuda and all(g.is_contiguous() for g, _, _ in parts) and _kernels() is not None:
            _add_kernel(total, parts)
        else:
            for gradient, valid, factor in parts:
                zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
                total.add_(torch.where(valid.bool(), gradient, zero), alpha=factor)


def _add_kernel(total: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor, float]]) -> None:
    if not parts or not total.numel():
        return
    filled = [*parts, *[parts[0]] * (MAX_TOGETHER - len(parts))]  # the kernel looks at the first `count` only
    arguments = [argument for part in filled for argument in part]
    _launch(_kernels().add, total.numel(), total, *arguments, count=len(parts))


def _launch(kernel: Any, num_elements: int, *arguments: Any, **constants: int) -> None:
    kernel[(-(-num_elements // _BLOCK),)](*arguments, num_elements, block=_BLOCK, num_warps=8, **constants)


@dataclass(frozen=True)
class _Kernels:
    look: Any
    add: Any


@cache
def _kernels() -> Any:
    """None where Triton is not installed."""
    try:
        from swarm.stage import triton_kernels
    except ImportError:
        return None
    return _Kernels(triton_kernels.look, triton_kernels.add)
