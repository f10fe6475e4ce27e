"""A stage's buffers beside its compressed gradients: in an exchange of their own, as they are.

Owns the split. They are few, they are no gradients whose error could be made good later, and nobody clips them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from swarm.averaging.compressors.interface import Compressed, Compression, Compressor, Contribution
from swarm.averaging.reduction import GroupVector
from swarm.stage.layout import Layout


class BuffersApart:
    """Another compressor for the parameters, and nothing of the kind for the buffers; see `Compressor`."""

    def __init__(self, inner: Compressor, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout

    @property
    def keeps_back(self) -> bool:
        """Whether the inner one does."""
        return self._inner.keeps_back

    @property
    def residual(self) -> torch.Tensor | None:
        """What the inner one keeps back, [num_trained]."""
        return self._inner.residual

    def compress(self, contribution: Contribution) -> Compression:
        """Do what the inner one does, then sum the buffers in one exchange."""
        flat, edge = contribution.flat, self._layout.num_trained
        compressed = yield from self._inner.compress(replace(contribution, flat=None if flat is None else flat[:edge]))
        buffers = yield GroupVector(self._layout.num_elements - edge, None if flat is None else flat[edge:])
        return Compressed(torch.cat([compressed.flat, buffers.total]), compressed.state)

    def adopt(self, state: Any) -> None:
        """Keep what the inner one left unsent."""
        self._inner.adopt(state)

    def forget(self) -> None:
        """Drop what the inner one kept back."""
        self._inner.forget()
