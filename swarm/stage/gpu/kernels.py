"""The accumulator's work on a CUDA device, which is asked for nothing. Owns the launches of kernels.

Triton kernels, since both are bound by memory: one looks at gradients (2 bytes an element in bf16), the other adds the
gradients of up to `MAX_TOGETHER` micro-batches in one pass over the fp32 sum (2 bytes for each, and 8 for the sum). Each
takes all of a stage's tensors in one launch: a launch costs the compute thread a good part of what a block costs the
device, and Python's lock beside it. Where Triton is missing, plain torch operations give the same bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch

from swarm.stage.norms import norm_of

MAX_TOGETHER = 4
_BLOCK = 4096
#: What a kernel must know of addresses (in bytes) and sizes (in elements) to move 16 bytes at a time.
_ALIGNMENT = 16

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Summand:
    """One micro-batch's gradients: they count, times `factor`, if `is_valid` (int32 [1] on the device) is 1."""

    gradients: Gradients
    is_valid: torch.Tensor
    factor: float


@dataclass(frozen=True)
class Survey:
    """The result of one look at a micro-batch's gradients, on their device, which is not waited for."""

    #: int32 [1]: 1 if no element of any gradient is NaN or beyond the largest that counts, else 0.
    is_valid: torch.Tensor
    _gradients: Gradients
    #: Sums of squares over blocks of all gradients; None if nobody took them.
    _squares: list[torch.Tensor] | None = None

    def norm(self) -> torch.Tensor | None:
        """0-d fp64, of all gradients as one vector; None if there are none."""
        if not self._squares:
            return norm_of(self._gradients)
        return torch.stack([squares.sum(dtype=torch.float64) for squares in self._squares]).sum().sqrt()


def survey(gradients: Gradients, largest: float, device: torch.device | str) -> Survey:
    """Look once at every element."""
    is_valid = torch.ones(1, dtype=torch.int32, device=device)
    present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if is_valid.is_cuda and _kernels() is not None:
        return Survey(is_valid, gradients, _survey_kernel(present, is_valid, largest))
    for gradient in present:
        low, high = torch.aminmax(gradient)  # NaN if any element is
        is_valid *= ((low >= -largest) & (high <= largest)).to(torch.int32)
    return Survey(is_valid, gradients)


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
    if totals and totals[0].is_cuda and _kernels() is not None:
        _add_kernel(totals, summands)
        return
    for summand in summands:
        for total, gradient in zip(totals, summand.gradients, strict=True):
            if gradient is not None:
                zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
                total.add_(torch.where(summand.is_valid.bool(), gradient, zero), alpha=summand.factor)


# ---------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class _Blocks:
    """Which program of a launch has which block of which tensor, see `triton_kernels`."""

    num: int
    tensor_of: torch.Tensor
    first_of: torch.Tensor
    sizes: torch.Tensor


@lru_cache(maxsize=16)
def _blocks_of(sizes: tuple[int, ...], device: torch.device) -> _Blocks:
    counts = torch.tensor([-(-size // _BLOCK) for size in sizes])
    first_of = [0, *accumulate(counts.tolist())]
    tensor_of = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return _Blocks(
        first_of[-1],
        tensor_of.to(device, torch.int32),
        torch.tensor(first_of[:-1]).to(device, torch.int32),
        torch.tensor(sizes).to(device),
    )


def _survey_kernel(present: Sequence[torch.Tensor], is_valid: torch.Tensor, largest: float) -> list[torch.Tensor]:
    """One launch for each dtype; returns the sums of squares of their blocks."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for gradient in present:
        by_dtype[gradient.dtype].append(gradient.contiguous())
    found = []
    for dtype, group in by_dtype.items():
        blocks = _blocks_of(tuple(gradient.numel() for gradient in group), is_valid.device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        squares = torch.empty(blocks.num, dtype=wide, device=is_valid.device)
        _launch(_kernels().survey, blocks, [group], is_valid, squares, largest, kind=_kind(dtype))
        found.append(squares)
    return found


def _add_kernel(totals: Sequence[torch.Tensor], summands: Sequence[Summand]) -> None:
    """One launch for each pair of dtypes."""
    rows: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, list[torch.Tensor | None]]]] = defaultdict(list)
    for total, *given in zip(totals, *(summand.gradients for summand in summands), strict=True):
        present = [gradient.contiguous() if gradient is not None else None for gradient in given]
        dtypes = {gradient.dtype for gradient in present if gradient is not None}
        if len(dtypes) > 1:
            raise ValueError(f"gradients of {sorted(map(str, dtypes))} for one parameter")
        if dtypes and total.numel():
            rows[total.dtype, dtypes.pop()].append((total, present))
    filled = [*summands, *[summands[0]] * (MAX_TOGETHER - len(summands))]  # the kernel looks at the first `count` only
    arguments = [argument for summand in filled for argument in (summand.is_valid, summand.factor)]
    for (total_dtype, dtype), group in rows.items():
        blocks = _blocks_of(tuple(total.numel() for total, _ in group), totals[0].device)
        columns = [[total for total, _ in group], *zip(*(present for _, present in group), strict=True)]
        _launch(
            _kernels().add,
            blocks,
            columns,
            len(group),
            *arguments,
            total_kind=_kind(total_dtype),
            kind=_kind(dtype),
            count=len(summands),
        )


def _launch(
    kernel: Any, blocks: _Blocks, columns: Sequence[Sequence[torch.Tensor | None]], *arguments: Any, **constants: Any
) -> None:
    """Start `kernel` on all blocks of the tensors of `columns`, which are of one size in each row."""
    addresses = [0 if tensor is None else tensor.data_ptr() for column in columns for tensor in column]
    is_aligned = math.gcd(*addresses, *(tensor.numel() for tensor in columns[0] if tensor is not None)) % _ALIGNMENT == 0
    host = torch.tensor(addresses, dtype=torch.int64, pin_memory=True)
    kernel[(blocks.num,)](
        host.to(blocks.sizes.device, non_blocking=True),
        blocks.tensor_of,
        blocks.first_of,
        blocks.sizes,
        *arguments,
        is_aligned=is_aligned,
        block=_BLOCK,
        num_warps=8,
        **constants,
    )


def _kind(dtype: torch.dtype) -> Any:
    """Triton's name for it."""
    return getattr(_kernels().tl, str(dtype).removeprefix("torch."))


@cache
def _kernels() -> Any:
    """The module of kernels; None where Triton is not installed."""
    try:
        from swarm.stage.gpu import triton_kernels
    except ImportError:
        return None
    return triton_kernels
