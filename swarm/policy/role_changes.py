"""Who of a stage computes, who only aggregates, and who only computes, from here on. Pure.

The plan is that of `roles.py`, with the rates of a butterfly, which is what runs; here is what it is worth. Roles change as a
whole, and only if steps should get faster by `WORTH`.

Everybody goes at the slowest line's pace for most of a round, so a line shows less than it carries; which one is the slowest
shows in the bursts. A line is therefore taken to be as good as the best of the stage unless it shows less than the part
`SLOW` of that, and only behind a slow line does anybody stop computing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.policy.roles import Candidate, Work, plan_roles, step_s
from swarm.policy.shares import best_time

#: Roles change only if that makes steps faster by this fraction.
WORTH = 0.08
#: A line that shows less than this part of what the best one shows is slow.
SLOW = 0.5
#: Who would reduce less than this part of an average need not reduce at all.
LEAST_SHARE = 1e-3

Role = Literal["both", "compute", "aggregate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Colleague:
    """One ready peer of a stage: its role, tickets per second, and bytes per second of its line; None: not measured."""

    name: str
    role: Role = "both"
    tickets_per_s: float | None = None
    upload: float | None = None
    #: What its line has shown at its best for a while.
    best_upload: float | None = None
    best_download: float | None = None


#: Roles of a stage's peers in their order, and why.
Decision = tuple[tuple[Role, ...], str]


def revise_roles(colleagues: Sequence[Colleague], work: Work) -> Decision:
    """Choose the roles of a stage's peers from here on.

    Args:
        colleagues: the ready peers of the stage.
        work: what a step asks of them; an average of 0 bytes is none that roles could make faster.
    """
    present = tuple(x.role for x in colleagues)
    rates = [x.tickets_per_s for x in colleagues if x.tickets_per_s]
    if len(colleagues) < 2 or not work.average_bytes:
        return present, "there is no average that roles could make faster"
    lines = [(x.upload, x.best_upload, x.best_download) for x in colleagues if x.upload and x.best_upload and x.best_download]
    if len(lines) < len(colleagues) or not rates:
        return present, "not all of the peers and their lines were measured yet"
    most, best_upload, best_download = (max(figures) for figures in zip(*lines, strict=True))
    is_slow = [upload < SLOW * most for upload, _, _ in lines]
    candidates = [
        Candidate(
            samples_per_s=x.tickets_per_s or statistics.median(rates),
            upload=upload if slow else best_upload,
            download=download if download < SLOW * best_download else best_download,
        )
        for x, (upload, _, download), slow in zip(colleagues, lines, is_slow, strict=True)
    ]
    compute_anyway = [i for i, slow in enumerate(is_slow) if not slow and present[i] != "aggregate"]
    plan, reason = plan_roles(candidates, work, fixed=compute_anyway)
    before, after = _step_s(candidates, present, work), 1.0 / plan.steps_per_s
    if before <= after * (1.0 + WORTH):
        return present, f"other roles would make steps of {before:.3g} s {before / after - 1:.1%} faster"
    roles = tuple(map(_role, plan.computes, plan.weights, is_slow))
    changed = [f"{x.name} {role}" for x, role in zip(colleagues, roles, strict=True) if role != x.role]
    return roles, f"steps of {before:.3g} s should take {after:.3g} s with {', '.join(changed)}: {reason}"


def _role(computes: bool, weight: float, is_slow: bool) -> Role:
    if not computes:
        return "aggregate"
    return "compute" if is_slow and weight < LEAST_SHARE else "both"


def _step_s(candidates: Sequence[Candidate], roles: Sequence[Role], work: Work) -> float:
    """Seconds of a step with these roles."""
    computing = sum(x.samples_per_s for x, role in zip(candidates, roles, strict=True) if role != "aggregate")
    reducers = [x.reducer(role != "aggregate", reduces=role != "compute") for x, role in zip(candidates, roles, strict=True)]
    if not computing or not any(x.reachable for x in reducers):
        return math.inf
    return step_s(work, work.tickets / computing, best_time(reducers) * work.average_bytes)
