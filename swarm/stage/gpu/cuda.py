"""A CUDA device: copies on their own streams from and to pinned memory, and a compute thread that runs a little ahead.

The compute thread enqueues kernels on the device's default stream and never waits for a result. What it needs arrives
through the upload stream; what leaves goes through the download stream into pinned memory. One more thread waits for
the downloads, in the order in which they began.

Pinned memory comes from torch's own pool (blocks are reused once their copies are done), so it is bounded by what is in
flight: requests by the transport's admission, answers by the number of requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import LARGEST, Accumulator
from swarm.stage.device import Added, Device, DeviceTime, HostNumbers, Outgoing, TensorRole, Transfer, entry_of, unfit
from swarm.stage.executor import Priority, ThreadExecutor
from swarm.stage.flat import empty_flat
from swarm.stage.gpu.kernels import survey
from swarm.stage.module import Tensors
from swarm.wire.compression import code_tensor, decode_coded, decode_tensor, encode_tensor
from swarm.wire.framing import Buffer, Frame
from swarm.wire.messages import Codec, TensorSpec

#: Jobs whose kernels may be waiting at the device while the compute thread goes on with the next.
JOBS_AHEAD = 2
#: Bodies beyond this size are received into ordinary memory: pinning is for what comes again and again.
MAX_PINNED_BYTES = 2**28
_MIN_PINNED_BYTES = 2**14
#: Elements of a whole stage's sum or update that are copied at a time.
_PIECE_ELEMENTS = 2**24


class Pace:
    """Called after each job: holds the compute thread until at most `JOBS_AHEAD` jobs are left at the device.

    So the device never runs dry, and a backward that comes in overtakes all but two jobs. The thread sleeps meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        self._running.append(_event_on(torch.cuda.current_stream(self._device)))
        if len(self._running) > JOBS_AHEAD:
            self._running.popleft().synchronize()


def copy_to_host(source: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, while the device goes on; this thread waits."""
    target = empty_flat(source.numel(), dtype=source.dtype).view(source.shape)  # fresh pages take longer than the copy
    _copy_in_pieces(source, target, source.device)
    return target


def copy_to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`, while that goes on; this thread waits."""
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    _copy_in_pieces(source, target, device)
    return target


def _copy_in_pieces(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Through two pinned buffers in turn, on a stream of its own: several times as fast as from ordinary memory."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))  # `source` may be in the making, `target`'s memory in use
        pieces = list(zip(source.view(-1).split(_PIECE_ELEMENTS), target.view(-1).split(_PIECE_ELEMENTS), strict=True))
        pinned = [torch.empty(_PIECE_ELEMENTS, dtype=source.dtype, pin_memory=True) for _ in pieces[:2]]
        copied: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()
        for number, (origin, goal) in enumerate(pieces):
            if len(copied) == len(pinned):
                _finish_piece(*copied.popleft())
            buffer = pinned[number % 2][: len(origin)]
            with torch.cuda.stream(stream):
                if origin.is_cuda:
                    buffer.copy_(origin, non_blocking=True)
                else:
                    goal.copy_(buffer.copy_(origin), non_blocking=True)
            copied.append((_event_on(stream), buffer, goal))
        while copied:
            _finish_piece(*copied.popleft())


def _finish_piece(done: torch.cuda.Event, buffer: torch.Tensor, goal: torch.Tensor) -> None:
    done.synchronize()
    if not goal.is_cuda:
        goal.copy_(buffer)


def _event_on(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed, blocking=True)
    event.record(stream)
    return event


def pinned_buffer(num_bytes: int) -> memoryview:
    """Writable memory that a device can copy from in the background, if it is of a size for that."""
    if not _MIN_PINNED_BYTES <= num_bytes <= MAX_PINNED_BYTES:
        return np.empty(num_bytes, np.uint8).data
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


class CudaDevice(Device):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.set_device(device)  # of this thread, so that pinned memory belongs to no other device
        self._compute = torch.cuda.default_stream(device)
        self._uploads = torch.cuda.Stream(device)
        self._downloads = torch.cuda.Stream(device)
        #: What is being copied in: its memory must stay until the copy is done, also if its request is given up.
        self._arriving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._began = _event_on(self._compute, timed=True)
        self._waiter = ThreadExecutor("downloads", prepare=lambda: torch.cuda.set_device(device))
        self.allocate = pinned_buffer

    def memory_peaks(self) -> dict[str, int]:
        """The most bytes of torch's tensors, and of torch's pool, on this device."""
        return {
            "peak_tensor_bytes": torch.cuda.max_memory_allocated(self._device),
            "peak_device_bytes": torch.cuda.max_memory_reserved(self._device),
        }

    def begin(self) -> None:
        """Note on the device's stream that a job begins."""
        self._began = _event_on(self._compute, timed=True)

    def end(self) -> DeviceTime:
        """Return the time from `begin` to here on the device's stream."""
        return _DeviceTimeLater(self._began, _event_on(self._compute, timed=True))

    # ------------------------------------------------------------------------------------------------ in

    def receive(self, frame: Frame, role: str) -> Tensors:
        """Begin to copy in the frame's tensors of one role; kernels that use them wait for the copies."""
        while self._arriving and self._arriving[0][0].query():
            self._arriving.popleft()
        return {
            spec.name: self._upload(spec, buffer)
            for spec, buffer in zip(frame.message.tensors, frame.buffers, strict=True)
            if spec.role == role
        }

    def _upload(self, spec: TensorSpec, buffer: Buffer) -> torch.Tensor:
        if spec.num_elements == 0:
            return decode_tensor(spec, buffer, self._device)
        source = torch.from_numpy(np.frombuffer(_writable(buffer), np.uint8))
        with torch.cuda.stream(self._uploads):
            coded = source.to(self._device, non_blocking=True)
        done = _event_on(self._uploads)
        self._arriving.append((done, source))
        self._compute.wait_event(done)
        coded.record_stream(self._compute)
        return decode_coded(spec, coded)

    # ------------------------------------------------------------------------------------------------ out

    def send(self, tensors: Tensors, codec: Codec, role: TensorRole) -> Outgoing:
        """Encode tensors on the device, and begin to copy them out."""
        parts = [_CodedPart(name, tensor.detach(), codec, role) for name, tensor in tensors.items()]
        self._downloads.wait_event(_event_on(self._compute))
        with torch.cuda.stream(self._downloads):
            for part in parts:
                part.download(self._downloads)
        return _Download(parts, _event_on(self._downloads))

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
        """Begin to accumulate one ticket; the device says later whether it is finite."""
        seen = survey(gradients, LARGEST, self._device)
        known = entry if isinstance(entry, LedgerEntry) else None
        told = [] if isinstance(entry, LedgerEntry) else [entry["tokens"], entry["loss_sum"].detach()]
        numbers = _DeviceNumbers(*self._download_numbers([seen.is_valid, *told]), known)
        marked = accumulator.add_unseen(index, numbers, seen.is_valid, gradients, loss_scale=loss_scale, borrowed=borrowed)
        norm = seen.norm() if with_norm else None
        return Added(marked=marked, numbers=numbers, norm=norm)

    def _download_numbers(self, numbers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Single numbers as fp64 in pinned memory, there once the event is done."""
        host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
        device = torch.stack([t.double().reshape(()) for t in numbers])
        self._downloads.wait_event(_event_on(self._compute))
        with torch.cuda.stream(self._downloads):
            host.copy_(device, non_blocking=True)
        device.record_stream(self._downloads)
        return host, _event_on(self._downloads)

    def tell(self, numbers: Mapping[str, torch.Tensor]) -> HostNumbers:
        """Begin to copy single numbers out."""
        return _HostNumbersLater(tuple(numbers), *self._download_numbers(list(numbers.values()))) if numbers else HostNumbers({})

    async def complete(self, *transfers: Transfer) -> None:
        """Wait on the thread for downloads."""

        def wait() -> None:
            for transfer in transfers:
                transfer.wait()

        await self._waiter.run(wait, Priority.CONTROL)

    def close(self) -> None:
        """End the thread for downloads."""
        self._waiter.close()


class _DeviceTimeLater(DeviceTime):
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self._ended = ended

    def wait(self) -> None:
        self._ended.synchronize()
        self.seconds = self._began.elapsed_time(self._ended) / 1e3


class _CodedPart:
    """One tensor on its way out."""

    def __init__(self, name: str, tensor: torch.Tensor, codec: Codec, role: TensorRole) -> None:
        self.spec, self._coded, watched = code_tensor(name, tensor, codec, role)
        self._tensor = tensor
        self._role = role
        self._checks: torch.Tensor | None = None
        if watched is not None and tensor.numel():  # extremes are NaN if any element is
            self._checks = torch.cat([torch.stack(torch.aminmax(t)).double() for t in (tensor, watched)])
        self._host = torch.empty(self._coded.numel(), dtype=torch.uint8, pin_memory=True)
        self._host_checks = torch.empty(4, dtype=torch.float64, pin_memory=True)

    def download(self, stream: torch.cuda.Stream) -> None:
        """Begin to copy out on the current stream, which is `stream`."""
        self._host.copy_(self._coded, non_blocking=True)
        self._coded.record_stream(stream)
        if self._checks is not None:
            self._host_checks.copy_(self._checks, non_blocking=True)
            self._checks.record_stream(stream)

    def payload(self) -> tuple[TensorSpec, Buffer]:
        """What travels. Call it once the download is done."""
        if self._checks is not None:
            low, high, *watched = self._host_checks.tolist()
            if not (math.isfinite(low) and math.isfinite(high)):
                return encode_tensor(self.spec.name, self._tensor, "raw", self._role)
            if not all(map(math.isfinite, watched)):
                return unfit(self.spec.name, self._tensor, self.spec.codec, self._role)
        return self.spec, self._host.numpy().data


class _Download(Outgoing):
    def __init__(self, parts: list[_CodedPart], done: torch.cuda.Event) -> None:
        super().__init__([])
        self._parts = parts
        self._done = done

    def wait(self) -> None:
        self._done.synchronize()
        if self._parts:
            self.payload = [part.payload() for part in self._parts]
            self._parts = []


class _DeviceNumbers:
    """Read once their event is done."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event, known: LedgerEntry | None) -> None:
        self._host = host
        self._known = known
        self._done = done

    def is_known(self) -> bool:
        return self._done.query()

    def wait(self) -> None:
        self._done.synchronize()

    @property
    def is_finite(self) -> bool:
        return bool(self._host[0])

    @property
    def entry(self) -> LedgerEntry:
        return self._known or entry_of(*map(float, self._host[1:]))


class _HostNumbersLater(HostNumbers):
    def __init__(self, names: tuple[str, ...], host: torch.Tensor, done: torch.cuda.Event) -> None:
        super().__init__({})
        self._names = names
        self._host = host
        self._done = done

    def wait(self) -> None:
        self._done.synchronize()
        self.values = dict(zip(self._names, self._host.tolist(), strict=True))


def _writable(buffer: Buffer) -> Buffer:
    """numpy hands read-only memory to torch with a warning only: a caller's bytes are copied."""
    return bytearray(buffer) if memoryview(buffer).readonly else buffer
