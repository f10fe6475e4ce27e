"""What a trainer takes in and tells: the feed's protocol, batches as payloads, committed steps and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swarm.base.ids import Ticket
from swarm.wire import messages as m
from swarm.wire.framing import Buffer


class BatchLike(Protocol):
    """Named arrays with a leading batch dimension."""

    @property
    def inputs(self) -> dict[str, np.ndarray]: ...
    @property
    def labels(self) -> dict[str, np.ndarray]: ...


class FeedLike(Protocol):
    """Ticket -> samples; `feed.Feed` is the real one."""

    data_digest: str

    def batch(self, ticket: Ticket) -> BatchLike: ...
    def eval_batches(self) -> list[Any]: ...


@dataclass(frozen=True)
class StepReport:
    """One committed step, as a trainer saw it; all but the times and retries come from the record."""

    record: m.CommitRecord
    seconds: float
    retries: int

    def json_line(self) -> dict[str, Any]:
        record = self.record
        return {
            "step": record.step + 1,
            "head": record.head,
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
        }


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token on the held-out samples, at the head after `step` commits."""

    step: int
    head: str
    loss: float
    tokens: int


def payload_of(batch: BatchLike) -> tuple[tuple[m.TensorSpec, ...], list[Buffer]]:
    """The batch as raw tensors: inputs for stage 0, labels for the last."""
    specs: list[m.TensorSpec] = []
    buffers: list[Buffer] = []
    for role, arrays in (("input", batch.inputs), ("label", batch.labels)):
        for name, array in arrays.items():
            array = np.ascontiguousarray(array)
            specs.append(m.TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, role=role))
            buffers.append(array.data.cast("B") if array.size else b"")
    return tuple(specs), buffers

