"""Local updates: DiLoCo (arXiv 2311.08105), OpenDiLoCo (2407.07852), streaming DiLoCo (2501.18512).

With `mode = "local"` a step is an outer step. During it each peer updates its own copy of the stage with AdamW after every
`inner_batch_size` samples that it accumulated itself; at its end the peers average what their copies moved by, weighted by
tokens, and everyone applies the mean with Nesterov momentum to the parameters that they share. Claims, ledger, seal and
record are those of every step, so a ticket moves one peer's copy once; a ticket whose peer dies is computed again by
another. Moments of the inner optimizer are private and never synchronised; who restarts begins with none.

Owns one peer's copy; must not know how averages travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarm.averaging.compressors.fragments import Fragments
from swarm.averaging.compressors.interface import Compressor
from swarm.base.config import RunConfig
from swarm.lifecycle.record import clip_coefficient
from swarm.lifecycle.step import LedgerEntry
from swarm.policy.schedule import learning_rate
from swarm.stage.accumulator import Accumulator, Numbers, is_finite
from swarm.stage.moments import FIRST, Moments, OptimizerState
from swarm.stage.optimizer import adamw
from swarm.stage.versions import Version, make_version
from swarm.wire.messages import Attempt


@dataclass
class OwnCopy:
    """What a peer keeps of its own from one outer step to the next."""

    config: RunConfig
    #: How the inner optimizer's are kept.
    moments: Moments
    #: Of the copy that computes.
    dtype: torch.dtype
    compressor: Compressor
    #: Moments of the inner optimizer; None before the first update.
    inner: OptimizerState | None = None

    def start(self, outer: Version) -> Version:
        """The copy at the beginning of a step: the shared parameters, and what this peer has not sent yet."""
        residual = self.compressor.residual if isinstance(self.compressor, Fragments) else None
        if residual is None:
            return outer
        masters = outer.masters - residual.to(outer.masters.device)
        return make_version(outer.record, self.moments.layout, masters, self.dtype)

    def forget(self) -> None:
        """The run was set back: nothing from before belongs to what follows."""
        self.inner = None
        self.compressor.forget()


class LocalAccumulator(Accumulator):
    """The accumulator of an outer step: its contribution is what the own copy moved by, times the tokens that moved it.

    Invariant: the copy has moved by exactly the gradients of `ledger.entries`, each once, when the ledger is frozen.
    """

    def __init__(self, step: int, own: OwnCopy, *, dtype: torch.dtype, device: str) -> None:
        super().__init__(step, own.moments.layout, dtype=dtype, device=device)
        self._step = step
        self._own = own
        self._per_update = own.config.inner_batch_size // own.config.micro_batch_size
        self._outer: Version | None = None
        self._copy: Version | None = None
        self._inner = own.inner
        #: Tickets that have moved the copy.
        self._moved_by: set[int] = set()

    def version_for(self, outer: Version) -> Version:
        """What the next ticket of this step computes with, if `outer` is what the step builds on."""
        if self._outer is None or self._copy is None:
            self._outer, self._copy = outer, self._own.start(outer)
        return self._copy

    def add(
        self, index: int, entry: LedgerEntry, gradients: list[torch.Tensor | None], *, loss_scale: float = 1.0
    ) -> Literal["accumulated", "overflow", "denied"]:
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
        is_marked = super().add_unseen(index, numbers, is_valid, gradients, loss_scale=loss_scale, borrowed=borrowed)
        if is_marked:
            self._update_when_due()
        return is_marked

    def _update_when_due(self) -> None:
        if len(self.ledger.entries) - len(self._moved_by) >= self._per_update:
            self._update()

    def _update(self) -> None:
        """One inner step with what has been accumulated since the last."""
        self.settle()
        new = self.ledger.entries.keys() - self._moved_by
        tokens = sum(self.ledger.entries[index].tokens for index in new)
        if self._flat is None or self._copy is None or not tokens:
            return
        config, moments = self._own.config, self._own.moments
        if not is_finite(self._flat):
            return  # `freeze` calls all of it overflow
        norm = float(torch.linalg.vector_norm(self._flat, dtype=torch.float64)) / tokens
        try:
            masters, self._inner = adamw(
                config,
                moments,
                self._copy.masters,
                self._flat,
                self._inner or moments.zero(),
                learning_rate=learning_rate(config, self._step),
                factor=clip_coefficient(norm, config.max_grad_norm) / tokens,
            )
            self._copy = make_version(self._copy.record, self._layout, masters, self._own.dtype)
        except BaseException:
            self.discard()
            raise
        self._moved_by |= new
        self._flat.zero_()

    def discard(self) -> None:
        super().discard()
        self._start_again()

    def _start_again(self) -> None:
        self._copy, self._inner = None, self._own.inner
        self._moved_by.clear()

    def freeze(self, attempt: Attempt) -> None:
        self.settle()
        self._update()
        super().freeze(attempt)
        if not self.ledger.entries:
            self._start_again()

    def contribution(self) -> torch.Tensor | None:
        """Tokens times what the own copy moved by since the shared parameters, `outer - own`, [N] on its device."""
        self.settle()
        tokens = sum(entry.tokens for entry in self.ledger.entries.values())
        if self._outer is None or self._copy is None or not tokens:
            return None
        return (self._outer.masters - self._copy.masters).mul_(tokens)

    def committed(self) -> None:
        """The step was decided with this contribution in it: the inner optimizer goes on from here."""
        self._own.inner = self._inner


def nesterov(
    config: RunConfig, masters: torch.Tensor, difference: torch.Tensor, state: OptimizerState, *, step: int, factor: float
) -> tuple[torch.Tensor, OptimizerState]:
    """The outer update (arXiv 2311.08105, algorithm 1) of the fragment whose turn it is.

    Velocity and parameters as in SGD with Nesterov momentum: v = m v + d; p = p - lr (d + m v).

    Args:
        config: outer learning rate and momentum, fragments.
        masters: flat [N]; not modified.
        difference: flat [N], the sum over tokens of `outer - own copy`; not modified.
        state: its first moment, as numbers, is the velocity; not modified. The second is not used.
        step: of the commit.
        factor: makes the sum a mean.

    Returns:
        New masters and new state.
    """
    fragment = slice(step % config.fragments, None, config.fragments)
    mean = difference[fragment] * factor
    before = state.tensors[FIRST]
    velocity = before[fragment].to(masters.device) * config.outer_momentum
    velocity += mean
    masters, first = masters.clone(), before.clone()
    first[fragment] = velocity
    masters[fragment] -= velocity.mul_(config.outer_momentum).add_(mean).mul_(config.outer_learning_rate)
    return masters, OptimizerState({**state.tensors, FIRST: first}, state.num_updates + 1)
