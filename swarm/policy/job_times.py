"""How long a job of a compute thread may take, after what jobs of its kind took: a slow one is told from a hung one by that.

Pure. Owns the times; must not know threads, clocks or messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

#: A job may take so many times as long as the longest of the last `RECENT` of its kind.
ALLOWED = 2.5
RECENT = 8
#: A backward that first computes its forward again; any other job that is none of a micro-batch's.
RECOMPUTATION, CONTROL = "recomputation", "control"
KINDS = ("forward", "backward", RECOMPUTATION, "evaluation", "seal", "optimizer", CONTROL)
#: Kinds that may have their first job late, as the sum of others that have run before them.
_MADE_OF: Mapping[str, tuple[str, ...]] = {RECOMPUTATION: ("forward", "backward"), "evaluation": ("forward",)}


class JobTimes:
    """Seconds that jobs of one compute thread take, by kind."""

    def __init__(self) -> None:
        self._own: dict[str, deque[float]] = {}
        self._heard: dict[str, float] = {}

    def note(self, kind: str, seconds: float) -> None:
        """A job has ended."""
        self._own.setdefault(kind, deque(maxlen=RECENT)).append(seconds)

    def told(self) -> dict[str, float]:
        """The longest recent job of each kind, for the other peers of the stage, as `forward_s` and the like."""
        return {f"{kind}_s": round(max(self._own[kind]), 3) for kind in KINDS if kind in self._own}

    def hear(self, told: Mapping[str, object]) -> None:
        """Learn what another peer of the stage told of its jobs; what this one knows of its own counts more."""
        for kind in KINDS:
            seconds = told.get(f"{kind}_s")
            if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
                self._heard[kind] = float(seconds)

    def longest_s(self, kind: str) -> float | None:
        """The longest that such a job took lately; None if nothing tells."""
        if kind in self._own:
            return max(self._own[kind])
        if kind in self._heard:
            return self._heard[kind]
        parts = [self.longest_s(part) for part in _MADE_OF.get(kind, ())]
        known = [part for part in parts if part is not None]
        return sum(known) if known and len(known) == len(parts) else None

    def allowed_s(self, kind: str) -> float:
        """The time that such a job may take; infinite if nothing tells, so that the first one is not given up halfway."""
        longest = self.longest_s(kind)
        return math.inf if longest is None else ALLOWED * longest
