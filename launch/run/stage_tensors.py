"""The tensors of a model whose parts lie in several places: one part is in memory at a time. Owns which; must not know files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StageTensors(Mapping[str, "torch.Tensor"]):
    """Tensors by name. The part that one was asked of last stays in memory, and no other.

    Args:
        parts: for each part the names of its tensors, and what reads them all.
    """

    def __init__(self, parts: list[tuple[frozenset[str], Callable[[], Mapping[str, torch.Tensor]]]]) -> None:
        self._part_of = {name: number for number, (names, _) in enumerate(parts) for name in sorted(names)}
        self._parts = parts
        self._number = -1
        self._tensors: Mapping[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        number = self._part_of[name]
        if number != self._number:
            self._tensors = {}
            self._tensors, self._number = self._parts[number][1](), number
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)
