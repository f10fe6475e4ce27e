"""One ticket again, stage after stage in one process, with what crosses a boundary coded as on the wire.

Holds one stage at a time: each is made twice, for the way forward and for the way back. Owns the computation and where it
parts from another one; must not know files or the swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.base.ids import Ticket
from swarm.lifecycle.step import LedgerEntry
from swarm.stage.compute import StageCompute
from swarm.stage.device import CodedTensors, coded, entry_of, tamed
from swarm.stage.module import Tensors
from swarm.stage.norms import finite, gradient_norms, norm_of
from swarm.stage.versions import Version
from swarm.wire.compression import decode_tensor
from swarm.wire.messages import Codec

#: What a stage is told to have computed, in the order in which a micro-batch does.
FORWARD, BACKWARD = ("output",), ("parameters", "gradient")
#: A ticket's norms, by stage and name.
Norms = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Replayed:
    """The outcome of one ticket here."""

    norms: list[dict[str, float]]
    entry: LedgerEntry


def replay(
    make: Callable[[int], tuple[StageCompute, Version]],
    num_stages: int,
    ticket: Ticket,
    inputs: Tensors,
    labels: Tensors,
    *,
    codec: Codec,
) -> Replayed:
    """Forward and backward of one micro-batch.

    Args:
        make: a stage, and the version that the ticket uses.
        num_stages: of the model.
        ticket: seeds dropout.
        inputs, labels: of the micro-batch, on the CPU. Stages may be on devices of their own.
        codec: of what crosses a boundary.
    """
    norms: list[dict[str, torch.Tensor]] = [{} for _ in range(num_stages)]
    sent = [[coded(name, tensor, "raw", "input") for name, tensor in inputs.items()]]
    for stage in range(num_stages - 1):
        compute, version = make(stage)
        received = _arrived(sent[stage], compute.device)
        outputs = compute.forward(version, ticket, received, None, keep_graph=False).outputs or {}
        norm = norm_of(outputs.values())
        norms[stage] = {} if norm is None else {"output": norm}
        sent.append([coded(name, tensor.detach(), codec, "input") for name, tensor in outputs.items()])
    answer: CodedTensors | None = None
    entry = LedgerEntry(0, 0.0)
    for stage in reversed(range(num_stages)):
        compute, version = make(stage)
        received, gradients = _arrived(sent[stage], compute.device), None
        if answer is not None:
            gradients = _arrived(answer, compute.device)
        placed = {name: tensor.to(compute.device) for name, tensor in labels.items()} if compute.last else None
        activation = compute.forward(version, ticket, received, placed, keep_graph=True)
        if compute.last:
            outputs = activation.outputs or {}
            entry = entry_of(int(outputs["tokens"]), float(outputs["loss_sum"].detach()))
        result = compute.backward(activation, gradients, tokens=entry.tokens)
        norms[stage] |= gradient_norms(result.inputs, norm_of(result.parameters), loss_scale=version.record.loss_scale)
        answer = [coded(name, tensor, codec, "grad") for name, tensor in result.inputs.items()]
    return Replayed([finite({name: float(norm) for name, norm in each.items()}) for each in norms], entry)


def _arrived(payload: CodedTensors, device: str) -> Tensors:
    """The tensors of a payload as the next stage gets them."""
    return {spec.name: tamed(decode_tensor(spec, buffer, device)) for spec, buffer in payload}


@dataclass(frozen=True)
class Parting:
    """The first norm that two computations of one ticket do not agree on."""

    stage: int
    name: str


def first_parting(recorded: Norms, here: Norms, losses: tuple[float, float], *, tolerance: float) -> Parting | None:
    """Find where two computations part, in a micro-batch's order: outputs, the loss, then gradients from the last stage on.

    Args:
        recorded, here: two computations' norms.
        losses: their losses; what the last stage is judged by on the way forward.
        tolerance: relative.
    """
    last = len(recorded) - 1
    way = [(stage, name) for stage in range(last) for name in FORWARD]
    way += [(last, "loss"), *((stage, name) for stage in reversed(range(last + 1)) for name in BACKWARD)]
    for stage, name in way:
        pair = losses if name == "loss" else (recorded[stage].get(name), here[stage].get(name))
        if not agree(*pair, tolerance=tolerance):
            return Parting(stage, name)
    return None


def agree(one: float | None, other: float | None, *, tolerance: float) -> bool:
    """Within a relative `tolerance`; both may be nothing."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
