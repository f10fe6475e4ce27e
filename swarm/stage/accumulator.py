"""The gradient sum of one step at one peer, with its ledger. Written by the compute thread alone.

Invariant: the flat sum holds exactly the gradients of `ledger.entries` (promise 1 rests on this).
"""

from __future__ import annotations

from typing import Literal

import torch

from swarm.lifecycle.step import Entry, Ledger
from swarm.stage.layout import Layout
from swarm.wire.messages import Term


class Accumulator:
    """Sum over tickets of the gradient of the summed loss; flat, in the masters' dtype, allocated at first use."""

    def __init__(self, step: int, layout: Layout, *, dtype: torch.dtype, device: str) -> None:
        self.ledger = Ledger(step)
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        #: The sum was handed out as a contribution: it is copied before it changes.
        self._lent = False

    def add(
        self, index: int, entry: Entry, gradients: list[torch.Tensor | None], *, loss_scale: float = 1.0
    ) -> Literal["accumulated", "overflow", "denied"]:
        """Check the claim, add the gradient (divided by the loss scale) and mark the ticket, as one job.

        Returns:
            "accumulated"; "overflow" if a gradient is not finite (ledgered, not added); "denied" without a valid claim.
            An exception halfway discards the whole accumulator: its tickets will be missing from the seal.
        """
        if not self.ledger.may_add(index):
            return "denied"
        if not all(_is_finite(g) for g in gradients if g is not None):
            self.ledger.add(index, entry, overflow=True)
            return "overflow"
        try:
            self.add_all(gradients, 1.0 / loss_scale)
        except BaseException:
            self.discard()
            raise
        self.ledger.add(index, entry)
        return "accumulated"

    def add_all(self, gradients: list[torch.Tensor | None], factor: float = 1.0) -> None:
        """Add one micro-batch's gradients to the sum; an exception leaves it spoilt."""
        if self._flat is None:
            self._flat = torch.zeros(self._layout.num_elements, dtype=self._dtype, device=self._device)
            self._views = self._layout.views(self._flat)
        elif self._lent:  # an attempt that was given up may still be sending it
            self._flat = self._flat.clone()
            self._views = self._layout.views(self._flat)
        self._lent = False
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                view.add_(gradient, alpha=factor)

    def discard(self) -> None:
        self.ledger.discard()
        self._flat, self._views = None, []

    def freeze(self, term: Term) -> None:
        """Seal the ledger for an attempt. Each gradient was finite; if their sum is not, no ticket of it counts."""
        if self._flat is not None and not _is_finite(self._flat):
            self.ledger.spoil()
            self._flat, self._views = None, []
        self.ledger.collect(term, freeze=True)

    def contribution(self) -> torch.Tensor | None:
        """The sum [N] on the CPU, unchanged by what comes later; None if nothing was added."""
        if self._flat is None or not self.ledger.entries:
            return None
        self._lent = True
        return self._flat.detach().cpu()


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is; without a temporary of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
