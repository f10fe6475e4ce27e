"""The sparse code of CocktailSGD (Wang et al., ICML 2023, section 3): the largest elements of a tensor in 4 bits each.

Payload: one bit for each element, whether it is kept; a 4-bit code for each kept one, in order; one bf16 scale for each
`BUCKET_SIZE` kept ones, the largest magnitude among them. `value = code / 8 * scale` with codes of -8 to 7, stored as
code + 8. Owns this code; which elements are offered to it, and what becomes of those left out, is not known here.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from swarm.base.errors import RemoteProtocolError
from swarm.wire.messages import BUCKET_SIZE

_LEVELS = 8.0


def encode(flat: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Payload, as uint8, of the `num_kept` elements of `flat` [n] (finite, fp32 or fp64, on the CPU) that are largest."""
    kept = torch.topk(flat.abs(), num_kept, sorted=False).indices.sort().values
    bits = np.zeros(flat.numel(), dtype=bool)
    bits[kept.numpy()] = True
    values = flat[kept].float().numpy()
    scales = torch.from_numpy(_bucket_tops(values)).bfloat16()
    steps = np.repeat(scales.float().numpy(), BUCKET_SIZE)[:num_kept]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(steps > 0, np.round(values / steps * np.float32(_LEVELS)), 0.0)
    codes = (np.clip(codes, -_LEVELS, _LEVELS - 1) + _LEVELS).astype(np.uint8)
    codes = np.append(codes, np.zeros(num_kept % 2, dtype=np.uint8))
    parts = [np.packbits(bits, bitorder="little"), codes[::2] | codes[1::2] << 4, scales.view(torch.int16).numpy().view(np.uint8)]
    return torch.from_numpy(np.concatenate(parts))


def _bucket_tops(values: np.ndarray) -> np.ndarray:
    if not values.size:
        return np.zeros(0, dtype=np.float32)
    return np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BUCKET_SIZE))


def decode(payload: np.ndarray, num_elements: int, num_kept: int) -> torch.Tensor:
    """The values, fp32 [num_elements]; 0 where nothing was kept.

    Raises:
        RemoteProtocolError: if another number of elements is kept.
    """
    num_bits, num_codes = math.ceil(num_elements / 8), math.ceil(num_kept / 2)
    bits = np.unpackbits(payload[:num_bits], count=num_elements, bitorder="little").view(bool)
    if int(np.count_nonzero(bits)) != num_kept:
        raise RemoteProtocolError(f"a sparse tensor keeps {np.count_nonzero(bits)} elements, its spec says {num_kept}")
    packed = payload[num_bits : num_bits + num_codes]
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:num_kept].astype(np.float32) - _LEVELS
    coded = payload[num_bits + num_codes :].copy().view(np.int16)
    scales = torch.from_numpy(coded).view(torch.bfloat16).float().numpy()
    flat = np.zeros(num_elements, dtype=np.float32)
    flat[bits] = codes / np.float32(_LEVELS) * np.repeat(scales, BUCKET_SIZE)[:num_kept]
    return torch.from_numpy(flat)
