"""Digests of tensors, sums of squares, and a fast checksum for the whole state at every step. Owns how bytes are summed up.

Digests are BLAKE3: as hard to forge as SHA-256, in a quarter of the time on one thread, and by several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from blake3 import blake3

#: 64-bit lanes that the checksum folds a tensor into.
_LANES = 4096
#: Bytes of a tensor between two ticks.
_PIECE_BYTES = 2**26
#: Elements whose squares are summed in their own type.
_RUN_ELEMENTS = 256
#: Sums of squares between these have lost nothing that counts to the range of fp32.
_LEAST_SQUARES, _MOST_SQUARES = 1e-20, 1e38
#: Threads for large tensors; other peers of this machine need cores too.
_THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any shape, on its device; an empty one (nothing is trained) has no stride to view by."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def digest_of(tensors: Iterable[torch.Tensor], *, tick: Callable[[], None] = lambda: None) -> str:
    """BLAKE3 over the bytes of `tensors`, in order, as 64 hex digits; other devices are copied to the CPU first.

    `tick` is called as often as something was done: slowness is not death.
    """
    tensors = list(tensors)
    is_large = sum(tensor.nbytes for tensor in tensors) > _PIECE_BYTES  # starting threads takes time, too
    state = blake3(max_threads=_THREADS if is_large else 1)
    for tensor in tensors:
        for piece in _pieces(_bytes(tensor).cpu().numpy()):
            state.update(piece.data)
            tick()
    return state.hexdigest()


def squares_of(flat: torch.Tensor, uncounted: Sequence[tuple[int, int]] = ()) -> float:
    """Sum of squares of the elements of `flat` [N] (fp32 or fp64, on the CPU), without `start:end` of each of `uncounted`.

    To 1e-6 of itself for fp32, whatever the range of the elements.
    """
    edges = [0, *(edge for pair in sorted(uncounted) for edge in pair), flat.numel()]
    counted = (flat[start:end].numpy() for start, end in zip(edges[::2], edges[1::2], strict=True))
    return float(sum(squares for part in counted for squares in _on_threads(_squares, _pieces(part))))


def _pieces(data: np.ndarray) -> list[np.ndarray]:
    size = _PIECE_BYTES // data.itemsize
    return [data[start : start + size] for start in range(0, data.size, size)]


def _on_threads(job: Callable[[np.ndarray], float], pieces: list[np.ndarray]) -> list[float]:
    if len(pieces) < 2 or _THREADS < 2:
        return [job(piece) for piece in pieces]
    with ThreadPoolExecutor(min(_THREADS, len(pieces)), "squares") as pool:
        return list(pool.map(job, pieces))


def _squares(values: np.ndarray) -> float:
    """Runs of `_RUN_ELEMENTS` in the type of `values`, which takes a third of the time, and all else in fp64.

    In one operation: each one asks for Python's lock, and a compute thread that starts kernels wants it meanwhile.
    """
    whole = values.size - values.size % _RUN_ELEMENTS
    runs = values[:whole].reshape(-1, _RUN_ELEMENTS)
    with np.errstate(over="ignore"):
        total = np.einsum("ij,ij->i", runs, runs).sum(dtype=np.float64) + np.square(values[whole:], dtype=np.float64).sum()
    if _LEAST_SQUARES < total < _MOST_SQUARES:
        return float(total)
    return float(np.einsum("i,i->", values, values, dtype=np.float64))  # squares may be beyond fp32's range


def checksum_of(tensors: Iterable[torch.Tensor]) -> str:
    """64 hex digits that differ if one element of replicas does; as fast as memory, but no protection against a forger.

    Each tensor's bytes are added, as 64-bit words that wrap around, into `_LANES` lanes; BLAKE3 over the lanes.
    """
    state = blake3()
    for tensor in tensors:
        words = _bytes(tensor)
        whole = words.numel() - words.numel() % (8 * _LANES)
        if whole:
            state.update(_lanes(words[:whole]).view(np.uint8).data)
        state.update(words[whole:].cpu().numpy().data)
    return state.hexdigest()


def _lanes(data: torch.Tensor) -> np.ndarray:
    if data.is_cuda:  # where the tensor lies; integers wrap around there too
        return data.view(torch.int64).view(-1, _LANES).sum(dim=0, dtype=torch.int64).cpu().numpy()
    return data.numpy().view(np.uint64).reshape(-1, _LANES).sum(axis=0, dtype=np.uint64)
