"""The sparse 4-bit code: its oracle, its size, its slow twin, and payloads that lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.wire.compression import NonFinite, decode_tensor, encode_sparse
from swarm.wire.messages import BUCKET_SIZE, TensorSpec


def round_trip(tensor: torch.Tensor, num_kept: int) -> torch.Tensor:
    spec, buffer = encode_sparse("x", tensor, "sparse4", num_kept, "state")
    assert memoryview(buffer).nbytes == spec.num_bytes
    decoded = decode_tensor(spec, bytes(buffer))
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
    return decoded


def test_the_oracle_of_cocktail_sgd() -> None:
    assert round_trip(torch.tensor([1.0, -1.0, 0.5, 0.1]), 4).tolist() == [0.875, -1.0, 0.5, 0.125]


def test_a_parameter_takes_the_bits_that_the_paper_says() -> None:
    """A tenth of the elements is offered, a fifth of those kept in 4 bits: 0.1825 bits, 87.7 times less than fp16."""
    offered = 128 * 1000
    spec, _ = encode_sparse("x", torch.randn(offered), "sparse4", offered // 5, "state")
    assert spec.num_bytes * 8 / (10 * offered) == pytest.approx(0.1825, rel=1e-3)
    assert 16 / (spec.num_bytes * 8 / (10 * offered)) == pytest.approx(87.7, rel=1e-3)


@settings(deadline=None, max_examples=60)
@given(
    num_elements=st.integers(1, 700), part=st.floats(0.0, 1.0), seed=st.integers(0, 99), scale=st.sampled_from([1.0, 1e-9, 1e9])
)
def test_the_code_equals_its_slow_twin(num_elements: int, part: float, seed: int, scale: float) -> None:
    """The largest elements, bucket by bucket in plain Python."""
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(seed)) * scale
    num_kept = math.ceil(part * num_elements)
    kept = sorted(sorted(range(num_elements), key=lambda i: -abs(float(values[i])))[:num_kept])
    expected = [0.0] * num_elements
    for start in range(0, num_kept, BUCKET_SIZE):
        bucket = kept[start : start + BUCKET_SIZE]
        step = float(torch.tensor(max(abs(float(values[i])) for i in bucket)).bfloat16())
        for i in bucket:
            code = max(-8, min(7, round(float(np.float32(float(values[i])) / np.float32(step) * np.float32(8)))))
            expected[i] = code / 8 * step
    assert torch.allclose(round_trip(values, num_kept), torch.tensor(expected), rtol=1e-6, atol=0)


def test_zeros_stay_zeros() -> None:
    assert not round_trip(torch.zeros(300), 77).any()
    assert round_trip(torch.zeros(0), 0).numel() == 0


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(NonFinite):
        encode_sparse("x", torch.tensor([1.0, float("nan")]), "sparse4", 1, "state")


def test_a_payload_that_keeps_another_number_of_elements_is_refused() -> None:
    spec, buffer = encode_sparse("x", torch.randn(64), "sparse4", 16, "state")
    forged = bytearray(buffer)
    forged[0] ^= 1
    with pytest.raises(RemoteProtocolError, match=r"keeps 1[57] elements, its spec says 16"):
        decode_tensor(spec, forged)


def test_a_small_payload_cannot_ask_for_much_memory() -> None:
    with pytest.raises(ValueError, match="too many for a sparse code"):
        TensorSpec(name="x", dtype="float32", shape=(2**32,), codec="sparse4", num_kept=1)


@pytest.mark.parametrize(("codec", "num_kept"), [("raw", 3), ("scaled8", 0), ("sparse4", None), ("sparse4", 9)])
def test_a_spec_says_how_many_are_kept_if_and_only_if_it_is_sparse(codec: str, num_kept: int | None) -> None:
    with pytest.raises(ValueError, match="elements are kept in codec"):
        TensorSpec(name="x", dtype="float32", shape=(8,), codec=codec, num_kept=num_kept)  # type: ignore[arg-type]
