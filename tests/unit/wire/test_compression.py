"""CASES row 14: every dtype, shape and layout survives the wire, exactly or within a bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import RemoteError, RemoteProtocolError
from swarm.wire.compression import AVERAGE_CODECS, CODECS, NonFinite, all_finite, decode_tensor, encode_tensor, require_finite
from swarm.wire.messages import BLOCK_SIZE, DTYPE_BYTES, SUB_BLOCK_SIZE, TensorSpec

CODEC_OF_8BIT_AVERAGES = AVERAGE_CODECS["8bit"]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
#: Elements that share a step, and half of it at its coarsest, relative to their largest magnitude.
BLOCK_ERRORS = {
    "scaled8": (SUB_BLOCK_SIZE, 0.5001 / 127 * 17 / 16),
    "int8": (BLOCK_SIZE, 0.5001 / 127),
    "scaled16": (BLOCK_SIZE, 2.0**-12),
}


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
@pytest.mark.parametrize("codec", ["fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16"])
def test_integers_are_raw_under_any_codec(dtype: torch.dtype, codec: str) -> None:
    tensor = make((3, 5), dtype)
    assert encode_tensor("x", tensor, codec, "label")[0].codec == "raw"  # type: ignore[arg-type]
    assert torch.equal(round_trip(tensor, codec), tensor)


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3,), (2, BLOCK_SIZE), (BLOCK_SIZE - 1,), (BLOCK_SIZE + 1,), (3, 5, 1001)], ids=str
)
def test_every_codec_keeps_dtype_shape_and_error_bound(codec: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make(shape, dtype)
    error = (round_trip(tensor, codec).double() - tensor.double()).abs()
    if codec == "raw":
        assert not error.any()
    elif codec == "rotated8":  # half a step in each of 64 directions
        parts = zip(error.reshape(-1).split(SUB_BLOCK_SIZE), tensor.double().reshape(-1).split(SUB_BLOCK_SIZE), strict=True)
        for off, part in parts:
            assert off.norm() <= part.norm() * (4 * BLOCK_ERRORS["scaled8"][1] * 2 + torch.finfo(dtype).eps)
    elif codec in BLOCK_ERRORS:
        flat, error = tensor.reshape(-1).double(), error.reshape(-1)
        size, part = BLOCK_ERRORS[codec]
        for start in range(0, flat.numel(), size):
            block = slice(start, start + size)
            bound = flat[block].abs().max() * part + flat[block].abs() * torch.finfo(dtype).eps
            assert (error[block] <= bound).all(), f"block at {start}: {error[block].max()}"
    else:
        half = torch.finfo(torch.float16 if codec == "fp16" else torch.bfloat16)
        assert (error <= tensor.double().abs() * half.eps + half.smallest_normal).all()


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16", "uniform8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_decoding_into_a_tensor_fills_it_with_the_same_bits(codec: str, dtype: torch.dtype, step: int) -> None:
    spec, payload = encode_tensor("x", make((BLOCK_SIZE + 3,), dtype), codec, "state")
    around = torch.full((step * (BLOCK_SIZE + 5),), 7.0, dtype=dtype)
    out = around[step:-step:step]
    assert decode_tensor(spec, payload, out=out) is out
    assert torch.equal(out, decode_tensor(spec, payload))
    assert [around[0], around[-1]] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("codec", "bound"),
    [("rotated8", 0.0064), ("scaled8", 0.0064), ("int8", 0.0095), ("uniform8", 0.018), ("scaled16", 0.0003), ("bf16", 0.0018)],
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


HADAMARD = np.array([[(-1.0) ** (i & j).bit_count() for j in range(SUB_BLOCK_SIZE)] for i in range(SUB_BLOCK_SIZE)])


def slow_twin(values: np.ndarray, rotate: bool) -> np.ndarray:
    """What one block [at most 4096] becomes: sub-block by sub-block, in fp64 where the code needs no rounding."""
    parts, integers, units = np.split(values, range(SUB_BLOCK_SIZE, len(values), SUB_BLOCK_SIZE)), [], []
    for part in parts:
        exponent = max(int(np.frexp(np.abs(part).max())[1]), 32 - 126)
        of_integer = 2.0 ** (exponent - 17 - 6 * (rotate and len(part) == SUB_BLOCK_SIZE))
        found = np.rint(part.astype(np.float64) * 2.0 ** (17 - exponent))
        integers.append(HADAMARD @ found if rotate and len(part) == SUB_BLOCK_SIZE else found)
        mantissa, power = np.frexp(np.float32(np.abs(integers[-1]).max()) * np.float32(1 / 127) * of_integer)
        units.append((of_integer, round(np.ceil(mantissa * 32) - 16 + 16 * power) if mantissa else -125 * 16))
    decoded = []
    for found, (of_integer, number) in zip(integers, units, strict=True):
        number = max(number, max(n for _, n in units) - 255)
        unit = np.float32((16 + number % 16) / 32 * 2.0 ** (number // 16))
        code = np.rint(found.astype(np.float32) * (np.float32(of_integer) / unit)) if found.any() else found
        decoded.append((HADAMARD @ code if rotate and len(code) == SUB_BLOCK_SIZE else code).astype(np.float32) * unit)
    return np.concatenate(decoded)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2 * BLOCK_SIZE), st.integers(0, 99), st.booleans(), st.sampled_from([0, 3, 20]))
def test_the_8_bit_codes_equal_their_slow_twin(num_elements: int, seed: int, rotate: bool, decades: int) -> None:
    """Also where magnitudes differ by so many decades, and where they are far from 1."""
    generator = torch.Generator().manual_seed(seed)
    tensor = make((num_elements,), torch.float32, seed) * 10.0 ** (-decades * torch.rand(num_elements, generator=generator))
    tensor *= 10.0 ** (seed % 5 * 15 - 30)
    expected = np.concatenate([slow_twin(block.numpy(), rotate) for block in tensor.split(BLOCK_SIZE)])
    assert torch.equal(round_trip(tensor, "rotated8" if rotate else "scaled8"), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("codec", "payload"),
    [("rotated8", "297b7b29" * 16 + "850000 0048 4839"), ("scaled8", "780000c4" + "00" * 60 + "850000 00a0 083c")],
)
def test_the_bytes_of_the_8_bit_codes_stay_what_they_are(codec: str, payload: str) -> None:
    tensor = torch.zeros(SUB_BLOCK_SIZE + 3)
    tensor[0], tensor[3], tensor[SUB_BLOCK_SIZE] = 1.0, -0.5, -1e-3
    assert encode_tensor("x", tensor, codec, "input")[1].hex() == payload.replace(" ", "")  # type: ignore[union-attr,arg-type]


def test_a_token_that_dwarfs_the_others_takes_no_digits_from_them() -> None:
    """As in trained models: one token 170 times as long, two channels thirty times as large in all of them."""
    tensor = make((16, 576), torch.float32)
    tensor[:, 247] *= 30
    tensor[:, 507] = 100.0
    plain = tensor.clone()
    tensor[5] *= 170
    decoded, without = round_trip(tensor, "rotated8"), round_trip(plain, "rotated8")
    others = [row for row in range(16) if row != 5]
    assert torch.equal(decoded[others], without[others])
    errors = (decoded - tensor).norm(dim=1) / tensor.norm(dim=1)
    assert errors.max() < 0.008
    small = [channel for channel in range(576) if channel not in (247, 507)]
    assert ((decoded - tensor)[:, small].norm(dim=1) / tensor[:, small].norm(dim=1)).max() < 0.017
    unrotated = round_trip(tensor, "scaled8")
    assert ((unrotated - tensor)[:, small].norm(dim=1) / tensor[:, small].norm(dim=1)).median() > 0.03, "why it is rotated"


def test_a_gradient_of_zero_stays_zero_in_an_average() -> None:
    tensor = make((4 * SUB_BLOCK_SIZE,), torch.float32)
    tensor[::3] = 0.0
    assert not round_trip(tensor, CODEC_OF_8BIT_AVERAGES)[::3].any()


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


@pytest.mark.parametrize("codec", ["rotated8", "scaled8", "int8", "scaled16", "uniform8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_without_finite_steps_is_refused(codec: str, value: float) -> None:
    tensor = make((BLOCK_SIZE * 2,), torch.float32)
    tensor[BLOCK_SIZE + 3] = value
    with pytest.raises(NonFinite):
        encode_tensor("x", tensor, codec, "state")  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_stay_zeros(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.zeros(BLOCK_SIZE + 3, dtype=dtype)
    tensor[-1] = 2.0  # one block is all zeros, the next is not
    out = round_trip(tensor, codec)
    assert not out[:-1].any()
    assert float(out[-1]) == pytest.approx(2.0, rel=0.004)


def test_tiny_values_stay_tiny() -> None:
    tensor = torch.full((10,), 1e-42)  # 1 / 1e-42 is no fp32 number
    assert round_trip(tensor, "scaled8").abs().max() <= 1e-41


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16"])
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


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_length_is_refused(codec: str, change: int) -> None:
    spec, buffer = encode_tensor("x", make((3, 3000), torch.float32), codec, "input")  # type: ignore[arg-type]
    wrong = bytes(buffer)[:-1] if change < 0 else bytes(buffer) + b"!"
    with pytest.raises(RemoteProtocolError, match="tensor x"):
        decode_tensor(spec, wrong)


def test_hostile_bytes_decode_to_something_of_the_right_shape() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(BLOCK_SIZE + 1,), codec="scaled8")
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
        ("scaled8", 1e300, torch.float64),
        ("scaled8", math.inf, torch.float32),
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
    num_zeros = 5 * 1001 // SUB_BLOCK_SIZE * SUB_BLOCK_SIZE  # what shares a sub-block with other values is rotated with them
    for codec in (*CODECS.values(), CODEC_OF_8BIT_AVERAGES):
        payloads = [encode_tensor("x", source, codec, "grad") for source in (tensor, tensor.cuda())]
        assert bytes(payloads[0][1]) == bytes(payloads[1][1]), codec
        spec, buffer = payloads[0]
        here, there = decode_tensor(spec, bytes(buffer)), decode_tensor(spec, bytes(buffer), "cuda")
        assert torch.equal(here, there.cpu()), codec
        assert not here.reshape(-1)[:num_zeros].any(), codec


def test_require_finite_accepts_empty_and_integer_tensors() -> None:
    require_finite(torch.empty(0), "nothing")
    require_finite(torch.tensor([2**62]), "ids")


def test_every_compression_of_the_configuration_has_a_codec() -> None:
    for codec in CODECS.values():
        round_trip(make((10,), torch.float32), codec)


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
