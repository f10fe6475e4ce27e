"""Sends all of the contribution in one exchange, in any code without error feedback; summed, or robustly averaged."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from swarm.averaging.compressors.interface import Compressed, Compression, Contribution
from swarm.averaging.reduction import Code, GroupVector, Robust


class Plain:
    """The contribution as it is; see `Compressor`."""

    keeps_back: ClassVar[bool] = False

    def __init__(self, num_elements: int, code: Code = Code(), *, clip_radius: float | None = None) -> None:
        """Keep nothing back.

        Args:
            num_elements: N.
            code: of chunks on the wire.
            clip_radius: of CenteredClip, in units of the mean's norm; None: the plain mean.
        """
        self._num_elements = num_elements
        self.code = code
        self.residual: torch.Tensor | None = None
        self._clip_radius = clip_radius

    def compress(self, contribution: Contribution) -> Compression:
        """Sum the whole contribution in one exchange."""
        robust = None if self._clip_radius is None else Robust(contribution.tokens, self._clip_radius)
        total = yield GroupVector(self._num_elements, contribution.flat, self.code, robust=robust)
        return Compressed(total.total)

    def adopt(self, state: Any) -> None:
        """Do nothing: nothing is kept back."""

    def forget(self) -> None:
        """Do nothing: nothing is kept back."""
