"""Digests and sums of squares against slow twins, also where fp32 cannot hold a square."""

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from swarm.stage.digest import checksum_of, digest_of, squares_of


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e17, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squares_are_those_of_fp64_whatever_the_range(scale: float, dtype: torch.dtype) -> None:
    flat = torch.randn(100_003, generator=torch.Generator().manual_seed(0)).to(dtype) * scale
    uncounted = [(70_000, 70_001), (10, 40_000)]
    counted = np.delete(flat.double().numpy(), [*range(10, 40_000), 70_000])
    assert squares_of(flat) == pytest.approx(float(flat.double() @ flat.double()), rel=1e-7)
    assert squares_of(flat, uncounted) == pytest.approx(float(counted @ counted), rel=1e-7)


def test_one_large_element_among_small_ones_is_not_an_infinity() -> None:
    flat = torch.full((5000,), 1e-25)
    flat[4321] = 2.0**60
    assert squares_of(flat) == 2.0**120


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_a_digest_is_that_of_all_bytes_in_order(parts: list[bytes]) -> None:
    tensors = [torch.tensor(list(part), dtype=torch.uint8) for part in parts]
    assert digest_of(tensors) == blake3(b"".join(parts)).hexdigest()


def test_nothing_has_a_digest() -> None:
    """A stage whose parameters are all frozen trains none; what it has of them may be a view without a stride."""
    empty = torch.zeros(1).expand(3)[:0].detach()
    assert digest_of([torch.zeros(1)[:0].expand(0)]) == digest_of([empty]) == digest_of([])
    assert checksum_of([empty]) == checksum_of([])


@pytest.mark.parametrize("num_elements", [1, 9000, 40_000])
def test_a_checksum_tells_every_element(num_elements: int) -> None:
    tensor = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    found = {checksum_of([tensor]), checksum_of([tensor, tensor]), checksum_of([-tensor])}
    for index in (0, num_elements // 2, num_elements - 1):
        changed = tensor.clone()
        changed[index] += 1.0
        found.add(checksum_of([changed]))
    assert len(found) == 3 + len({0, num_elements // 2, num_elements - 1})
    assert checksum_of([tensor.clone()]) == checksum_of([tensor])
