"""Memory of a stage's flat vectors: parameters, moments, sums and averages. On the CPU it is used again, step after step."""

from __future__ import annotations

import numpy as np
import torch

from swarm.base.buffers import Recycler

#: A step lets go of at most so many vectors at once: masters, two moments, and sums.
_MAX_IDLE = 6
_host = Recycler(max_idle=_MAX_IDLE, max_idle_bytes=2**62)


def empty_flat(num_elements: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A vector [num_elements] with anything in it; its memory is free again when no tensor uses it."""
    if torch.device(device).type != "cpu" or not num_elements:
        return torch.empty(num_elements, dtype=dtype, device=device)
    memory = np.frombuffer(_host.take(num_elements * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype)
