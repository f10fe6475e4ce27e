"""Local updates: DiLoCo (arXiv 2311.08105), OpenDiLoCo (2407.07852), streaming DiLoCo (2501.18512).

With `mode = "local"` a step is an outer step. Its micro-batches fall into `inner_steps` parts of equal size, by number. Each
peer updates its own copy of the stage once for each part, with the micro-batches of it that it computed: as often however
many peers there are. (With `inner_batch_size` it does so after every so many samples of its own.) At the end of the step the
peers average what their copies moved by, weighted by tokens, and everyone applies the mean with Nesterov momentum to the
parameters that they share. Claims, ledger, seal and record are those of every step, so a ticket moves one peer's copy once;
a ticket whose peer dies is computed again by another. Moments of the inner optimizer are private and never synchronised; who
restarts begins with none.

Owns one peer's copy; must not know how averages travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarm.averaging.compressors.interface import Compressor
from swarm.lifecycle.commit_record import clip_coefficient
from swarm.lifecycle.step import LedgerEntry
from swarm.policy.schedule import learning_rate
from swarm.stage.accumulator import Accumulator, Numbers, is_finite
from swarm.stage.moments import OptimizerState
from swarm.stage.optimizers.interface import Optimizer
from swarm.stage.versions import Version, make_version
from swarm.wire.messages import Attempt


@dataclass
class OwnCopy:
    """The state that a peer does not share, from one outer step to the next."""

    #: The inner optimizer, and how its state is kept.
    optimizer: Optimizer
    #: The dtype of the copy that computes.
    dtype: torch.dtype
    compressor: Compressor
    #: The inner optimizer's state; None before the first update.
    inner: OptimizerState | None = None

    def start(self, outer: Version) -> Version:
        """The copy at the beginning of a step: the shared parameters, and what this peer has not sent yet."""
        if self.compressor.residual is None:
            return outer
        layout = self.optimizer.moments.layout
        trained = outer.masters[: layout.num_trained] - self.compressor.residual.to(outer.masters.device)
        return make_version(outer.record, layout, layout.joined(trained, outer.masters), self.dtype)

    def forget(self) -> None:
        """The run was set back: nothing from before belongs to what follows."""
        self.inner = None
        self.compressor.forget()


class LocalAccumulator(Accumulator):
    """The accumulator of an outer step: its contribution is what the own copy moved by, times the tokens that moved it.

    Invariant: the copy has moved by exactly the gradients of `ledger.entries`, each once, when the ledger is frozen.
    """

    def __init__(self, step: int, own: OwnCopy, *, dtype: torch.dtype, device: str) -> None:
        super().__init__(step, own.optimizer.moments.layout, dtype=dtype, device=device)
        self._step = step
        self._own = own
        config = own.optimizer.config
        self._has_inner_steps = config.inner_steps > 0
        #: Tickets that make an update: of an inner step all, or of this peer so many.
        self._per_update = (
            config.tickets_per_step // config.inner_steps
            if config.inner_steps
            else config.inner_batch_size // config.micro_batch_size
        )
        #: The inner step that this peer is in, and tickets that have begun and not ended.
        self._inner_step = 0
        self._begun: set[int] = set()
        self._outer: Version | None = None
        self._copy: Version | None = None
        self._inner = own.inner
        #: Tickets that have moved the copy.
        self._moved_by: set[int] = set()

    def version_for(self, outer: Version, index: int) -> Version:
        """The version that ticket `index` of this step computes with, if the step builds on `outer`."""
        if not self._begun:
            self._reach(index)
        self._begun.add(index)
        if self._outer is None or self._copy is None:
            self._outer, self._copy = outer, self._own.start(outer)
        return self._copy

    def _reach(self, index: int) -> None:
        """Go on to the inner step of ticket `index`, if that is a later one; the copy moves by what belongs to those before."""
        inner_step = index // self._per_update
        if self._has_inner_steps and inner_step > self._inner_step:
            self._update()
            self._inner_step = inner_step
            self._begun.clear()

    def add(
        self, index: int, entry: LedgerEntry, gradients: list[torch.Tensor | None], *, loss_scale: float = 1.0
    ) -> Literal["accumulated", "overflow", "denied"]:
        """Accumulate one ticket, see `Accumulator.add`, and update the copy if enough have come."""
        self._end(index)
        verdict = super().add(index, entry, gradients, loss_scale=loss_scale)
        if verdict == "accumulated":
            self._update_when_due()
        return verdict

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
        """Accumulate one ticket, see `Accumulator.add_unseen`, and update the copy if enough have come."""
        self._end(index)
        is_marked = super().add_unseen(index, numbers, is_valid, gradients, loss_scale=loss_scale, borrowed=borrowed)
        if is_marked:
            self._update_when_due()
        return is_marked

    def _end(self, index: int) -> None:
        self._begun.discard(index)
        if self.ledger.may_add(index):
            self._reach(index)

    def _update_when_due(self) -> None:
        if len(self.ledger.entries) - len(self._moved_by) >= self._per_update:
            self._update()

    def _update(self) -> None:
        """One inner step with what has been accumulated since the last."""
        self.complete_sum()
        new = self.ledger.entries.keys() - self._moved_by
        tokens = sum(self.ledger.entries[index].tokens for index in new)
        if self._flat is None or self._copy is None or not tokens:
            return
        optimizer, trained = self._own.optimizer, self._flat[: self._layout.num_trained]
        config = optimizer.config
        if not is_finite(trained):
            return  # `freeze` calls all of it overflow
        norm = float(torch.linalg.vector_norm(trained, dtype=torch.float64)) / tokens
        try:
            masters, self._inner = optimizer.update(
                self._copy.masters[: self._layout.num_trained],
                trained,
                self._inner or optimizer.moments.zero(),
                step=self._step,
                learning_rate=learning_rate(config, self._step, self._inner_step),
                factor=clip_coefficient(norm, config.max_grad_norm) / tokens,
            )
            masters = self._layout.joined(masters, self._copy.masters)
            self._copy = make_version(self._copy.record, self._layout, masters, self._own.dtype)
        except BaseException:
            self.discard()
            raise
        self._moved_by |= new
        trained.zero_()

    def discard(self) -> None:
        """Drop what was accumulated, and go back to the copy of the step's beginning."""
        super().discard()
        self._start_again()

    def _start_again(self) -> None:
        self._copy, self._inner = None, self._own.inner
        self._moved_by.clear()
        self._inner_step = 0
        self._begun.clear()

    def freeze(self, attempt: Attempt) -> None:
        """Update the copy with what is left over, and seal the ledger."""
        self.complete_sum()
        self._update()
        super().freeze(attempt)
        if not self.ledger.entries:
            self._start_again()

    def contribution(self) -> torch.Tensor | None:
        """Tokens times what the own copy moved by since the shared parameters, `outer - own`, [N] on its device.

        Buffers do not move with the copy: all tickets of the step start from the shared ones, and their sums are as in any step.
        """
        self.complete_sum()
        tokens = sum(entry.tokens for entry in self.ledger.entries.values())
        if self._outer is None or self._copy is None or self._flat is None or not tokens:
            return None
        trained = slice(self._layout.num_trained)
        return self._layout.joined((self._outer.masters[trained] - self._copy.masters[trained]).mul_(tokens), self._flat)

    def committed(self) -> None:
        """The step was decided with this contribution in it: the inner optimizer goes on from here."""
        self._own.inner = self._inner
