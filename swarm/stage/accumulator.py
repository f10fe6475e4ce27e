"""The gradient sum of one step at one peer, with its ledger. Only the compute thread writes it.

Invariant: the flat sum holds exactly the gradients of `ledger.entries` (promise 1 rests on this).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from swarm.lifecycle.step import Ledger, LedgerEntry
from swarm.stage.flat import empty_flat
from swarm.stage.gpu.kernels import MAX_TOGETHER, Summand, add_together
from swarm.stage.layout import Layout
from swarm.stage.versions import Version
from swarm.wire.messages import Attempt

#: A gradient beyond this is as good as infinite: its square, which the optimizer takes, is none in fp32.
LARGEST = 2.0**60


class Numbers(Protocol):
    """The numbers that a ticket turned out to have. On a device that computes later, `wait` comes before the rest."""

    def is_known(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> None:
        """Block this thread until the numbers are there."""

    @property
    def is_finite(self) -> bool:
        """Whether all gradients of the ticket are finite."""

    @property
    def entry(self) -> LedgerEntry:
        """Tokens and loss of the ticket."""


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
        self._borrowed = False
        #: Tickets that are marked in the ledger before the device has told what they are.
        self._unseen: deque[tuple[int, Numbers]] = deque()
        #: Their gradients that are not in the sum yet: fewer than `MAX_TOGETHER`.
        self._waiting: list[Summand] = []

    def version_for(self, version: Version, index: int) -> Version:
        """The version that ticket `index` of this step computes with, if the step builds on `version`."""
        return version

    def add(
        self, index: int, entry: LedgerEntry, gradients: list[torch.Tensor | None], *, loss_scale: float = 1.0
    ) -> Literal["accumulated", "overflow", "denied"]:
        """Check the claim, add the gradient (divided by the loss scale) and mark the ticket, as one job.

        Returns:
            "accumulated"; "overflow" if a gradient is not finite (ledgered, not added); "denied" without a valid claim.
            An exception halfway discards the whole accumulator: its tickets will be missing from the seal.
        """
        if not self.ledger.may_add(index):
            return "denied"
        if not all(is_finite(g) for g in gradients if g is not None):
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
        self._prepare()
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                view.add_(gradient, alpha=factor)

    def _prepare(self) -> None:
        """A sum that may change."""
        if self._flat is None:
            self._flat = empty_flat(self._layout.num_elements, dtype=self._dtype, device=self._device).zero_()
            self._views = self._layout.views(self._flat)
        elif self._borrowed:  # an attempt that was given up may still be sending it
            self._flat = self._flat.clone()
            self._views = self._layout.views(self._flat)
        self._borrowed = False

    def add_unseen(
        self,
        index: int,
        numbers: Numbers,
        is_valid: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
        *,
        loss_scale: float = 1.0,
        borrowed: bool = False,
    ) -> bool:
        """Accumulate one ticket on a device that has not computed `is_valid` (see `Summand`) yet: what turns out valid is added.

        The ticket is marked in this job all the same. Its gradient is kept and goes into the sum together with the
        next ones, or now if its memory is wanted back (`borrowed`); `complete_sum` completes the sum, and tells the ledger what
        each ticket was, before any seal.

        Returns:
            Whether the ticket was marked; False without a valid claim.
        """
        while self._unseen and self._unseen[0][1].is_known():
            self._resolve(*self._unseen.popleft())
        if not self.ledger.may_add(index):
            return False
        try:
            self._prepare()
            self._waiting.append(Summand(gradients, is_valid, 1.0 / loss_scale))
            if borrowed or len(self._waiting) == MAX_TOGETHER:
                self._add_waiting()
        except BaseException:
            self.discard()
            raise
        self.ledger.add(index, LedgerEntry(0, 0.0))
        self._unseen.append((index, numbers))
        return True

    def complete_sum(self) -> None:
        """Wait until the device has told of every ticket; then sum and ledger are right."""
        self._add_waiting()
        while self._unseen:
            index, numbers = self._unseen.popleft()
            numbers.wait()
            self._resolve(index, numbers)

    def _add_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                self._prepare()
                add_together(self._views, waiting)
            except BaseException:
                self.discard()
                raise

    def _resolve(self, index: int, numbers: Numbers) -> None:
        self.ledger.resolve(index, numbers.entry, overflow=not numbers.is_finite)

    def discard(self) -> None:
        """Drop all that was accumulated: its tickets count for nothing."""
        self.ledger.discard()
        self._unseen.clear()
        self._waiting.clear()
        self._flat, self._views = None, []

    def freeze(self, attempt: Attempt) -> None:
        """Seal the ledger for an attempt. Each gradient was finite; if their sum is not, no ticket of it counts."""
        self.complete_sum()
        if self._flat is not None and not is_finite(self._flat):
            self.ledger.spoil()
            self._flat, self._views = None, []
        self.ledger.collect(attempt, freeze=True)

    def contribution(self) -> torch.Tensor | None:
        """The sum [N] on its device, unchanged by what comes later; None if nothing was added."""
        self.complete_sum()
        if self._flat is None or not self.ledger.entries:
            return None
        self._borrowed = True
        return self._flat.detach()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite and none is beyond `LARGEST`; takes no temporary of the tensor's size."""
    if tensor.numel() == 0:
        return True
    flat = tensor.detach().view(-1) if tensor.dtype == torch.float32 and tensor.is_contiguous() else None
    if flat is not None and not flat.is_cuda and float(torch.dot(flat, flat)) < LARGEST**2:
        return True  # half the time of looking for the extremes; what comes near the bound is looked at below
    extremes = torch.stack(torch.aminmax(tensor.detach()))  # both are NaN if any element is
    return bool((extremes.double().abs() <= LARGEST).all())  # in a 16-bit type the bound itself would be infinite
