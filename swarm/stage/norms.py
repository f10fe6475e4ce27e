"""Norms of a micro-batch's tensors at a stage: they are recorded, and compared when it is computed again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from swarm.stage.module import Tensors


def norm_of(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The norm of all floating tensors as one vector: 0-d fp64 on their device, which is not waited for; None without any."""
    found = [tensor.detach() for tensor in tensors if tensor is not None and tensor.is_floating_point()]
    if not found:
        return None
    # All in one call: it is a handful of kernels, and the compute thread asks Python's lock for each call.
    norms = torch._foreach_norm(found, 2, _sums_in(found))
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)


def _sums_in(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """A GPU turns its numbers into fp64 slower than it reads them, and sums in a tree: fp32 loses nothing that counts."""
    is_fast = all(tensor.is_cuda and tensor.dtype != torch.float64 for tensor in tensors)
    return torch.float32 if is_fast else torch.float64


def gradient_norms(inputs: Tensors, parameters: torch.Tensor | None, *, loss_scale: float) -> Tensors:
    """`gradient` of the inputs and `parameters`, as far as there are any, as they are without the loss scale.

    Args:
        inputs: their gradients.
        parameters: the norm of their gradients.
        loss_scale: what all are multiplied with.
    """
    found = {"gradient": norm_of(inputs.values()), "parameters": parameters}
    return {name: norm / loss_scale for name, norm in found.items() if norm is not None}


def finite(norms: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not finite: an overflow has no norm."""
    return {name: norm for name, norm in norms.items() if math.isfinite(norm)}
