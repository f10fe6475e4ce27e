"""Predicted throughput of peers that are spread over stages: the least of the stages' summed rates. Pure.

Every micro-batch passes one peer of every stage, so the slowest stage is the swarm's pace (SWARM, arXiv 2301.11913,
section 3.2). Placement, rebalancing and the simulated experiment predict with this module alone. Must not know where the
figures come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from swarm.base.ids import MemberKey

#: Bytes/s that a link is expected to carry if nobody has measured it: 100 Mb/s.
ASSUMED_BANDWIDTH = 12.5e6
#: No ticket is counted to occupy a peer for less, in seconds.
LEAST_S = 1e-6
#: What a peer holds beside its state and, for a moment, the next one, in units of its masters: gradient sums, averages and
#: copies that compute; see `stage/memory_plan.py`, which counts exactly before a stage is built.
_HELD_BESIDE = 4.5


def held_per_state(kept_per_master: float) -> float:
    """Memory that serving a stage takes, in units of its state, which is the masters and so much more of theirs."""
    return 2.0 + _HELD_BESIDE / (1.0 + kept_per_master)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """The demands of a stage on each of its peers."""

    #: One ticket through a peer's link in the busier direction, in bytes; 0 if not known.
    ticket_bytes: float = 0.0
    #: Parameters and optimizer state: what a peer downloads before it serves.
    state_bytes: int = 0
    #: Memory that serving the stage takes, in units of that.
    held_per_state: float = held_per_state(2.0)

    @property
    def held_bytes(self) -> int:
        """Memory that serving the stage takes."""
        return int(self.state_bytes * self.held_per_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One peer as the policies see it."""

    key: MemberKey
    #: The stage that it serves, or whose state it downloads.
    stage: int
    #: Measured compute seconds per ticket, by the stage where they were measured.
    seconds: Mapping[int, float] = field(default_factory=dict)
    #: Tickets behind the figure of its own stage; 0 if not known.
    num_tickets: float = 0.0
    #: Bytes/s of its link; None if not measured, which is not zero.
    bandwidth: float | None = None
    #: Memory left for another stage's state, in bytes; None if not known.
    room_bytes: int | None = None
    #: Queue + utilisation: tickets that wait on average, and the part of the time in which it computes.
    load: float = 0.0
    #: It serves now; else it downloads, and may neither be moved nor counted as a holder.
    ready: bool = True


class Rate(NamedTuple):
    """Tickets per second, and what bounds them."""

    tickets_per_s: float
    bound: Literal["compute", "network"]


def rate_of(compute_s: float, line_s: float) -> Rate:
    """The rate of a peer that a ticket occupies so long: its compute, and the busier direction of its line.

    Transfers overlap with compute of other tickets, so the longer of the two bounds the rate.
    """
    return Rate(1.0 / max(compute_s, line_s, LEAST_S), "network" if line_s > compute_s else "compute")


class Swarm:
    """One snapshot: what the stages ask for, and who serves them."""

    def __init__(self, stages: Sequence[StageWork], workers: Iterable[Worker]) -> None:
        self.stages = tuple(stages)
        self.workers = tuple(workers)
        known = [s for worker in self.workers for s in worker.seconds.values()]
        #: Seconds per ticket of a peer that was never measured.
        self.typical_s = statistics.median(known) if known else 1.0
        links = [worker.bandwidth for worker in self.workers if worker.bandwidth]
        self.typical_bandwidth = statistics.median(links) if links else ASSUMED_BANDWIDTH

    def seconds(self, worker: Worker, stage: int) -> float:
        """Compute per ticket at `stage`: measured there, else where it serves now, else anywhere, else the typical."""
        for known in (stage, worker.stage):
            if known in worker.seconds:
                return worker.seconds[known]
        return statistics.median(worker.seconds.values()) if worker.seconds else self.typical_s

    def rate(self, worker: Worker, stage: int) -> Rate:
        """Tickets per second of a peer at `stage`, by what is known of its compute and of its line."""
        line_s = self.stages[stage].ticket_bytes / worker.bandwidth if worker.bandwidth else 0.0
        return rate_of(self.seconds(worker, stage), line_s)

    def transfer_s(self, worker: Worker, stage: int) -> float:
        """The download of the state of `stage`."""
        return self.stages[stage].state_bytes / (worker.bandwidth or self.typical_bandwidth)

    def fits(self, worker: Worker, stage: int) -> bool:
        """Whether `worker` has room for `stage`, as far as that is known."""
        return worker.room_bytes is None or self.stages[stage].held_bytes <= worker.room_bytes

    def stage_rates(self, assignment: Mapping[MemberKey, int | None]) -> list[float]:
        """Tickets per second of every stage. `assignment` says where a peer is instead; None: nowhere."""
        rates = [0.0] * len(self.stages)
        for worker in self.workers:
            stage = assignment.get(worker.key, worker.stage)
            if stage is not None:
                rates[stage] += self.rate(worker, stage).tickets_per_s
        return rates

    def throughput(self, assignment: Mapping[MemberKey, int | None]) -> float:
        """Tickets per second of the whole swarm."""
        return min(self.stage_rates(assignment))

    def bound_of(self, stage: int) -> Literal["compute", "network"]:
        """Say what bounds the larger part of a stage's rate."""
        rates = [self.rate(worker, stage) for worker in self.workers if worker.stage == stage]
        network = sum(rate.tickets_per_s for rate in rates if rate.bound == "network")
        return "network" if 2 * network > sum(rate.tickets_per_s for rate in rates) else "compute"

    def load_of(self, stage: int) -> float:
        """Mean load of the peers that serve a stage."""
        loads = [worker.load for worker in self.workers if worker.stage == stage and worker.ready]
        return statistics.fmean(loads) if loads else 0.0
