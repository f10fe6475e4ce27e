"""The devices by name. Owns the CPU, which computes at once; CUDA devices are in `gpu/cuda.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import Accumulator
from swarm.stage.device import (
    Added,
    Device,
    DeviceTime,
    HostNumbers,
    KnownNumbers,
    Outgoing,
    TensorRole,
    Transfer,
    coded,
    entry_of,
    tamed,
)
from swarm.stage.executor import ThreadExecutor
from swarm.stage.module import Tensors
from swarm.stage.norms import norm_of
from swarm.wire.compression import decode_tensor
from swarm.wire.framing import Frame
from swarm.wire.messages import Codec


class HostDevice(Device):
    """The CPU. All is complete when it has begun."""

    def begin(self) -> None:
        """Do nothing: a job is timed by its thread."""

    def end(self) -> DeviceTime:
        """Return a transfer that is complete."""
        return DeviceTime()

    def receive(self, frame: Frame, role: str) -> Tensors:
        """Decode the frame's tensors of one role."""
        return {
            spec.name: tamed(decode_tensor(spec, buffer))
            for spec, buffer in zip(frame.message.tensors, frame.buffers, strict=True)
            if spec.role == role
        }

    def send(self, tensors: Tensors, codec: Codec, role: TensorRole) -> Outgoing:
        """Encode tensors."""
        return Outgoing([coded(name, tensor, codec, role) for name, tensor in tensors.items()])

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
        """Accumulate one ticket."""
        norm = norm_of(gradients) if with_norm else None
        if not isinstance(entry, LedgerEntry):
            entry = entry_of(int(entry["tokens"]), float(entry["loss_sum"].detach()))
        verdict = accumulator.add(index, entry, list(gradients), loss_scale=loss_scale)
        return Added(marked=verdict != "denied", numbers=KnownNumbers(entry, verdict != "overflow"), norm=norm)

    def tell(self, numbers: Mapping[str, torch.Tensor]) -> HostNumbers:
        """Read single numbers."""
        return HostNumbers({name: float(number) for name, number in numbers.items()})

    async def complete(self, *transfers: Transfer) -> None:
        """Do nothing: they were complete when they began."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself if it is on the CPU, else a copy there, made beside what the device computes."""
    if not tensor.is_cuda:
        return tensor
    from swarm.stage.gpu.cuda import copy_to_host

    return copy_to_host(tensor)


def on_device(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a CPU tensor on the device `name`: itself, or a copy made beside what the device computes."""
    if torch.device(name).type == "cpu":
        return tensor
    from swarm.stage.gpu.cuda import copy_to_device

    return copy_to_device(tensor, torch.device(name))


def device_of(name: str) -> Device:
    """The device `cpu` or `cuda:N`. Call it on the event loop that will use it."""
    if torch.device(name).type == "cpu":
        return HostDevice()
    from swarm.stage.gpu.cuda import CudaDevice

    return CudaDevice(torch.device(name))


def compute_thread(name: str) -> ThreadExecutor:
    """The compute thread of the device `cpu` or `cuda:N`."""
    if torch.device(name).type == "cpu":
        return ThreadExecutor()
    from swarm.stage.gpu.cuda import Pace

    device = torch.device(name)
    return ThreadExecutor(prepare=lambda: torch.cuda.set_device(device), after_job=Pace(device))
