"""What a trainer takes in and tells: the feed's protocol, batches as payloads, committed steps and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from swarm.base.errors import SwarmError
from swarm.base.ids import Ticket
from swarm.wire import messages as m
from swarm.wire.framing import Buffer


class BatchLike(Protocol):
    """Named arrays with a leading batch dimension."""

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arrays by name, [samples, ...], for stage 0."""

    @property
    def labels(self) -> dict[str, np.ndarray]:
        """Arrays by name, [samples, ...], for the last stage."""


class FeedLike(Protocol):
    """Ticket -> samples; `feed.Feed` is the real one."""

    data_digest: str

    def batch(self, ticket: Ticket) -> BatchLike:
        """Return the samples of `ticket`, always the same."""

    def eval_batches(self) -> list[Any]:
        """Return the held-out samples, as batches."""


@dataclass
class RoundTrips:
    """Where the time of one trainer's micro-batches went, summed over those that came back."""

    count: int = 0
    #: From sending a micro-batch until it was back.
    seconds: float = 0.0
    #: In the queues of compute threads, over all stages.
    queue_s: float = 0.0
    #: In forward and backward, over all stages.
    compute_s: float = 0.0

    def add(self, seconds: float, hops: Sequence[m.Hop]) -> None:
        """Count a micro-batch that came back after `seconds`."""
        self.count += 1
        self.seconds += seconds
        self.queue_s += sum(hop.queue_s for hop in hops)
        self.compute_s += sum(hop.forward_s + hop.backward_s for hop in hops)

    def json_fields(self) -> dict[str, float]:
        """Return means in seconds; what is left of a round trip is transfers and everything that the swarm adds."""
        count = max(1, self.count)
        return {"round_trip_s": self.seconds / count, "queue_s": self.queue_s / count, "compute_s": self.compute_s / count}


@dataclass(frozen=True)
class StepReport:
    """One committed step, as a trainer saw it; all but times, retries and round trips come from the record.

    `seconds` is 0 if the step had committed before the trainer came; from the newest of these the run goes on.

    `retries` counts this trainer's micro-batches that were sent or computed again: a peer failed on their way, or was
    killed with what it had accumulated of them.
    """

    record: m.CommitRecord
    seconds: float
    retries: int
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    goes_on: bool = False

    def json_line(self) -> dict[str, Any]:
        """Return the step's line of the metrics; `step` counts from 1."""
        record = self.record
        return {
            "step": record.step + 1,
            "head": record.version_id,
            "loss": record.loss,
            "tokens": record.tokens,
            "tokens_per_s": record.tokens / self.seconds if self.seconds > 0 else 0.0,
            "seconds": self.seconds,
            "grad_norm": record.grad_norm,
            "lr": record.learning_rate,
            "peers": [len(members) for members in record.members],
            "retries": self.retries,
            "skipped": record.skipped,
            "tickets": [result.num_tickets for result in record.results],
            "reopened": record.reopened,
            "run": record.run[:12],
            **self.round_trips.json_fields(),
        }


class StepsFailed(SwarmError):
    """Step after step trains nothing: weights, data or configuration are at fault, and going on helps nobody.

    Args:
        last: number of commits after the last of them.
        num_faulty: so many in a row.
        compression: of the run's wire.
    """

    def __init__(self, last: int, num_faulty: int, compression: str) -> None:
        text = (
            f"steps {last - num_faulty + 1} to {last} were skipped one after the other, because numbers in them are not "
            "finite (NaN or infinity); the run stops: look at the weights, the data and the learning rate"
        )
        if compression == "fp16":
            text += ", and at the wire: fp16 carries nothing above 65504, as bf16 and 8bit do"
        super().__init__(text)


@dataclass(frozen=True)
class TicketReport:
    """What the swarm made of one ticket that can be computed again from a checkpoint."""

    run: str
    ticket: Ticket
    version_id: str
    trained: m.Trained

    def json_line(self) -> dict[str, Any]:
        """Return the ticket's line; `step` counts from 1, as in the metrics of steps."""
        return {
            "step": self.ticket.step + 1,
            "index": self.ticket.index,
            "run": self.run,
            "head": self.version_id,
            "loss_sum": self.trained.loss_sum,
            "tokens": self.trained.tokens,
            "stages": [
                {"peer": hop.peer, "computed_on": hop.computed_on, **(hop.norms.model_dump() if hop.norms is not None else {})}
                for hop in self.trained.hops
            ],
        }


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token on the held-out samples, at the version after `step` commits."""

    step: int
    version_id: str
    loss: float
    tokens: int


def payload_of(batch: BatchLike) -> tuple[tuple[m.TensorSpec, ...], list[Buffer]]:
    """Return the batch as raw tensors: inputs for stage 0, labels for the last."""
    specs: list[m.TensorSpec] = []
    buffers: list[Buffer] = []
    for role, arrays in (("input", batch.inputs), ("label", batch.labels)):
        for name, array in arrays.items():
            array = np.ascontiguousarray(array)
            specs.append(m.TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, role=role))
            buffers.append(array.data.cast("B") if array.size else b"")
    return tuple(specs), buffers
