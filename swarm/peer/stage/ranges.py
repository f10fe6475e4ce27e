"""A long tensor that comes in ranges, one request each. It owns the loop and the check of each range, not who is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from swarm.base.errors import RemoteError
from swarm.wire.compression import decode_tensor
from swarm.wire.framing import Frame


async def fetch_ranges(
    flat: torch.Tensor,
    num_elements: int,
    fetch: Callable[[int], Awaitable[Frame]],
    *,
    what: str,
    check: Callable[[torch.Tensor], None] = lambda part: None,
) -> None:
    """Fill `flat`, one range after another.

    Args:
        flat: of one dimension; written in place.
        num_elements: of a range; the last may be shorter.
        fetch: asks for the range that begins at an element.
        what: names the tensor in errors.
        check: raises if a range that has come is of no use.

    Raises:
        RemoteError: a range has another length or dtype than `flat` there.
    """
    for offset in range(0, flat.numel(), num_elements):
        target = flat[offset : offset + num_elements]
        put_range(target, await fetch(offset), what=what)
        check(target)


def put_range(target: torch.Tensor, frame: Frame, *, what: str) -> None:
    """Copy the only tensor of `frame` into `target`.

    Raises:
        RemoteError: it has another length or dtype.
    """
    part = decode_tensor(*frame.only_tensor())
    if part.shape != target.shape or part.dtype != target.dtype:
        raise RemoteError(f"{what}: a range came back with another length or type")
    target.copy_(part)
