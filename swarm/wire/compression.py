"""Tensor <-> payload. Owns the codecs (raw, 16-bit, 8-bit, sparse); must not know messages, sockets or who computes.

* `raw`: the elements as they lie in memory (little-endian), 1 to 8 bytes each; integers and bools are always raw.
* `fp16`, `bf16`: two bytes an element.
* `rotated8`, `scaled8`: 8-bit integers in units of a step of their own for each 64 elements, of these or of their rotation,
  see `scaled.py`. What `8bit` means: rotated for activations and their gradients, as they are for averages.
* `int8`, `scaled16`: 8-bit integers, or fp16 numbers of at most 1, in units of one fp32 step for each `BLOCK_SIZE`
  elements: `value = code * step`. For sums of gradients: fp16 alone would overflow at 65504 and lose what is below 6e-8.
* `uniform8`: 8-bit codes of equal steps with a codebook, see `uniform.py`.
* `sparse4`: the largest elements in 4 bits each, see `sparse.py`; the others become 0.

A decoded tensor has the dtype that its spec names. A lossy codec refuses NaN, infinities, and a value that it would turn
into one.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from swarm.base.errors import RemoteError, RemoteProtocolError
from swarm.wire import scaled, sparse, uniform
from swarm.wire.framing import Buffer
from swarm.wire.messages import BLOCK_SIZE, Codec, TensorSpec
from swarm.wire.scaled import rows_of, split

TensorRole = Literal["input", "label", "grad", "state"]

#: `RunConfig.compression` -> codec of activations and their gradients.
CODECS: dict[str, Codec] = {"none": "raw", "fp16": "fp16", "bf16": "bf16", "8bit": "rotated8"}
#: `RunConfig.average_compression` -> codec of the slices of averages.
AVERAGE_CODECS: dict[str, Codec] = {
    "none": "raw",
    "fp16": "scaled16",
    "bf16": "bf16",
    "8bit": "scaled8",
    "int8": "int8",
    "uniform8": "uniform8",
}

_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SCALED = ("rotated8", "scaled8")
#: Codecs that count in steps: the type of a code, and the largest code.
_STEPS = {"int8": (torch.int8, 127.0), "scaled16": (torch.float16, 1.0)}
_STORED = {**_HALVES, **{codec: dtype for codec, (dtype, _) in _STEPS.items()}}
#: A block whose largest value is below this is all zeros: fp32 has no such step.
_NOTHING = 1e-30


class NonFinite(RemoteError):
    """A tensor holds NaN or an infinity, or would once it is coded. Whoever computed it is at fault."""


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, without a temporary of the tensor's size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    tensor = tensor.detach()
    if tensor.dtype == torch.float32 and not tensor.is_cuda and tensor.is_contiguous():
        flat = tensor.view(-1)
        if math.isfinite(torch.dot(flat, flat)):  # the fastest look at every element; large ones overflow it
            return True
    low, high = torch.aminmax(tensor)  # both are NaN if any element is
    return bool(torch.isfinite(low) and torch.isfinite(high))


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Check every element.

    Raises:
        NonFinite: if any element is NaN or infinite; the message names `what`.
    """
    if not all_finite(tensor):
        raise NonFinite(f"{what} is not finite")


def encode_tensor(name: str, tensor: torch.Tensor, codec: Codec, role: TensorRole) -> tuple[TensorSpec, Buffer]:
    """Spec and payload of `tensor`; `codec` applies to floating tensors only, others are raw.

    A raw payload of a contiguous CPU tensor aliases it: do not change the tensor before the payload is sent.

    Raises:
        NonFinite: if a finite value overflows in `codec` (70000.0 in fp16), or an infinity meets a lossy codec.
        ValueError: if the dtype is none of the protocol's.
    """
    spec, coded, watched = code_tensor(name, tensor, codec, role)
    if coded.numel() == 0:
        return spec, b""
    if watched is not None:
        require_finite(watched, f"{name} in {spec.codec}")
    return spec, coded.cpu().numpy().data


def encode_sparse(name: str, tensor: torch.Tensor, num_kept: int, role: TensorRole) -> tuple[TensorSpec, Buffer]:
    """Spec and payload of the `num_kept` largest elements of `tensor`.

    Raises:
        NonFinite: an element is none.
    """
    require_finite(tensor, f"{name} in sparse4")
    spec = TensorSpec(
        name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), codec="sparse4", role=role, num_kept=num_kept
    )
    return spec, sparse.encode(tensor.detach().reshape(-1).cpu(), num_kept).numpy().data


def code_tensor(
    name: str, tensor: torch.Tensor, codec: Codec, role: TensorRole
) -> tuple[TensorSpec, torch.Tensor, torch.Tensor | None]:
    """The first half of `encode_tensor`: on the tensor's own device, which is not waited for.

    Returns:
        The spec; the payload as flat uint8 on that device; and what must be finite for the payload to be valid (None
        if the codec loses nothing).

    Raises:
        ValueError: if the dtype is none of the protocol's.
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{name}: {tensor.dtype} cannot travel")
    if not tensor.is_floating_point():
        codec = "raw"
    spec = TensorSpec(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), codec=codec, role=role)
    flat = tensor.detach().reshape(-1)
    coded, watched = flat, None
    if codec in _SCALED and flat.numel():
        coded, watched = scaled.encode(flat, rotate=codec == "rotated8")
    elif codec in _STEPS and flat.numel():
        coded, watched = _in_steps(flat, codec)
    elif codec == "uniform8" and flat.numel():
        require_finite(flat, f"{name} in uniform8")
        coded = torch.from_numpy(uniform.encode(flat.double().cpu().numpy()))
    elif codec not in ("raw", "uniform8", *_SCALED, *_STEPS):
        coded = watched = flat.to(_HALVES.get(codec, flat.dtype))
    return spec, coded.contiguous().view(torch.uint8), watched


def decode_tensor(
    spec: TensorSpec, buffer: Buffer, device: torch.device | str = "cpu", *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The tensor of shape `spec.shape` and dtype `spec.dtype` on `device`.

    A raw CPU tensor aliases `buffer` if that is writable and aligned, otherwise it is a copy. Nothing says that the
    result is finite: see `require_finite`.

    Args:
        spec: of the tensor.
        buffer: its payload.
        device: where it is decoded.
        out: a tensor there of that shape and dtype, to be filled and returned instead of a new one.

    Raises:
        RemoteProtocolError: if `buffer` is not exactly as long as `spec` says.
    """
    data = memoryview(buffer)
    if data.nbytes != spec.num_bytes:
        raise RemoteProtocolError(f"tensor {spec.name}: {data.nbytes} bytes, its spec says {spec.num_bytes}")
    if spec.num_elements == 0:
        return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device=device) if out is None else out
    payload = np.frombuffer(data, dtype=np.uint8)
    if spec.codec == "sparse4":
        flat = sparse.decode(payload, spec.num_elements, spec.num_kept or 0)
        decoded = flat.to(_DTYPES[spec.dtype]).reshape(spec.shape).to(device)
        return decoded if out is None else out.copy_(decoded)
    stored = 1 if spec.codec in ("uniform8", *_SCALED) else _STORED.get(spec.codec, _DTYPES[spec.dtype]).itemsize
    return decode_coded(spec, _as_tensor(payload, alignment=stored).to(device), out=out)


def decode_coded(spec: TensorSpec, coded: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The second half of `decode_tensor`: `coded` is the payload as uint8 on any device; that device is not waited for."""
    dtype = _DTYPES[spec.dtype]
    if spec.codec == "sparse4":
        raise RemoteProtocolError(f"tensor {spec.name}: the sparse code is for averages")
    if spec.codec in _SCALED:
        flat = scaled.decode(coded, spec.num_elements, dtype, rotated=spec.codec == "rotated8", out=out)
    elif spec.codec == "uniform8":
        flat = torch.from_numpy(uniform.decode(coded.cpu().numpy())).to(dtype)
    elif spec.codec in _STEPS:
        flat = _from_steps(coded, spec, out)
    elif dtype == torch.bool:  # a byte other than 0 and 1 is no bool to torch: normalise instead of viewing
        flat = coded != 0
    else:
        flat = coded.view(_HALVES.get(spec.codec, dtype)).to(dtype)
    decoded = flat.reshape(spec.shape)
    if out is None:
        return decoded
    return out if out.data_ptr() == decoded.data_ptr() else out.copy_(decoded)


def _as_tensor(payload: np.ndarray, *, alignment: int) -> torch.Tensor:
    """uint8 tensor over `payload`; a copy if torch must not write there or could not read whole elements."""
    if not payload.flags.writeable or payload.ctypes.data % alignment:
        payload = payload.copy()
    return torch.from_numpy(payload)


def _in_steps(flat: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, then steps, as uint8; and the steps."""
    dtype, largest = _STEPS[codec]
    flat = flat.float().contiguous()
    end = flat.numel() * dtype.itemsize
    coded = torch.empty(end + 4 * -(-flat.numel() // BLOCK_SIZE), dtype=torch.uint8, device=flat.device)
    steps = []
    for values, out in zip(rows_of(flat, BLOCK_SIZE), rows_of(coded[:end].view(dtype), BLOCK_SIZE), strict=True):
        top = torch.maximum(values.amax(dim=1), -values.amin(dim=1))  # half the time of abs().amax()
        is_zero = top < _NOTHING  # false for NaN, which the steps show
        steps.append(torch.where(is_zero, 0.0, top / largest))
        scaled = values * torch.where(is_zero, 0.0, largest / top).unsqueeze(1)
        out.copy_(scaled.round_() if dtype == torch.int8 else scaled)
    step = torch.cat(steps)
    coded[end:] = step.view(torch.uint8)
    return coded, step


def _from_steps(coded: torch.Tensor, spec: TensorSpec, out: torch.Tensor | None) -> torch.Tensor:
    dtype = _STEPS[spec.codec][0]
    end = spec.num_elements * dtype.itemsize
    steps = coded[end:].clone().view(torch.float32)  # the copy is aligned
    flat = torch.empty(spec.num_elements, dtype=torch.float32, device=coded.device)
    if out is not None and out.dtype == torch.float32 and out.is_contiguous():
        flat = out.view(-1)
    flat.copy_(coded[:end].view(dtype))
    for values, step in zip(rows_of(flat, BLOCK_SIZE), split(steps, flat, BLOCK_SIZE), strict=True):
        values.mul_(step.unsqueeze(1))
    return flat.to(_DTYPES[spec.dtype])
