"""Digests of tensors: SHA-256 over their bytes, as they lie in CPU memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """64 hex digits over the bytes of contiguous `tensors`, in order; other devices are copied to the CPU first."""
    state = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel():
            state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()
