"""Digests of tensors: SHA-256 over their bytes, and a fast checksum for the whole state at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

#: 64-bit lanes that the checksum folds a tensor into.
_LANES = 4096
_PIECE_BYTES = 2**26
_HASHING_THREADS = 4


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """64 hex digits over the bytes of `tensors`, in order; other devices are copied to the CPU first.

    SHA-256 over the SHA-256 of each piece of `_PIECE_BYTES`, so that large tensors are hashed by several threads.
    """
    pieces = [
        data[start : start + _PIECE_BYTES]
        for data in (_bytes(tensor) for tensor in tensors)
        for start in range(0, data.size, _PIECE_BYTES)
    ]
    if len(pieces) > 1:
        with ThreadPoolExecutor(min(_HASHING_THREADS, len(pieces)), "digest") as pool:
            digests = list(pool.map(_sha256, pieces))
    else:
        digests = [_sha256(piece) for piece in pieces]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _sha256(data: np.ndarray) -> bytes:
    return hashlib.sha256(data.data).digest()


def checksum_of(tensors: Iterable[torch.Tensor]) -> str:
    """64 hex digits that differ if one element of replicas does; as fast as memory, but no protection against a forger.

    Each tensor's bytes are added, as 64-bit words that wrap around, into `_LANES` lanes; SHA-256 over the lanes.
    """
    state = hashlib.sha256()
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = words.numel() - words.numel() % (8 * _LANES)
        if whole:
            state.update(_lanes(words[:whole]).data)
        state.update(_bytes(words[whole:]).data)
    return state.hexdigest()


def _lanes(data: torch.Tensor) -> np.ndarray:
    if data.is_cuda:  # where the tensor lies; integers wrap around there too
        return data.view(torch.int64).view(-1, _LANES).sum(dim=0, dtype=torch.int64).cpu().numpy()
    return data.numpy().view(np.uint64).reshape(-1, _LANES).sum(axis=0, dtype=np.uint64)
