"""The 8-bit codes: integers in units of a step of their own for every 64 values, of a tensor or of its rotation.

The activations of trained models have a few channels that are large in all tokens, and tokens a hundred times as long as the
others. A hidden size that is a multiple of 64 keeps each token to itself. Inside it a large channel would take digits from 63
others; so each 64 values are multiplied by a Hadamard matrix first, which spreads what is large evenly (Chee et al., QuIP,
arXiv 2307.13304, section 4; Ashkboos et al., QuaRot, arXiv 2404.00456), and what is decoded is multiplied by it again. For
averages of gradients they are not rotated, so that zeros stay zeros: an optimizer would make steps of any noise there.

Owns both codes, which have the same bytes, and decode to the same bits, on every device. Must not know what the values are.

Payload of n values: n integers q of -127 to 127, a byte each; a byte for each sub-block of `SUB_BLOCK_SIZE` values; a bf16
number, little-endian, for each block of `BLOCK_SIZE`. The number is the largest unit of the block's sub-blocks. The byte says
how much smaller this one's unit is: its bf16 number, read as an integer, is so many times 8 less, so about so many sixteenths
of an octave. `values = (H @ q) * unit`, or, in the code that is not rotated and in a last sub-block that is shorter,
`q * unit`. At the byte's end, 255, a sub-block 65,000 times smaller than another of its block has all its digits; one that is
smaller yet loses them one by one.

That bits agree does not rest on the order of sums: values become integers of 17 bits first, by the exponent of the largest of
their 64, whose sums fp32 holds exactly, as it holds `H @ q`. Magnitudes below 2**-112 become 0.

CUDA devices have kernels for it (`triton_scaled.py`) if Triton is installed; else it is a dozen torch operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from swarm.wire.messages import BLOCK_SIZE, SUB_BLOCK_SIZE, num_scaled_bytes
from swarm.wire.scaled_numbers import (
    CUT,
    EXPONENT,
    FARTHEST,
    FROM_INTEGER,
    FROM_ROTATED,
    LEAST,
    NORMAL,
    PART,
    PER_BLOCK,
    TO_BF16,
    TO_INTEGER,
)

#: What kernels read and write as it is; of other tensors an fp32 copy is coded.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: No product is fused with a sum in the kernels: rounded once less than elsewhere it might become another integer.
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
#: Values that a CPU works on at once: they stay in its cache.
_PIECE = 2**18


def encode(flat: torch.Tensor, *, rotate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Code `flat` [n] of a floating dtype, n > 0, on its device, which is not waited for.

    Returns:
        The payload, uint8; and fp32 [num_blocks], finite if the payload is valid: no value is NaN, infinite, or so large
        that it could become so.
    """
    if flat.is_cuda and _kernels() is not None:
        return _encode_by_kernel(flat, rotate)
    num_values, num_steps = flat.numel(), -(-flat.numel() // SUB_BLOCK_SIZE)
    payload = torch.empty(num_scaled_bytes(num_values), dtype=torch.uint8, device=flat.device)
    integers, below = payload[:num_values].view(torch.int8), payload[num_values : num_values + num_steps]
    largest, tops = [], []
    piece = num_values if flat.is_cuda else _PIECE
    for start in range(0, num_values, piece):
        values, first = flat[start : start + piece].float().contiguous(), start // SUB_BLOCK_SIZE
        of_blocks = _encode_piece(
            values, rotate, integers[start : start + piece], below[first : first + -(-len(values) // SUB_BLOCK_SIZE)]
        )
        largest.append(of_blocks[0])
        tops.append(of_blocks[1])
    payload[num_values + num_steps :] = (_joined(largest) << TO_BF16).to(torch.int16).view(torch.uint8)
    return payload, _joined(tops).mul_(2.0)


def _encode_piece(
    values: torch.Tensor, rotate: bool, integers: torch.Tensor, below: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole blocks, or the end of the tensor. Returns the largest unit, cut, and the largest magnitude of each block."""
    parts = [_as_integers(rows, rotate) for rows in rows_of(values, SUB_BLOCK_SIZE)]
    cut, unit, top = (in_blocks(_joined(column)) for column in list(zip(*parts, strict=True))[1:])
    largest = cut.amax(dim=1)
    less = (largest.unsqueeze(1) - cut).clamp_(0, FARTHEST)
    below.copy_(less.view(-1)[: len(below)])
    factors = (unit / ((largest.unsqueeze(1) - less) << CUT).view(torch.float32)).view(-1)[: len(below)]
    outs = rows_of(integers, SUB_BLOCK_SIZE)
    for (rows, *_), factor, out in zip(parts, split(factors, values, SUB_BLOCK_SIZE), outs, strict=True):
        out.copy_(rows.mul_(factor.unsqueeze(1)).round_())
    return largest, top.amax(dim=1)


def _as_integers(rows: torch.Tensor, rotate: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rows` [k, size] as integers of 17 bits, or as sums of 64 such; of each row the unit of the code, cut; that of the
    integers; and the largest magnitude."""
    rotate = rotate and rows.shape[1] == SUB_BLOCK_SIZE
    top = rows.abs().amax(dim=1)
    exponent = (top.view(torch.int32) & EXPONENT).clamp_min_(LEAST << 23)
    unit = (exponent - ((FROM_ROTATED if rotate else FROM_INTEGER) << 23)).view(torch.float32)
    factor = exponent.neg_().add_(TO_INTEGER << 23).view(torch.float32)
    found = (rows * factor.unsqueeze(1)).round_()
    if rotate:
        found = found @ _hadamard(rows.device)
    cut = found.abs().amax(dim=1).mul_(PART).mul_(unit).view(torch.int32).add_((1 << CUT) - 1).bitwise_right_shift_(CUT)
    return found, cut.clamp_min_(NORMAL), unit, top


def in_blocks(numbers: torch.Tensor) -> torch.Tensor:
    """`numbers` of sub-blocks as [num_blocks, PER_BLOCK]; the last block is filled up with zeros."""
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % PER_BLOCK)).view(-1, PER_BLOCK)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@cache
def _hadamard(device: torch.device) -> torch.Tensor:
    """fp32 [64, 64], its own inverse times 64."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SUB_BLOCK_SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device)


def decode(
    payload: torch.Tensor, num_values: int, dtype: torch.dtype, *, rotated: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values [num_values] of a payload, uint8 and of the right length, on its device, which is not waited for.

    Args:
        payload: of `encode`.
        num_values: at least 1.
        dtype: of the result.
        rotated: as it was encoded.
        out: is filled and returned if it is a contiguous tensor of that dtype in which they can be computed.
    """
    flat = out.view(-1) if out is not None and out.dtype == dtype and out.is_contiguous() else None
    if flat is None:
        flat = torch.empty(num_values, dtype=dtype, device=payload.device)
    if payload.is_cuda and dtype in KERNEL_DTYPES and _kernels() is not None:
        return _decode_by_kernel(payload, flat, rotated)
    num_steps = -(-num_values // SUB_BLOCK_SIZE)
    integers, below = payload[:num_values].view(torch.int8), payload[num_values : num_values + num_steps]
    largest = payload[num_values + num_steps :].clone().view(torch.int16).int()  # the copy is aligned
    numbers = largest.unsqueeze(1) - (in_blocks(below).int() << TO_BF16)
    units, matrix = (numbers << 16).view(torch.float32).view(-1), _hadamard(payload.device)
    piece = num_values if payload.is_cuda else _PIECE
    for start in range(0, num_values, piece):
        some, first = integers[start : start + piece].float(), start // SUB_BLOCK_SIZE
        unit = units[first : first + -(-len(some) // SUB_BLOCK_SIZE)]
        goals = rows_of(flat[start : start + piece], SUB_BLOCK_SIZE)
        for rows, of_row, goal in zip(rows_of(some, SUB_BLOCK_SIZE), split(unit, some, SUB_BLOCK_SIZE), goals, strict=True):
            if rotated and rows.shape[1] == SUB_BLOCK_SIZE:
                rows = torch.mm(rows, matrix, out=goal if dtype == torch.float32 else None)
            torch.mul(rows, of_row.unsqueeze(1), out=goal)
    return flat


def rows_of(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """`flat` [n] as [n // size, size] and, if there is a rest, that as [1, rest]."""
    if flat.numel() % size == 0:
        return [flat.view(-1, size)]
    whole = flat.numel() // size * size
    return [*([flat[:whole].view(-1, size)] if whole else []), flat[whole:].view(1, -1)]


def split(numbers: torch.Tensor, flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """`numbers`, one for each row, as `rows_of(flat, size)` has the rows."""
    whole = flat.numel() // size
    return [part for part in (numbers[:whole], numbers[whole:]) if part.numel()]


# ---------------------------------------------------------------------------------------------------- kernels


def _encode_by_kernel(flat: torch.Tensor, rotate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = (flat if flat.dtype in KERNEL_DTYPES else flat.float()).contiguous()
    num_values, num_blocks = values.numel(), -(-values.numel() // BLOCK_SIZE)
    payload = torch.empty(num_scaled_bytes(num_values), dtype=torch.uint8, device=flat.device)
    bounds = torch.empty(num_blocks, dtype=torch.float32, device=flat.device)
    with torch.cuda.device_of(flat):
        _kernels().encode[(num_blocks,)](values, payload, bounds, num_values, rotate=rotate, **_LAUNCH)
    return payload, bounds


def _decode_by_kernel(payload: torch.Tensor, flat: torch.Tensor, rotated: bool) -> torch.Tensor:
    num_blocks = -(-flat.numel() // BLOCK_SIZE)
    with torch.cuda.device_of(flat):
        _kernels().decode[(num_blocks,)](payload, flat, flat.numel(), rotate=rotated, **_LAUNCH)
    return flat


@cache
def _kernels() -> Any:
    """The module of kernels; None where Triton is not installed."""
    try:
        from swarm.wire import triton_scaled
    except ImportError:
        return None
    return triton_scaled
