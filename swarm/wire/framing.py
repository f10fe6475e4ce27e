"""Message <-> bytes. Owns the frame's layout and its limits; must not know sockets or torch.

A frame is `magic(4) major(1) minor(1) reserved(2) header_len(4) body_len(8)`, big-endian, then the header (the message
as JSON) and the body (raw tensor bytes, concatenated in the order of `message.tensors`). Every length is checked
against its limit, and the body's length against the header, before memory for it is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from pydantic import ValidationError

from swarm.base.errors import RemoteProtocolError
from swarm.wire.messages import MESSAGE_ADAPTER, PROTOCOL_MAJOR, PROTOCOL_MINOR, Message, TensorSpec

Buffer = Union[bytes, bytearray, memoryview]

MAGIC = b"SWRM"
PREFIX = struct.Struct(">4sBBHIQ")
MAX_HEADER_BYTES = 2 * 2**20
#: Default bound of one body; a server may set a smaller one from its memory limit.
MAX_BODY_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Frame:
    """A message with its tensors' bytes: one buffer for each entry of `message.tensors`."""

    message: Any  # one of wire.messages.AnyMessage
    buffers: tuple[Buffer, ...] = ()
    #: Seconds from the first byte's arrival to the last one's; 0 of a frame that was made here. Latency is no part of it.
    arrival_s: float = field(default=0.0, compare=False)

    @property
    def body_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(spec.num_bytes for spec in self.message.tensors)

    def only_tensor(self) -> tuple[TensorSpec, Buffer]:
        """The one tensor that the body is.

        Raises:
            RemoteProtocolError: it holds none, or several.
        """
        if len(self.buffers) != 1:
            raise RemoteProtocolError(f"{self.message.kind} came with {len(self.buffers)} tensors instead of one")
        return self.message.tensors[0], self.buffers[0]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The validated fixed part of a frame."""

    minor: int
    header_bytes: int
    body_bytes: int


def encode_head(frame: Frame) -> bytes:
    """Prefix and header of `frame`; the body follows as `frame.buffers`, uncopied."""
    message: Message = frame.message
    if len(frame.buffers) != len(message.tensors):
        raise ValueError(f"{message.__class__.__name__} names {len(message.tensors)} tensors, got {len(frame.buffers)}")
    for spec, buffer in zip(message.tensors, frame.buffers, strict=True):
        if memoryview(buffer).nbytes != spec.num_bytes:
            raise ValueError(f"tensor {spec.name}: {memoryview(buffer).nbytes} bytes, its spec says {spec.num_bytes}")
    header = message.model_dump_json(exclude_defaults=False, exclude_none=True).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    return PREFIX.pack(MAGIC, PROTOCOL_MAJOR, PROTOCOL_MINOR, 0, len(header), frame.body_bytes) + header


def encode(frame: Frame) -> bytes:
    """The whole frame as one buffer (copies the body; for small frames and the in-memory twin)."""
    views = [memoryview(buffer) for buffer in frame.buffers]
    return b"".join([encode_head(frame), *(view.cast("B") for view in views if view.nbytes)])


def decode_prefix(data: Buffer, *, max_body_bytes: int = MAX_BODY_BYTES) -> Prefix:
    """Validate the first `PREFIX.size` bytes of a frame.

    Raises:
        RemoteProtocolError: wrong magic or major version, or a length over its limit.
    """
    if len(data) < PREFIX.size:
        raise RemoteProtocolError(f"{len(data)} bytes are too few for a frame")
    magic, major, minor, _, header_bytes, body_bytes = PREFIX.unpack(bytes(data[: PREFIX.size]))
    if magic != MAGIC:
        raise RemoteProtocolError("not a swarm frame (wrong magic)")
    if major != PROTOCOL_MAJOR:
        ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        raise RemoteProtocolError(f"protocol version {major}.{minor}, this peer speaks {ours}")
    if header_bytes > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"header of {header_bytes} bytes is over the limit of {MAX_HEADER_BYTES}")
    if body_bytes > max_body_bytes:
        raise RemoteProtocolError(f"body of {body_bytes} bytes is over the limit of {max_body_bytes}")
    return Prefix(minor, header_bytes, body_bytes)


def decode_header(data: Buffer, prefix: Prefix) -> Any:
    """Validate a frame's header and that its tensors add up to the body.

    Raises:
        RemoteProtocolError: naming the first field that is wrong.
    """
    try:
        message = MESSAGE_ADAPTER.validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise RemoteProtocolError(f"{'.'.join(str(p) for p in first['loc'])[:200]}: {first['msg'][:200]}") from None
    expected = sum(spec.num_bytes for spec in message.tensors)
    if expected != prefix.body_bytes:
        raise RemoteProtocolError(f"tensors take {expected} bytes, the body has {prefix.body_bytes}")
    return message


def split_body(message: Message, body: Buffer) -> Frame:
    """A frame whose buffers are views of `body` (uncopied)."""
    view = memoryview(body)
    buffers: list[memoryview] = []
    offset = 0
    for spec in message.tensors:
        buffers.append(view[offset : offset + spec.num_bytes])
        offset += spec.num_bytes
    return Frame(message, tuple(buffers))


def decode(data: Buffer, *, max_body_bytes: int = MAX_BODY_BYTES) -> Frame:
    """One whole frame from one buffer.

    Raises:
        RemoteProtocolError: if the bytes are no valid frame, or there are too few or too many.
    """
    prefix = decode_prefix(data, max_body_bytes=max_body_bytes)
    end = PREFIX.size + prefix.header_bytes
    if len(data) != end + prefix.body_bytes:
        raise RemoteProtocolError(f"frame of {end + prefix.body_bytes} bytes came with {len(data)}")
    message = decode_header(memoryview(data)[PREFIX.size : end], prefix)
    return split_body(message, memoryview(data)[end:])


def buffers_of(parts: Sequence[tuple[Any, Buffer]]) -> tuple[tuple[Any, ...], tuple[Buffer, ...]]:
    """Split `(spec, buffer)` pairs into the two tuples that a message and a frame need."""
    return tuple(spec for spec, _ in parts), tuple(buffer for _, buffer in parts)
