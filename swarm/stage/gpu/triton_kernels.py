"""The Triton side of `kernels.py`, which alone imports it. Elements are counted in 64 bits.

A kernel works on all tensors of a stage in one launch. Each program has one block of one of them: `tensor_of` says of
which, `first_of` which program has that one's first block, `sizes` and `addresses` where it ends and lies.
"""

# Triton reads the source of these functions: no annotations that are strings, hence no `from __future__` here.
import triton
import triton.language as tl


@triton.jit
def _offsets(tensor, first_of, sizes, is_aligned: tl.constexpr, block: tl.constexpr):
    """Offsets of this program's elements inside their tensor, and which of them there are."""
    start = (tl.program_id(0) - tl.load(first_of + tensor)).to(tl.int64) * block
    size = tl.load(sizes + tensor)
    if is_aligned:
        size = tl.multiple_of(size, 16)
    offsets = start + tl.arange(0, block)
    return offsets, offsets < size


@triton.jit
def _pointer(address, kind: tl.constexpr, is_aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(kind))
    if is_aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def survey(
    addresses,
    tensor_of,
    first_of,
    sizes,
    result,
    squares,
    largest,
    kind: tl.constexpr,
    is_aligned: tl.constexpr,
    block: tl.constexpr,
):
    """Set `result` to 0 if an element is NaN or beyond `largest`; `squares` get the sum of squares of each block."""
    tensor = tl.load(tensor_of + tl.program_id(0))
    offsets, inside = _offsets(tensor, first_of, sizes, is_aligned, block)
    pointer = _pointer(tl.load(addresses + tensor), kind, is_aligned)
    value = tl.load(pointer + offsets, mask=inside, other=0.0).to(squares.dtype.element_ty)
    tl.store(squares + tl.program_id(0), tl.sum(value * value, axis=0))
    if tl.min((tl.abs(value) <= largest).to(tl.int32), axis=0) == 0:
        tl.store(result, 0)


@triton.jit
def _plus(value, address, valid, factor, offsets, inside, kind: tl.constexpr, is_aligned: tl.constexpr):
    if (tl.load(valid) != 0) & (address != 0):
        pointer = _pointer(address, kind, is_aligned)
        value += tl.load(pointer + offsets, mask=inside, other=0.0).to(value.dtype) * factor
    return value


@triton.jit
def add(
    addresses,
    tensor_of,
    first_of,
    sizes,
    num_tensors,
    v0,
    f0,
    v1,
    f1,
    v2,
    f2,
    v3,
    f3,
    total_kind: tl.constexpr,
    kind: tl.constexpr,
    is_aligned: tl.constexpr,
    count: tl.constexpr,
    block: tl.constexpr,
):
    """`total += g * f` for the first `count` summands whose `v` is not 0, in their order.

    `addresses` hold those of the totals, then those of each summand's gradients: 0 where it has none.
    """
    tensor = tl.load(tensor_of + tl.program_id(0))
    offsets, inside = _offsets(tensor, first_of, sizes, is_aligned, block)
    total = _pointer(tl.load(addresses + tensor), total_kind, is_aligned)
    value = tl.load(total + offsets, mask=inside, other=0.0)
    given = addresses + num_tensors + tensor
    value = _plus(value, tl.load(given), v0, f0, offsets, inside, kind, is_aligned)
    if count > 1:
        value = _plus(value, tl.load(given + num_tensors), v1, f1, offsets, inside, kind, is_aligned)
    if count > 2:
        value = _plus(value, tl.load(given + 2 * num_tensors), v2, f2, offsets, inside, kind, is_aligned)
    if count > 3:
        value = _plus(value, tl.load(given + 3 * num_tensors), v3, f3, offsets, inside, kind, is_aligned)
    tl.store(total + offsets, value, mask=inside)
