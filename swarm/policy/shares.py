"""Which part of the flat gradient each member of a group reduces. Pure.

Equal shares are the default; rounding to whole elements is by the Hagenbach-Bischoff method, as in DeDLOC's code
(arXiv 2106.10207).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def hagenbach_bischoff(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` elements in proportion to `weights`; the parts sum to `total` exactly."""
    whole = sum(weights)
    if whole <= 0:
        raise ValueError("weights must have a positive sum")
    parts = [int(total * weight / (whole * (1 + 1 / max(1, total)))) for weight in weights]
    heap = [(-weight / (part + 1), i) for i, (weight, part) in enumerate(zip(weights, parts, strict=True))]
    heapq.heapify(heap)
    for _ in range(total - sum(parts)):
        _, i = heapq.heappop(heap)
        parts[i] += 1
        heapq.heappush(heap, (-weights[i] / (parts[i] + 1), i))
    return parts


def bounds(total: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """`(start, end)` of each member's part."""
    result = []
    start = 0
    for part in hagenbach_bischoff(total, weights):
        result.append((start, start + part))
        start += part
    return result
