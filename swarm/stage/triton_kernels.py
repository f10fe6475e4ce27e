"""The Triton side of `kernels.py`, which alone imports it. Elements are counted in 64 bits."""

# Triton reads the source of these functions: no annotations that are strings, hence no `from __future__` here.
import triton
import triton.language as tl


@triton.jit
def look(gradient, result, largest, num_elements, block: tl.constexpr):
    """Set `result` to 0 if an element of `gradient` is NaN or beyond `largest`."""
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(gradient + offsets, mask=offsets < num_elements, other=0.0)
    is_within = tl.abs(value) <= largest
    if tl.min(is_within.to(tl.int32), axis=0) == 0:
        tl.store(result, 0)


@triton.jit
def _plus(value, gradient, valid, factor, offsets, inside):
    if tl.load(valid) != 0:
        value += tl.load(gradient + offsets, mask=inside).to(value.dtype) * factor
    return value


@triton.jit
def add(
    total, g0, v0, f0, g1, v1, f1, g2, v2, f2, g3, v3, f3, num_elements, count: tl.constexpr, block: tl.constexpr
):
    """`total += g * f` for the first `count` summands whose `v` is not 0, in their order."""
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < num_elements
    value = tl.load(total + offsets, mask=inside)
    value = _plus(value, g0, v0, f0, offsets, inside)
    if count > 1:
        value = _plus(value, g1, v1, f1, offsets, inside)
    if count > 2:
        value = _plus(value, g2, v2, f2, offsets, inside)
    if count > 3:
        value = _plus(value, g3, v3, f3, offsets, inside)
    tl.store(total + offsets, value, mask=inside)
