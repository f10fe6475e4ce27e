"""Frames: what is sent arrives, and no bytes whatever raise anything but `RemoteProtocolError`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.wire.framing import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    Frame,
    buffers_of,
    decode,
    decode_prefix,
    encode,
    encode_head,
    split_body,
)
from swarm.wire.messages import DTYPE_BYTES, MAX_DIMS, PROTOCOL_MAJOR, Ack, Heartbeat, Refusal, StateChunk, TensorSpec

FLOATS = ("float64", "float32", "float16", "bfloat16")


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    codec = draw(st.sampled_from(["raw", "fp16", "bf16", "scaled8"] if dtype in FLOATS else ["raw"]))
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    name = draw(st.text("abc.é", min_size=1, max_size=9))
    return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape, "codec": codec})


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    tensors = tuple(draw(st.lists(specs(), max_size=4)))
    message = draw(
        st.one_of(
            st.just(StateChunk(tensors=tensors)),
            st.builds(Refusal, tensors=st.just(tensors), code=st.just("busy"), reason=st.text('a\n"é', max_size=9)),
            st.builds(Heartbeat, tensors=st.just(tensors), counter=st.integers(0, 2**70)),
        )
    )
    return Frame(message, tuple(draw(st.binary(min_size=s.num_bytes, max_size=s.num_bytes)) for s in tensors))


@given(frames())
def test_what_is_encoded_is_decoded(frame: Frame) -> None:
    got = decode(encode(frame))
    assert got.message == frame.message
    assert [bytes(buffer) for buffer in got.buffers] == list(frame.buffers)


def only_protocol_errors(data: bytes) -> None:
    try:
        frame = decode(data, max_body_bytes=2**20)
    except RemoteProtocolError as error:
        reason = str(error)
    else:
        reason = "valid"
        encode(frame)
    assert 0 < len(reason) < 1000


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error_at_most(data: bytes) -> None:
    only_protocol_errors(data)
    only_protocol_errors(MAGIC + data)
    only_protocol_errors(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, len(data), 0) + data)


@settings(max_examples=200)
@given(frames(), st.data())
def test_a_changed_frame_is_a_protocol_error_at_most(frame: Frame, data: st.DataObject) -> None:
    good = bytearray(encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    only_protocol_errors(bytes(good))
    only_protocol_errors(bytes(good[: data.draw(st.integers(0, len(good)))]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["train", "commit", "refusal", "lease", "heartbeat", "state_chunk", "gather"]), st.data())
def test_any_json_is_a_protocol_error_at_most(kind: str, data: st.DataObject) -> None:
    fields = st.sampled_from(["tensors", "run", "ticket", "head", "stage", "route", "record", "done", "code", "term"])
    header: dict[str, Any] = data.draw(st.dictionaries(fields, JSON, max_size=5))
    text = json.dumps({**header, "kind": kind}).encode()
    only_protocol_errors(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, len(text), 0) + text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"kind":' * 50_000,
        b'{"kind":"heartbeat","counter":' + b"9" * 10_000 + b"}",
        b'{"kind":"heartbeat","counter":1e999}',
        b'{"kind":"refusal","code":"\\ud800"}',
        b'{"kind":"refusal","code":"\xff\xfe"}',
        b'{"kind":"state_chunk","tensors":[{"name":"x","dtype":"uint8","shape":[NaN]}]}',
        b'{"kind":"state_chunk","tensors":[{"name":"x","dtype":"float64","shape":' + b"[1099511627775" * 1 + b"]}]}",
        json.dumps(
            {"kind": "state_chunk", "tensors": [{"name": "x", "dtype": "float64", "shape": [2**40 - 1] * MAX_DIMS}]}
        ).encode(),
        json.dumps({"kind": "state_chunk", "tensors": [{"name": "x", "dtype": "uint8", "shape": [0]}] * 4097}).encode(),
        b"null",
        b"",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_evil_headers_are_protocol_errors(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, len(text), 0) + text)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (PREFIX.pack(b"HTTP", 1, 0, 0, 2, 0), "wrong magic"),
        (PREFIX.pack(MAGIC, 1, 0, 0, 2, 0), "protocol version 1.0, this peer speaks 2.0"),
        (PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, MAX_HEADER_BYTES + 1, 0), "header of 2097153 bytes is over the limit"),
        (PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, 2, 1001), "body of 1001 bytes is over the limit of 1000"),
        (b"SWRM", "4 bytes are too few for a frame"),
    ],
)
def test_a_bad_prefix_says_what_is_wrong(prefix: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode_prefix(prefix, max_body_bytes=1000)


def test_a_body_must_be_what_its_specs_say() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(3,))
    with pytest.raises(ValueError, match="tensor x: 5 bytes, its spec says 12"):
        encode_head(Frame(StateChunk(tensors=(spec,)), (bytes(5),)))
    with pytest.raises(ValueError, match="names 1 tensors, got 0"):
        encode_head(Frame(StateChunk(tensors=(spec,))))
    whole = encode(Frame(StateChunk(tensors=(spec,)), (bytes(12),)))
    for wrong in (whole[:-1], whole + b"x"):
        with pytest.raises(RemoteProtocolError, match="came with"):
            decode(wrong)


@pytest.mark.parametrize(
    ("shape", "dtype", "codec", "num_bytes"),
    [
        ((), "float64", "raw", 8),
        ((0, 5), "int64", "raw", 0),
        ((2, 3), "bfloat16", "raw", 12),
        ((2, 3), "float32", "fp16", 12),
        ((4096,), "float32", "scaled8", 4096 + 64 + 2),
        ((4097,), "float32", "scaled8", 4097 + 65 + 4),
        ((0,), "float32", "scaled8", 0),
    ],
)
def test_sizes_of_coded_tensors(shape: tuple[int, ...], dtype: Any, codec: Any, num_bytes: int) -> None:
    assert TensorSpec(name="x", dtype=dtype, shape=shape, codec=codec).num_bytes == num_bytes


def test_a_code_that_this_peer_does_not_know_is_refused_in_a_line() -> None:
    """So does a peer of the first version, which names 8bit what the second has no decoder for, and the other way round."""
    header = b'{"kind":"state_chunk","tensors":[{"name":"x","dtype":"float32","shape":[9],"codec":"8bit"}]}'
    with pytest.raises(RemoteProtocolError, match=r"tensors\.0\.codec: Input should be 'raw', .*'rotated8'"):
        decode(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, len(header), 13) + header + bytes(13))


def test_buffers_are_views_of_the_body_not_copies() -> None:
    tensors, buffers = buffers_of([(TensorSpec(name=n, dtype="uint8", shape=(2,)), b"ab") for n in "xy"])
    assert encode(Frame(StateChunk(tensors=tensors), buffers)).endswith(b"abab")
    body = bytearray(b"abab")
    frame = split_body(StateChunk(tensors=tensors), body)
    body[2:] = b"cd"
    assert [bytes(buffer) for buffer in frame.buffers] == [b"ab", b"cd"]
    assert Frame(Ack()).body_bytes == 0
