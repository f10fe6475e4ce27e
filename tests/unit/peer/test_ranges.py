"""A tensor that comes in ranges is the same tensor, or it is refused."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.base.errors import RemoteError
from swarm.peer.stage.ranges import fetch_ranges
from swarm.wire import messages as m
from swarm.wire.compression import encode_tensor
from swarm.wire.framing import Frame


def fetched(whole: torch.Tensor, into: torch.Tensor, num_elements: int) -> list[int]:
    offsets: list[int] = []

    async def fetch(offset: int) -> Frame:
        offsets.append(offset)
        spec, buffer = encode_tensor("part", whole[offset : offset + num_elements].clone(), "raw", "state")
        return Frame(m.StateChunk(tensors=(spec,)), (buffer,))

    asyncio.run(fetch_ranges(into, num_elements, fetch, what="the sum"))
    return offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_ranges_of_a_tensor_are_put_together(dtype: torch.dtype) -> None:
    whole, into = torch.arange(10).to(dtype), torch.zeros(10, dtype=dtype)
    assert fetched(whole, into, 4) == [0, 4, 8]
    assert torch.equal(whole, into)


@pytest.mark.parametrize("whole", [torch.zeros(9), torch.zeros(10, dtype=torch.float64)])
def test_a_range_of_another_length_or_type_is_refused(whole: torch.Tensor) -> None:
    with pytest.raises(RemoteError, match="the sum: a range came back with another length or type"):
        fetched(whole, torch.zeros(10), 4)
