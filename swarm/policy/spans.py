"""Where to cut a model: spans of layers whose stages take equally long; how many stages a peer's memory asks for. Pure.

A pipeline is as fast as its slowest stage. Of all cuts this takes one whose slowest stage is fastest; of those, one whose
largest stage is smallest; of those, the most even one. Exact, by dynamic programming over stages and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The cost of a part of a model for whoever serves it: work per token (in any unit), and bytes."""

    work: float
    num_bytes: int

    def __add__(self, other: LayerLoad) -> LayerLoad:
        return LayerLoad(self.work + other.work, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads of a model. `first` comes on top at the stage with the first layer (embedding), `last` at that with the last."""

    layers: tuple[LayerLoad, ...]
    first: LayerLoad
    last: LayerLoad

    def of(self, span: range) -> LayerLoad:
        """The load of a stage with the layers of `span`."""
        total = sum((self.layers[number] for number in span), LayerLoad(0.0, 0))
        total = total + self.first if span.start == 0 else total
        return total + self.last if span.stop == len(self.layers) else total


def cut(loads: Loads, num_stages: int) -> tuple[list[range], str]:
    """Contiguous spans of all layers, at least one layer each, and how even they are.

    Raises:
        ValueError: if there are more stages than layers, or none.
    """
    num_layers = len(loads.layers)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_stages} stages of {num_layers} layers")
    table = _Table(loads)
    most_work = most_bytes = float("inf")

    def fits(load: LayerLoad) -> bool:
        return load.work <= most_work and load.num_bytes <= most_bytes

    found = _best(table, num_stages, fits, lambda load: load.work, max)
    most_work = max(table.of(span).work for span in found)
    found = _best(table, num_stages, fits, lambda load: load.num_bytes, max)
    most_bytes = max(table.of(span).num_bytes for span in found)
    found = _best(table, num_stages, fits, lambda load: load.work**2, lambda a, b: a + b)
    mean = table.of(range(num_layers)).work / num_stages
    return found, f"the slowest stage has {most_work / mean if mean else 1.0:.2f} times the mean's work"


def fewest_stages(loads: Loads, max_bytes: int) -> tuple[int | None, str]:
    """The smallest number of stages that all fit `max_bytes` when they are cut for equal work, with the reason; None if a
    layer alone does not."""
    for num_stages in range(1, len(loads.layers) + 1):
        spans, _ = cut(loads, num_stages)
        if all(loads.of(span).num_bytes <= max_bytes for span in spans):
            return num_stages, f"{num_stages - 1} stages would not fit" if num_stages > 1 else "the whole model fits"
    number, most = max(((n, loads.of(range(n, n + 1)).num_bytes) for n in range(len(loads.layers))), key=lambda pair: pair[1])
    besides = " and what its stage has besides" if number in (0, len(loads.layers) - 1) else " alone"
    return None, f"layer {number}{besides} takes {most} bytes"


class _Table:
    """Loads of spans, from sums of the layers before each layer."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._before = list(accumulate(loads.layers, initial=LayerLoad(0.0, 0)))

    def __len__(self) -> int:
        return len(self._loads.layers)

    def of(self, span: range) -> LayerLoad:
        upto, before = self._before[span.stop], self._before[span.start]
        load = LayerLoad(upto.work - before.work, upto.num_bytes - before.num_bytes)
        load = load + self._loads.first if span.start == 0 else load
        return load + self._loads.last if span.stop == len(self) else load


def _best(
    table: _Table,
    num_stages: int,
    fits: Callable[[LayerLoad], bool],
    cost: Callable[[LayerLoad], float],
    join: Callable[[float, float], float],
) -> list[range]:
    """The cut whose stages all `fits` and whose costs, put together by `join`, are least; the earliest of equals.

    There must be one that fits.
    """
    # best[end] = (cost, start of the last span) of the first `end` layers in so many stages
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, num_stages + 1):
        row: dict[int, tuple[float, int]] = {}
        ends = [len(table)] if stage == num_stages else range(stage, len(table) - (num_stages - stage) + 1)
        for end in ends:
            for start, (before, _) in best[-1].items():
                if start >= end:
                    continue
                load = table.of(range(start, end))
                if fits(load):
                    total = join(before, cost(load))
                    if end not in row or total < row[end][0]:
                        row[end] = (total, start)
        best.append(row)
    spans: list[range] = []
    end = len(table)
    for row in reversed(best[1:]):
        start = row[end][1]
        spans.insert(0, range(start, end))
        end = start
    return spans
