"""The 8-bit code is bitsandbytes' own, and takes the nearest value by comparisons alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.quantized import bitsandbytes_functional
from swarm.stage import eight_bit
from swarm.stage.eight_bit import BLOCK, decode, encode, values_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
SIGNED = pytest.mark.parametrize("signed", [True, False])


def drawn(num_elements: int, *, signed: bool, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(num_elements, generator=generator) * 10.0 ** (-6 * torch.rand(num_elements, generator=generator))
    return values * (torch.randint(0, 2, (num_elements,), generator=generator) * 2 - 1) if signed else values


def distances_of(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """fp64 [n, 256]: from each part of its block's largest magnitude to each value of the code."""
    blocks = values.split(BLOCK) if len(values) else ()
    parts = torch.cat([block / block.abs().max() for block in blocks]) if blocks else values
    return (parts.double().unsqueeze(1) - values_of(signed=signed, device=CPU).double()).abs()


@SIGNED
def test_the_values_are_those_of_bitsandbytes(signed: bool) -> None:
    theirs = bitsandbytes_functional().create_dynamic_map(signed=signed)
    torch.testing.assert_close(values_of(signed=signed, device=CPU), theirs, rtol=0.0, atol=1e-7)


@SIGNED
def test_a_first_guess_is_never_off_by_more_than_one(signed: bool) -> None:
    """Exhaustively: between the lowest and the highest number with the same upper bits is at most one edge."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    ends = torch.stack([upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)])
    ends = ends[:, (ends.abs() <= 1).all(dim=0)]
    edges = eight_bit._edges_of(signed=signed, device=CPU)
    codes = torch.bucketize(ends, edges)
    assert int((codes[0] - codes[1]).abs().max()) == 1


@SIGNED
@given(seed=st.integers(0, 2**31), num_elements=st.integers(0, 3 * BLOCK))
def test_the_codes_are_those_of_the_nearest_values(signed: bool, seed: int, num_elements: int) -> None:
    values = drawn(num_elements, signed=signed, seed=seed)
    codes, scales = encode(values, signed=signed)
    distances = distances_of(values, signed=signed)
    chosen = distances.gather(1, codes.long().unsqueeze(1)).squeeze(1)
    nearest, _ = distances.min(dim=1)
    assert (chosen <= nearest + 2**-24).all(), "halfway between two values is where fp32 says"
    assert scales.tolist() == [float(block.abs().max()) for block in values.split(BLOCK) if len(block)]
    decoded = decode(codes, scales, torch.empty(num_elements), signed=signed)
    each = scales.repeat_interleave(BLOCK)[:num_elements]
    assert torch.equal(decoded, values_of(signed=signed, device=CPU)[codes.long()] * each)


@SIGNED
def test_zeros_stay_zeros(signed: bool) -> None:
    values = torch.cat([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-38), drawn(BLOCK, signed=signed)])
    values[-1] = 0.0
    codes, scales = encode(values, signed=signed)
    decoded = decode(codes, scales, torch.empty_like(values), signed=signed)
    assert not decoded[: 2 * BLOCK].any()
    assert scales[:2].tolist() == [0.0, 0.0]
    assert decoded[-1] == 0.0
    assert decoded[2 * BLOCK : -1].any()
