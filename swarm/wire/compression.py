"""Tensor <-> payload. Owns specs, and which code each name on the wire stands for; the codes themselves are in `codecs.py`.

Integers and bools always travel raw. A decoded tensor has the dtype that its spec names. A lossy codec refuses NaN,
infinities, and a value that it would turn into one. Must not know messages, sockets or who computes.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from swarm.base.errors import RemoteError, RemoteProtocolError
from swarm.wire import sparse
from swarm.wire.codecs import Half, Raw, Scaled, SparseCodec, Steps, TensorCodec, Uniform
from swarm.wire.framing import Buffer
from swarm.wire.messages import Codec, TensorSpec

TensorRole = Literal["input", "label", "grad", "state"]

#: The codes that the wire knows, by their names in a `TensorSpec`; how long each is stands in `messages.py`.
TENSOR_CODECS: dict[Codec, TensorCodec] = {
    "raw": Raw(),
    "fp16": Half(torch.float16),
    "bf16": Half(torch.bfloat16),
    "rotated8": Scaled(rotate=True),
    "scaled8": Scaled(rotate=False),
    "int8": Steps(torch.int8, 127.0),
    "scaled16": Steps(torch.float16, 1.0),
    "uniform8": Uniform(),
}
_SPARSE_CODECS: dict[Codec, SparseCodec] = {"sparse4": sparse}

#: `RunConfig.compression` -> codec of activations and their gradients. 8 bits are of the rotation, which averages are not.
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


def encode_sparse(name: str, tensor: torch.Tensor, codec: Codec, num_kept: int, role: TensorRole) -> tuple[TensorSpec, Buffer]:
    """Spec and payload of the `num_kept` largest elements of `tensor` in a sparse `codec`.

    Raises:
        NonFinite: an element is NaN or infinite.
    """
    require_finite(tensor, f"{name} in {codec}")
    spec = TensorSpec(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), codec=codec, role=role, num_kept=num_kept)
    return spec, _SPARSE_CODECS[codec].encode(tensor.detach().reshape(-1).cpu(), num_kept).numpy().data


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
    if flat.numel():
        code = TENSOR_CODECS[codec]
        if code.needs_finite:
            require_finite(flat, f"{name} in {codec}")
        coded, watched = code.encode(flat)
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
    if spec.is_sparse:
        flat = _SPARSE_CODECS[spec.codec].decode(payload, spec.num_elements, spec.num_kept or 0)
        decoded = flat.to(_DTYPES[spec.dtype]).reshape(spec.shape).to(device)
        return decoded if out is None else out.copy_(decoded)
    alignment = TENSOR_CODECS[spec.codec].stored_bytes(_DTYPES[spec.dtype])
    return decode_coded(spec, _as_tensor(payload, alignment=alignment).to(device), out=out)


def decode_coded(spec: TensorSpec, coded: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The second half of `decode_tensor`: `coded` is the payload as uint8 on any device; that device is not waited for."""
    if spec.is_sparse:
        raise RemoteProtocolError(f"tensor {spec.name}: the sparse code is for averages")
    flat = TENSOR_CODECS[spec.codec].decode(coded, spec.num_elements, _DTYPES[spec.dtype], out)
    decoded = flat.reshape(spec.shape)
    if out is None:
        return decoded
    return out if out.data_ptr() == decoded.data_ptr() else out.copy_(decoded)


def _as_tensor(payload: np.ndarray, *, alignment: int) -> torch.Tensor:
    """uint8 tensor over `payload`; a copy if torch must not write there or could not read whole elements."""
    if not payload.flags.writeable or payload.ctypes.data % alignment:
        payload = payload.copy()
    return torch.from_numpy(payload)
