"""Digests of tensors: SHA-256 over their bytes, sums of squares, and a fast checksum for the whole state at every step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

#: 64-bit lanes that the checksum folds a tensor into.
_LANES = 4096
_PIECE_BYTES = 2**26
#: Elements whose squares are summed at a time: the fp64 copy stays in a CPU's cache.
_SQUARED_ELEMENTS = 2**15
#: Threads for large tensors; other peers of this machine need cores too.
_THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))

T = TypeVar("T")


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def digest_of(tensors: Iterable[torch.Tensor], *, tick: Callable[[], None] = lambda: None) -> str:
    """64 hex digits over the bytes of `tensors`, in order; other devices are copied to the CPU first.

    `tick` is called, from any thread, as often as something was done: slowness is not death.

    SHA-256 over the SHA-256 of each piece of `_PIECE_BYTES`, so that large tensors are hashed by several threads.
    """

    def one(piece: np.ndarray) -> bytes:
        tick()
        return _sha256(piece)

    pieces = [piece for tensor in tensors for piece in _pieces(_bytes(tensor))]
    return hashlib.sha256(b"".join(_on_threads(one, pieces))).hexdigest()


def digest_and_squares(flat: torch.Tensor, uncounted: Sequence[tuple[int, int]] = ()) -> tuple[str, float]:
    """`digest_of([flat])`, and the sum of squares in fp64 of its elements [N] (fp32 or fp64, on the CPU).

    Squares of the elements `start:end` of each of `uncounted` are left out.
    """
    if uncounted:
        edges = [0, *(edge for pair in sorted(uncounted) for edge in pair), flat.numel()]
        counted = [flat[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        return digest_of([flat]), float(sum(_squares_of(part) for part in counted))
    dtype = flat.numpy().dtype

    def one(piece: np.ndarray) -> tuple[bytes, float]:
        return _sha256(piece), _squares(piece.view(dtype))

    results = _on_threads(one, _pieces(_bytes(flat)))
    squares = float(sum(squares for _, squares in results))
    return hashlib.sha256(b"".join(sha for sha, _ in results)).hexdigest(), squares


def _squares_of(flat: torch.Tensor) -> float:
    dtype = flat.numpy().dtype
    return float(sum(_on_threads(lambda piece: _squares(piece.view(dtype)), _pieces(_bytes(flat)))))


def _pieces(data: np.ndarray) -> list[np.ndarray]:
    return [data[start : start + _PIECE_BYTES] for start in range(0, data.size, _PIECE_BYTES)]


def _on_threads(job: Callable[[np.ndarray], T], pieces: list[np.ndarray]) -> list[T]:
    if len(pieces) < 2 or _THREADS < 2:
        return [job(piece) for piece in pieces]
    with ThreadPoolExecutor(min(_THREADS, len(pieces)), "digest") as pool:
        return list(pool.map(job, pieces))


def _sha256(data: np.ndarray) -> bytes:
    return hashlib.sha256(data.data).digest()


def _squares(values: np.ndarray) -> float:
    """Part by part in order, so that replicas get the same number."""
    parts = (values[i : i + _SQUARED_ELEMENTS] for i in range(0, values.size, _SQUARED_ELEMENTS))
    return float(sum(np.square(part, dtype=np.float64).sum() for part in parts))


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
