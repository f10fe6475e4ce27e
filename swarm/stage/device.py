"""The interface of a device: how tensors get from buffers onto it and back, and what a ticket's numbers turn out to be.

A CPU has its results at once. A CUDA device computes later than its thread asks, so whatever leaves it is a `Transfer` that
is complete some time after the job that began it: a job only begins transfers and never waits for one. Must not know which
devices there are (`devices.py`), nor messages' routes.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import LARGEST, Accumulator, Numbers, is_finite
from swarm.stage.module import Tensors
from swarm.wire.compression import CODECS, NonFinite, all_finite, encode_tensor
from swarm.wire.framing import Buffer, Frame
from swarm.wire.messages import Codec, TensorSpec

logger = logging.getLogger(__name__)

CodedTensors = list[tuple[TensorSpec, Buffer]]
TensorRole = Literal["input", "grad"]
#: Gives writable memory of a size.
Allocate = Callable[[int], memoryview]


class Transfer:
    """Something on its way from the device; its fields are valid once `Device.complete` has returned."""

    def wait(self) -> None:
        """Block this thread until it is complete; a second time does nothing."""


class DeviceTime(Transfer):
    """The end of a job at the device."""

    #: How long the device worked on it; None: as long as its thread.
    seconds: float | None = None


class Outgoing(Transfer):
    """Tensors as bytes for the wire."""

    payload: CodedTensors

    def __init__(self, payload: CodedTensors) -> None:
        self.payload = payload


@dataclass(frozen=True)
class KnownNumbers:
    """The numbers of a ticket on a device that computes at once."""

    entry: LedgerEntry
    is_finite: bool

    def is_known(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Added(Transfer):
    """The fate of one ticket at the accumulator."""

    def __init__(self, *, marked: bool, numbers: Numbers, norm: torch.Tensor | None) -> None:
        self._marked = marked
        self._numbers = numbers
        #: The norm of the gradients as one vector, if it was wanted and there are any: 0-d fp64 on their device, not waited for.
        self.norm = norm

    def wait(self) -> None:
        """Block this thread until the ticket's numbers are there."""
        self._numbers.wait()

    @property
    def entry(self) -> LedgerEntry:
        """Tokens and loss of the ticket."""
        return self._numbers.entry

    @property
    def verdict(self) -> Literal["accumulated", "overflow", "denied"]:
        """The fate of the ticket: its claim was `denied`, its gradients are an `overflow`, or they are `accumulated`."""
        if not self._marked:
            return "denied"
        return "accumulated" if self._numbers.is_finite else "overflow"


class HostNumbers(Transfer):
    """Numbers that the device has computed, by name."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values = values


class Device(abc.ABC):
    """A device that a stage computes on. A job of its compute thread calls `begin`, `receive`, `send`, `add`, `tell`, `end`."""

    #: Gives the transport memory to receive into; None where any will do.
    allocate: Allocate | None = None

    def memory_peaks(self) -> dict[str, int]:
        """The most bytes that tensors had, and that this process held for them, for an operator; empty where untold."""
        return {}

    @abc.abstractmethod
    def begin(self) -> None:
        """A job begins."""

    @abc.abstractmethod
    def end(self) -> DeviceTime:
        """It has begun all that it does."""

    @abc.abstractmethod
    def receive(self, frame: Frame, role: str) -> Tensors:
        """The frame's tensors of one role, on the device."""

    @abc.abstractmethod
    def send(self, tensors: Tensors, codec: Codec, role: TensorRole) -> Outgoing:
        """Encode and begin to copy out. Lossy codecs refuse what is not finite, so that travels raw; a finite value that the
        codec cannot hold is as good as infinite, see `unfit`."""

    @abc.abstractmethod
    def add(
        self,
        accumulator: Accumulator,
        index: int,
        gradients: Sequence[torch.Tensor | None],
        *,
        loss_scale: float,
        entry: LedgerEntry | Tensors,
        with_norm: bool,
        borrowed: bool = False,
    ) -> Added:
        """Accumulate one ticket, see `Accumulator`; `entry` is known, or is the last stage's output; memory of `borrowed`
        gradients is wanted back."""

    @abc.abstractmethod
    def tell(self, numbers: Mapping[str, torch.Tensor]) -> HostNumbers:
        """Begin to bring single numbers to the host."""

    @abc.abstractmethod
    async def complete(self, *transfers: Transfer) -> None:
        """Return once all are complete, without holding up the event loop."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what `complete` needs."""


def entry_of(tokens: float, loss_sum: float) -> LedgerEntry:
    """A loss that is not finite says nothing: its ticket overflows, and counts as 0."""
    return LedgerEntry(int(tokens), loss_sum if abs(loss_sum) < float("inf") else 0.0)


def tamed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, with NaN for numbers that are as good as infinite: a layer might turn those into harmless ones."""
    if not tensor.is_floating_point() or is_finite(tensor):
        return tensor
    return tensor.masked_fill(~(tensor.isfinite() & (tensor.double().abs() <= LARGEST)), float("nan"))


#: Codec -> what `RunConfig.compression` calls it.
_OPTIONS = {codec: option for option, codec in CODECS.items()}


def unfit(name: str, tensor: torch.Tensor, codec: Codec, role: TensorRole) -> tuple[TensorSpec, Buffer]:
    """Code a tensor with finite values that `codec` cannot hold: as NaN, which makes an overflow of its ticket."""
    logger.warning(
        "%s has values up to %.3g, which the wire (--compression %s) does not carry: their ticket counts as an overflow",
        name,
        float(tensor.detach().abs().max()),
        _OPTIONS.get(codec, codec),
    )
    return encode_tensor(name, torch.full_like(tensor, float("nan")), "raw", role)


def coded(name: str, tensor: torch.Tensor, codec: Codec, role: TensorRole) -> tuple[TensorSpec, Buffer]:
    """Code a tensor, which is waited for: raw if it is not finite."""
    try:
        return encode_tensor(name, tensor, codec if all_finite(tensor) else "raw", role)
    except NonFinite:
        return unfit(name, tensor, codec, role)


def kind_of(name: str) -> str:
    """The kind of device that `cpu` or `cuda:N` is to whoever compares numbers: its type, and whether this process has it keep
    ten bits of the factors of fp32 products (TF32)."""
    return torch.device(name).type + ("" if torch.get_float32_matmul_precision() == "highest" else "-tf32")


def compute_as(kind: str) -> None:
    """Have this process's devices compute as `kind_of` told of another one."""
    torch.set_float32_matmul_precision("high" if kind.endswith("-tf32") else "highest")
