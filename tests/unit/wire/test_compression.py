"""CASES row 14: every dtype, shape and layout survives the wire, exactly or within a bound."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import RemoteError, RemoteProtocolError
from swarm.wire.compression import CODECS, NonFinite, all_finite, decode_tensor, encode_tensor, require_finite
from swarm.wire.messages import BLOCK_SIZE, DTYPE_BYTES, TensorSpec

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
#: Half a step of each code at its coarsest, relative to the block's largest magnitude.
BLOCK_ERRORS = {"8bit": 0.0072, "int8": 0.5001 / 127, "scaled16": 2.0**-12}


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return values > 0 if dtype == torch.bool else values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def round_trip(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    spec, buffer = encode_tensor("x", tensor, codec, "input")  # type: ignore[arg-type]
    assert memoryview(buffer).nbytes == spec.num_bytes
    out = decode_tensor(spec, bytes(buffer))
    assert out.dtype == tensor.dtype
    assert out.shape == tensor.shape
    assert not out.requires_grad
    return out


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, BLOCK_SIZE + 1)], ids=str)
def test_raw_is_bit_equal_and_as_small_as_the_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make(shape, dtype)
    spec, buffer = encode_tensor("x", tensor, "raw", "state")
    assert memoryview(buffer).nbytes == tensor.numel() * DTYPE_BYTES[spec.dtype]
    assert torch.equal(decode_tensor(spec, bytes(buffer)), tensor)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("codec", ["fp16", "bf16", "8bit", "int8", "scaled16"])
def test_integers_are_raw_under_any_codec(dtype: torch.dtype, codec: str) -> None:
    tensor = make((3, 5), dtype)
    assert encode_tensor("x", tensor, codec, "label")[0].codec == "raw"  # type: ignore[arg-type]
    assert torch.equal(round_trip(tensor, codec), tensor)


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "8bit", "int8", "scaled16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3,), (2, BLOCK_SIZE), (BLOCK_SIZE - 1,), (BLOCK_SIZE + 1,), (3, 5, 1001)], ids=str
)
def test_every_codec_keeps_dtype_shape_and_error_bound(codec: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make(shape, dtype)
    error = (round_trip(tensor, codec).double() - tensor.double()).abs()
    if codec == "raw":
        assert not error.any()
    elif codec in BLOCK_ERRORS:
        flat, error = tensor.reshape(-1).double(), error.reshape(-1)
        for start in range(0, flat.numel(), BLOCK_SIZE):
            block = slice(start, start + BLOCK_SIZE)
            bound = flat[block].abs().max() * BLOCK_ERRORS[codec] + flat[block].abs() * torch.finfo(dtype).eps
            assert (error[block] <= bound).all(), f"block at {start}: {error[block].max()}"
    else:
        half = torch.finfo(torch.float16 if codec == "fp16" else torch.bfloat16)
        assert (error <= tensor.double().abs() * half.eps + half.smallest_normal).all()


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "8bit", "int8", "scaled16", "uniform8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_decoding_into_a_tensor_fills_it_with_the_same_bits(codec: str, dtype: torch.dtype, step: int) -> None:
    spec, payload = encode_tensor("x", make((BLOCK_SIZE + 3,), dtype), codec, "state")
    around = torch.full((step * (BLOCK_SIZE + 5),), 7.0, dtype=dtype)
    out = around[step : -step : step]
    assert decode_tensor(spec, payload, out=out) is out
    assert torch.equal(out, decode_tensor(spec, payload))
    assert [around[0], around[-1]] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("codec", "bound"), [("8bit", 0.014), ("int8", 0.0095), ("uniform8", 0.018), ("scaled16", 0.0003), ("bf16", 0.0018)]
)
def test_relative_error_on_normal_values_is_what_the_protocol_page_says(codec: str, bound: float) -> None:
    tensor = make((64, 1024), torch.float32)
    error = (round_trip(tensor, codec).double() - tensor.double()).norm() / tensor.double().norm()
    assert 0 < error < bound


@pytest.mark.parametrize("codec", ["int8", "scaled16"])
def test_sums_of_gradients_neither_overflow_nor_vanish(codec: str) -> None:
    """Case 11's 70000.0, and averages of tiny gradients, which fp16 alone would lose."""
    for scale in (70_000.0, 1e15, 1e-12, 1e-25):
        tensor = make((BLOCK_SIZE + 5,), torch.float32) * scale
        error = (round_trip(tensor, codec) - tensor).double().norm() / tensor.double().norm()
        assert 0 < error < 0.0095


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3 * BLOCK_SIZE), st.integers(0, 99), st.sampled_from(["int8", "scaled16"]))
def test_steps_equal_the_slow_twin(num_elements: int, seed: int, codec: str) -> None:
    """Block by block in numpy: `round(x / step) * step`, the largest of a block exactly."""
    tensor = make((num_elements,), torch.float32, seed)
    expected = []
    for start in range(0, num_elements, BLOCK_SIZE):
        block = tensor[start : start + BLOCK_SIZE].numpy()
        top = np.abs(block).max()
        largest = np.float32(127 if codec == "int8" else 1)
        scaled = block * (np.float32(1) / top * largest)  # as torch divides a number by a tensor
        code = np.round(scaled) if codec == "int8" else scaled.astype(np.float16).astype(np.float32)
        expected.append(code * (top / largest))
    assert torch.equal(round_trip(tensor, codec), torch.from_numpy(np.concatenate(expected)))


def test_the_oracle_of_the_uniform_code() -> None:
    """A relative error of 1.62 % on normal values, and the sum is kept."""
    tensor = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    decoded = round_trip(tensor, "uniform8")
    assert float((decoded - tensor).norm() / tensor.norm()) == pytest.approx(0.0162, abs=0.0002)
    assert float(decoded.double().sum()) == pytest.approx(float(tensor.double().sum()), abs=0.05)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 400), st.integers(0, 99), st.sampled_from([0.0, 1.0, 1e-20, 1e20]))
def test_the_uniform_code_equals_its_slow_twin(num_elements: int, seed: int, scale: float) -> None:
    """Bucket by bucket: each element becomes the mean of those with its code."""
    values = (make((num_elements,), torch.float32, seed) * scale).double()
    step = max(float(np.std(values.numpy())) * 6 / 256, 1e-300)
    buckets: dict[int, list[float]] = {}
    codes = [min(max(round(min(max(float(x) / step, -999.0), 999.0)) + 128, 0), 255) for x in values]
    for code, x in zip(codes, values, strict=True):
        buckets.setdefault(code, []).append(float(x))
    expected = torch.tensor([math.fsum(buckets[code]) / len(buckets[code]) for code in codes], dtype=torch.float64)
    assert torch.allclose(round_trip(values.float(), "uniform8").double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("codec", ["8bit", "int8", "scaled16", "uniform8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_without_finite_steps_is_refused(codec: str, value: float) -> None:
    tensor = make((BLOCK_SIZE * 2,), torch.float32)
    tensor[BLOCK_SIZE + 3] = value
    if codec != "8bit" or value == float("inf"):  # the 8-bit code turns NaN into a number, see its page
        with pytest.raises(NonFinite):
            encode_tensor("x", tensor, codec, "state")  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "8bit", "int8", "scaled16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_stay_zeros(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.zeros(BLOCK_SIZE + 3, dtype=dtype)
    tensor[-1] = 2.0  # one block is all zeros, the next is not
    out = round_trip(tensor, codec)
    assert torch.equal(out, tensor)


def test_tiny_values_stay_tiny() -> None:
    tensor = torch.full((10,), 1e-42)  # 1 / 1e-42 is no fp32 number
    assert round_trip(tensor, "8bit").abs().max() <= 1e-41


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "8bit", "int8", "scaled16"])
def test_layout_and_gradient_do_not_matter(codec: str) -> None:
    base = make((6, 40), torch.float32)
    views = [base.t(), base[:, ::3], base[1:4, 5:9], base.expand(2, 6, 40), base.clone().requires_grad_()]
    for view in views:
        assert torch.equal(round_trip(view, codec), round_trip(view.detach().contiguous().clone(), codec))


def test_a_contiguous_tensor_is_not_copied_in_either_direction() -> None:
    for dtype in FLOATS + INTEGERS:
        tensor = make((4, 5), dtype)
        spec, buffer = encode_tensor("x", tensor, "raw", "input")
        out = decode_tensor(spec, buffer)
        if dtype != torch.bool:  # bools are normalised, which copies
            assert out.data_ptr() == tensor.data_ptr(), dtype


def test_a_read_only_or_misaligned_buffer_is_copied() -> None:
    tensor = make((4, 5), torch.float32)
    spec, buffer = encode_tensor("x", tensor, "raw", "input")
    fixed = bytes(buffer)
    decode_tensor(spec, fixed).zero_()
    assert fixed == bytes(buffer)
    shifted = memoryview(bytearray(b"?" + fixed))[1:]
    assert torch.equal(decode_tensor(spec, shifted), tensor)


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "8bit", "int8", "scaled16"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_length_is_refused(codec: str, change: int) -> None:
    spec, buffer = encode_tensor("x", make((3, 3000), torch.float32), codec, "input")  # type: ignore[arg-type]
    wrong = bytes(buffer)[:-1] if change < 0 else bytes(buffer) + b"!"
    with pytest.raises(RemoteProtocolError, match="tensor x"):
        decode_tensor(spec, wrong)


def test_hostile_bytes_decode_to_something_of_the_right_shape() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(BLOCK_SIZE + 1,), codec="8bit")
    assert decode_tensor(spec, b"\xff" * spec.num_bytes).shape == spec.shape
    flags = decode_tensor(TensorSpec(name="b", dtype="bool", shape=(3,)), b"\x00\x02\xff")
    assert flags.tolist() == [False, True, True]
    assert flags.sum() == 2


@pytest.mark.parametrize(
    ("codec", "value", "dtype"),
    [
        ("fp16", 70000.0, torch.float32),
        ("fp16", -1e30, torch.bfloat16),
        ("bf16", 3.4e38, torch.float32),
        ("8bit", 1e300, torch.float64),
        ("8bit", math.inf, torch.float32),
        ("fp16", math.nan, torch.float32),
    ],
)
def test_a_value_that_the_codec_cannot_hold_is_refused(codec: str, value: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(5000, dtype=dtype)
    tensor[4999] = value
    with pytest.raises(NonFinite, match="acts"):
        encode_tensor("acts", tensor, codec, "input")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_require_finite_names_what_is_not(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(3, 100, dtype=dtype)
    require_finite(tensor, "gradient")
    tensor[1, 50] = bad
    with pytest.raises(NonFinite, match="gradient of stage 1 is not finite"):
        require_finite(tensor, "gradient of stage 1")
    assert issubclass(NonFinite, RemoteError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cpu_and_gpu_decode_alike(dtype: torch.dtype) -> None:
    tensor = make((3, 5, 1001), dtype)
    tensor[0] = 0
    for codec in CODECS.values():
        for source in (tensor, tensor.cuda()):
            spec, buffer = encode_tensor("x", source, codec, "grad")
            here, there = decode_tensor(spec, bytes(buffer)), decode_tensor(spec, bytes(buffer), "cuda")
            assert torch.equal(here, there.cpu()), (codec, source.device)
            assert not here[0].any()


def test_require_finite_accepts_empty_and_integer_tensors() -> None:
    require_finite(torch.empty(0), "nothing")
    require_finite(torch.tensor([2**62]), "ids")


def test_every_compression_of_the_configuration_has_a_codec() -> None:
    for codec in CODECS.values():
        round_trip(make((10,), torch.float32), codec)


def test_importing_bitsandbytes_prints_nothing_and_fetches_nothing() -> None:
    code = (
        "import torch, sys; from swarm.wire.compression import encode_tensor;"
        "encode_tensor('x', torch.ones(3), '8bit', 'input'); assert 'kernels' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.NOTSET


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_finite_is_found_for_any_value_and_layout(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.ones(300, 4, dtype=dtype)
    for value, expected in ((largest, True), (-largest, True), (float("inf"), False), (float("nan"), False)):
        tensor[200, 3] = value
        assert all_finite(tensor) is expected
        assert all_finite(tensor.T) is expected
    assert all_finite(torch.empty(0, dtype=dtype))
    assert all_finite(torch.ones(3, dtype=torch.int64))
