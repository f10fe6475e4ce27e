"""What an optimizer is: an update of flat parameters, and what is kept from one update to the next. Owns the interface alone."""

from __future__ import annotations

import abc
import bisect
from collections.abc import Iterator
from typing import ClassVar

import torch

from swarm.base.config import RunConfig
from swarm.stage.eight_bit import num_blocks
from swarm.stage.moments import FIRST, SECOND, Moments, OptimizerState
from swarm.stage.optimizers.decay import undecayed


class Optimizer(abc.ABC):
    """Updates the parameters of one stage.

    Peers that start from the same bits must end on the same bits, whatever their devices: so an update consists of
    elementwise operations, each rounded by itself, and of no fused kernel. It works out of place: the tensors of an older
    version may still be held by a live autograd graph.

    Args:
        config: has the optimizer's options.
        moments: how its state is kept.
    """

    #: What it keeps, each a vector of one number for each parameter. These names are in checkpoints and snapshots.
    kept: ClassVar[tuple[str, ...]] = (FIRST, SECOND)
    #: It keeps that as 8-bit codes.
    in_8_bits: ClassVar[bool] = False

    def __init__(self, config: RunConfig, moments: Moments) -> None:
        self.config = config
        self.moments = moments
        self._undecayed = undecayed(moments.layout.trained, config.no_decay)

    def decays(self, part: slice) -> Iterator[tuple[slice, bool]]:
        """The elements of `part` in order, as parts that all decay or all do not, and which."""
        at = part.start
        for start, end in self._undecayed[bisect.bisect_right(self._undecayed, part.start, key=lambda pair: pair[1]) :]:
            if start >= part.stop:
                break
            if at < start:
                yield slice(at, start), True
            at = min(end, part.stop)
            yield slice(max(start, part.start), at), False
        if at < part.stop:
            yield slice(at, part.stop), True

    @abc.abstractmethod
    def update(
        self,
        masters: torch.Tensor,
        total: torch.Tensor,
        state: OptimizerState,
        *,
        step: int,
        learning_rate: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, OptimizerState]:
        """Make one update.

        Args:
            masters: flat [N] parameters, fp32 or fp64; not modified.
            total: flat [N] sum of gradients, of the same dtype; not modified.
            state: what `moments` keeps; not modified.
            step: of the commit that this update belongs to.
            learning_rate: of this step.
            factor: makes the clipped mean of the sum.

        Returns:
            New masters and new state.
        """

    @classmethod
    def kept_bytes(cls, num_elements: int, itemsize: int) -> int:
        """Bytes of the state for so many parameters, whose masters take `itemsize` bytes each."""
        one = num_elements + 4 * num_blocks(num_elements) if cls.in_8_bits else num_elements * itemsize
        return len(cls.kept) * one
