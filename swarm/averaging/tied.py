"""Sums of tied parameters: what one stage hands to the others that hold a copy, and what it makes of theirs.

Each stage's all-reduce sums what its own copy received. Every member of every stage then adds up the stages' sums in the
order of the tie's places, so all of them end on the same bits; the owner's stage counts them in the norm. Owns this
arithmetic; the shell fetches the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.base.errors import ConfigError
from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout
from swarm.stage.module import Tie


@dataclass(frozen=True)
class Tied:
    """A stage's summed gradient with its tied parameters summed over stages."""

    flat: torch.Tensor
    #: Name of each tie and digest of its sum: the same at every stage that holds a copy.
    digests: tuple[tuple[str, str], ...] = ()
    #: Elements `start:end` of `flat` that another stage counts in the norm.
    uncounted: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TiedRange:
    """The place of one tie in this stage's flat tensors."""

    name: str
    start: int
    end: int
    #: The stages that hold a copy, the owner first.
    stages: tuple[int, ...]


class TiedRanges:
    """The ties of one stage.

    Raises:
        ConfigError: if a tie names a parameter that the stage lacks, or a stage twice.
    """

    def __init__(self, ties: Sequence[Tie], stage: int, layout: Layout) -> None:
        self.stage = stage
        self.ranges: list[TiedRange] = []
        for tie in ties:
            stages = tuple(place for place, _ in tie.places)
            if len(set(stages)) != len(stages):
                raise ConfigError(f"tie {tie.name}: a stage is named twice")
            name = next((name for place, name in tie.places if place == stage), None)
            if name is not None:
                if name not in layout.names:
                    raise ConfigError(f"tie {tie.name}: stage {stage} trains no parameter {name}")
                at = layout.names.index(name)
                self.ranges.append(TiedRange(tie.name, layout.offsets[at], layout.offsets[at + 1], stages))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def own(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of this stage's own sums, by name of the tie."""
        return {r.name: flat[r.start : r.end].clone() for r in self.ranges}

    def tie(self, flat: torch.Tensor, others: Mapping[tuple[str, int], torch.Tensor]) -> Tied:
        """Write the sums over stages into `flat`.

        Args:
            flat: this stage's summed gradient [N]; it is changed.
            others: the other stages' sums, by (name of the tie, stage).
        """
        digests = []
        for r in self.ranges:
            own = flat[r.start : r.end]
            first, *rest = (own if stage == self.stage else others[r.name, stage] for stage in r.stages)
            total = first.clone()
            for other in rest:
                total += other
            own.copy_(total)
            digests.append((r.name, digest_of([total])))
        return Tied(flat, tuple(digests), self.uncounted)

    @property
    def uncounted(self) -> tuple[tuple[int, int], ...]:
        """The ranges `start:end` of ties that another stage owns: their squares are counted there."""
        return tuple((r.start, r.end) for r in self.ranges if r.stages[0] != self.stage)
