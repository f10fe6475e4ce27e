"""The codes of about 8 bits that `wire_codes.py` compares: what the wire carried before and carries now, and others."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from models.quantized import bitsandbytes_functional
from swarm.wire import scaled
from swarm.wire.messages import BLOCK_SIZE, num_scaled_bytes

Coder = Callable[[torch.Tensor], torch.Tensor]
OLD, NEW = "dynamic, 4096 (before)", "rotated, integers, 64 (now)"


# ---------------------------------------------------------------------------------------------------- the two codes


def old_encode(flat: torch.Tensor) -> torch.Tensor:
    """What version 1 of the protocol called 8bit."""
    values = flat.float().contiguous()
    codes, state = bitsandbytes_functional().quantize_blockwise(values, blocksize=BLOCK_SIZE)
    if not codes.is_cuda and not values.numpy().all():
        codes.masked_fill_(values == 0, 127)
    return torch.cat([codes, state.absmax.float().view(torch.uint8)])


def old_decode(coded: torch.Tensor, num: int, dtype: torch.dtype) -> torch.Tensor:
    scales = coded[num:].clone().view(torch.float32)
    return bitsandbytes_functional().dequantize_blockwise(coded[:num], absmax=scales, blocksize=BLOCK_SIZE).to(dtype)


def new_encode(flat: torch.Tensor) -> torch.Tensor:
    return scaled.encode(flat, rotate=True)[0]


def new_decode(coded: torch.Tensor, num: int, dtype: torch.dtype) -> torch.Tensor:
    return scaled.decode(coded, num, dtype, rotated=True)


def by_old(x: torch.Tensor) -> torch.Tensor:
    return old_decode(old_encode(x.reshape(-1)), x.numel(), x.dtype).view(x.shape)


def by_new(x: torch.Tensor) -> torch.Tensor:
    return new_decode(new_encode(x.reshape(-1)), x.numel(), x.dtype).view(x.shape)


def by_averages(x: torch.Tensor) -> torch.Tensor:
    """The same without the rotation, as averages are coded."""
    coded, _ = scaled.encode(x.reshape(-1), rotate=False)
    return scaled.decode(coded, x.numel(), x.dtype, rotated=False).view(x.shape)


# ---------------------------------------------------------------------------------------------------- candidates


def in_blocks(x: torch.Tensor, size: int, code: Coder) -> torch.Tensor:
    """`code` of [blocks, size], as x."""
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % size)).view(-1, size)
    return code(flat).reshape(-1)[: x.numel()].view(x.shape)


def rounded_up(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32, to so many bits behind the first."""
    cut = 23 - bits
    return ((steps.contiguous().view(torch.int32) + (1 << cut) - 1 >> cut) << cut).view(torch.float32)


def integers(size: int, bits: int = 23) -> Coder:
    def rows(v: torch.Tensor) -> torch.Tensor:
        step = rounded_up((v.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30), bits)
        return (v / step).round() * step

    return lambda x: in_blocks(x, size, rows)


def dynamic(size: int) -> Coder:
    """The values of bitsandbytes' code, and the nearest of them."""
    table = bitsandbytes_functional().create_dynamic_map().float().sort().values

    def rows(v: torch.Tensor) -> torch.Tensor:
        values, top = table.to(v.device), v.abs().amax(1, keepdim=True).clamp(min=1e-30)
        return values[torch.bucketize(v / top, (values[1:] + values[:-1]) / 2)] * top

    return lambda x: in_blocks(x, size, rows)


def rotated(code: Coder, size: int = 64) -> Coder:
    """A Hadamard rotation of each `size` values, and back."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])

    def turn(v: torch.Tensor) -> torch.Tensor:
        return v @ (matrix / math.sqrt(size)).to(v.device)

    return lambda x: in_blocks(code(in_blocks(x, size, turn)), size, turn)


def with_16_bit_tokens(code: Coder, part: float) -> Coder:
    """The tokens with the largest values travel in bf16."""

    def coded(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = rows.abs().amax(1).topk(max(1, round(part * len(rows)))).indices
        others = rows.index_fill(0, largest, 0.0)
        return code(others).index_copy(0, largest, rows[largest].bfloat16().float()).view(x.shape)

    return coded


def with_16_bit_channels(code: Coder, part: float) -> Coder:
    turned = with_16_bit_tokens(lambda y: code(y.t()).t(), part)
    return lambda x: turned(x.reshape(-1, x.shape[-1]).t()).t().reshape(x.shape)


def by_rows(size: int, bits: int) -> Coder:
    """Blocks that begin anew with each token."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
        return integers(size, bits)(padded)[..., : x.shape[-1]]

    return rows


def candidates() -> dict[str, tuple[Coder, Callable[[int, int], float]]]:
    """Name -> code; bytes of n values in rows of so many."""

    def blocks(size: int, scale_bytes: int) -> Callable[[int, int], float]:
        return lambda n, row: n + scale_bytes * math.ceil(n / size)

    def rows(size: int, scale_bytes: int) -> Callable[[int, int], float]:
        return lambda n, row: n + scale_bytes * math.ceil(row / size) * (n // row)

    def more(base: Callable[[int, int], float], part: float) -> Callable[[int, int], float]:
        return lambda n, row: base(n, row) + part * n

    now = lambda n, row: num_scaled_bytes(n)  # noqa: E731
    return {
        "bf16": (lambda x: x.bfloat16().float(), lambda n, row: 2 * n),
        OLD: (by_old, blocks(4096, 4)),
        "dynamic, 512": (dynamic(512), blocks(512, 4)),
        "dynamic, 64": (dynamic(64), blocks(64, 1)),
        "integers, 4096": (integers(4096), blocks(4096, 4)),
        "integers, 512": (integers(512), blocks(512, 4)),
        "integers, 128, bf16": (integers(128, 7), blocks(128, 2)),
        "integers, 128 of a row, bf16": (by_rows(128, 7), rows(128, 2)),
        "integers, 64, power of two": (integers(64, 0), blocks(64, 1)),
        "integers, 64, byte": (by_averages, now),
        NEW: (by_new, now),
        "16 rotated, integers, 64": (rotated(by_averages, 16), now),
        "rotated, dynamic, 64": (rotated(dynamic(64)), blocks(64, 1)),
        "rotated, integers, 4096": (rotated(integers(4096)), blocks(4096, 4)),
        "dynamic, 4096, 1/64 of tokens bf16": (with_16_bit_tokens(dynamic(4096), 1 / 64), more(blocks(4096, 4), 1 / 64)),
        "dynamic, 4096, 1/64 of channels bf16": (with_16_bit_channels(dynamic(4096), 1 / 64), more(blocks(4096, 4), 1 / 64)),
        "integers, 64, 1/64 of tokens bf16": (with_16_bit_tokens(by_averages, 1 / 64), more(now, 1 / 64)),
        "integers, 64, 1/64 of channels bf16": (with_16_bit_channels(by_averages, 1 / 64), more(now, 1 / 64)),
        "now, and 1/64 of channels bf16": (with_16_bit_channels(by_new, 1 / 64), more(now, 1 / 64)),
    }
