"""Uniform 8-bit code with a codebook: what DeDLOC's runs sent (arXiv 2106.10207, section 4.1).

256 equal steps over six standard deviations, the outer ones open; each code stands for the mean of the elements that fell
into it, so a tensor's sum survives. Payload: one code for each element, then the codebook of 256 fp32 values.
"""

from __future__ import annotations

import numpy as np

CODEBOOK_BYTES = 4 * 256
_SIGMAS = 6.0


def encode(flat: np.ndarray) -> np.ndarray:
    """Payload, as uint8, of `flat` [n], finite fp32 or fp64."""
    step = max(float(flat.std(dtype=np.float64)) * _SIGMAS / 256, 1e-300)
    with np.errstate(over="ignore"):  # a single value has no deviation, and any code will do
        codes = np.clip(np.round(flat / step) + 128, 0, 255).astype(np.uint8)
    counts = np.bincount(codes, minlength=256)
    codebook = np.bincount(codes, weights=flat, minlength=256) / np.maximum(counts, 1)
    return np.concatenate([codes, codebook.astype(np.float32).view(np.uint8)])


def decode(payload: np.ndarray) -> np.ndarray:
    """The values, fp32 [n]."""
    codebook = payload[-CODEBOOK_BYTES:].copy().view(np.float32)
    return codebook[payload[:-CODEBOOK_BYTES]]
