"""The dynamic 8-bit code of bitsandbytes' optimizers (Dettmers et al., arXiv 2110.02861), to the bit alike on every device.

Owns the code: a number is the block's largest magnitude times one of 256 values. bitsandbytes' own kernels break ties and
treat zeros in their own ways on each kind of processor, and replicas on unequal devices would part; here everything is
comparisons and separately rounded operations. Must not know what the numbers are.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

#: Elements that share a scale.
BLOCK = 256
#: Decades below the largest magnitude that the code tells apart.
_DECADES = 7
#: A block whose largest magnitude is below this is all zeros.
_NOTHING = 1e-30


@cache
def values_of(*, signed: bool, device: torch.device) -> torch.Tensor:
    """The code's values, fp32 [256], ascending: equal steps in each decade, twice as many in each larger one; 0 and 1 too."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        num_steps = 2 ** (decade if signed else decade + 1)
        means = [0.1 + 0.9 * (2 * step + 1) / (2 * num_steps) for step in range(num_steps)]
        scaled = [mean * 10.0 ** (decade - _DECADES + 1) for mean in means]
        found += [*scaled, *(-value for value in scaled)] if signed else scaled
    return torch.from_numpy(np.array(sorted(found), dtype=np.float32)).to(device)


@cache
def _edges_of(*, signed: bool, device: torch.device) -> torch.Tensor:
    """fp32 [256]: halfway to the next value; what is above its edge takes that one."""
    values = values_of(signed=signed, device=torch.device("cpu")).double()
    return torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([torch.inf])]).float().to(device)


@cache
def _guesses_of(*, signed: bool, device: torch.device) -> torch.Tensor:
    """int32 [65536]: by the upper half of an fp32 number's bits, as a signed number and from the lowest on, the code of
    the lowest number with these bits. No two edges have the same ones, so the code of any other is this or the next."""
    upper = np.arange(-(2**15), 2**15, dtype=np.int32) << 16
    lowest = np.where(upper < 0, upper | 0xFFFF, upper).view(np.float32)
    edges = _edges_of(signed=signed, device=torch.device("cpu")).numpy()
    return torch.from_numpy(np.searchsorted(edges[:-1], lowest).astype(np.int32)).to(device)


def num_blocks(num_elements: int) -> int:
    """Blocks of so many elements; the last may be shorter."""
    return -(-num_elements // BLOCK)


def encode(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n] and scales fp32 [num_blocks(n)] of finite `values` fp32 [n], on their device."""
    guesses, edges = (table(signed=signed, device=values.device) for table in (_guesses_of, _edges_of))
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(num_blocks(values.numel()), dtype=torch.float32, device=values.device)
    for rows, out, tops in _blocks(values, codes, scales):
        torch.maximum(rows.amax(dim=1), -rows.amin(dim=1), out=tops)
        is_nothing = tops < _NOTHING
        parts = (rows / tops.masked_fill(is_nothing, 1.0).unsqueeze(1)).view(-1)
        guess = guesses.index_select(0, (parts.view(torch.int32) >> 16) + 2**15)
        out.copy_((guess + (parts > edges.index_select(0, guess))).view(out.shape))
        tops.masked_fill_(is_nothing, 0.0)
    return codes, scales


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Write into `out` fp32 [n] what codes [n] and scales stand for; all on one device."""
    torch.index_select(values_of(signed=signed, device=codes.device), 0, codes.int(), out=out)
    for rows, _, tops in _blocks(out, codes, scales):
        rows.mul_(tops.unsqueeze(1))
    return out


def _blocks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Whole blocks as rows, and the shorter one at the end, if there is one; with their scales."""
    whole = values.numel() // BLOCK * BLOCK
    parts = [
        (values[:whole].view(-1, BLOCK), codes[:whole].view(-1, BLOCK), scales[: whole // BLOCK]),
        (values[whole:].view(1, -1), codes[whole:].view(1, -1), scales[whole // BLOCK :]),
    ]
    return [part for part in parts if part[0].numel()]
