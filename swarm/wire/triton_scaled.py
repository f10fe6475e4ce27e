"""The Triton side of `scaled.py`, which alone imports it, when it is needed.

Each program has one block, its sub-blocks as rows, and goes through its values once. Elements are counted in 64 bits.
"""

# Triton reads the source of these functions: no annotations that are strings, hence no `from __future__` here.
import triton
import triton.language as tl

from swarm.wire import scaled_numbers as numbers
from swarm.wire.messages import SUB_BLOCK_SIZE

PART, CUT, TO_BF16 = (tl.constexpr(x) for x in (numbers.PART, numbers.CUT, numbers.TO_BF16))
REST = tl.constexpr((1 << numbers.CUT) - 1)
FARTHEST, NORMAL = (tl.constexpr(x) for x in (numbers.FARTHEST, numbers.NORMAL))
LEAST, TO_INTEGER = (tl.constexpr(x) for x in (numbers.LEAST, numbers.TO_INTEGER))
FROM_INTEGER, FROM_ROTATED = (tl.constexpr(x) for x in (numbers.FROM_INTEGER, numbers.FROM_ROTATED))
PER_BLOCK, SIZE = (tl.constexpr(x) for x in (numbers.PER_BLOCK, SUB_BLOCK_SIZE))
#: Added to a number below 2**22 and taken away again, it rounds that to an integer, halves to even ones.
ROUNDER = tl.constexpr(12582912.0)
#: An integer of 17 bits is so many times one, plus another, that fp16 holds exactly.
HALF = tl.constexpr(256.0)


@triton.jit
def _places(num_values):
    """Offsets of this program's values [PER_BLOCK, SIZE] and steps [PER_BLOCK], which of them there are, and whole rows."""
    step = tl.program_id(0).to(tl.int64) * PER_BLOCK + tl.arange(0, PER_BLOCK)
    value = step[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return value, value < num_values, step, step * SIZE < num_values, step * SIZE + SIZE <= num_values


@triton.jit
def _hadamard():
    common = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float16)


@triton.jit
def _rounded(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _power(exponent):
    """2 ** (exponent - 127) in fp32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(values, payload, bounds, num_values, rotate: tl.constexpr):
    """Code one block of `values`; see `scaled.encode`."""
    value, has_value, step, has_step, is_whole = _places(num_values)
    x = tl.load(values + value, mask=has_value, other=0.0).to(tl.float32)
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # as integers NaN is the largest
    exponent = tl.maximum(top >> 23, LEAST)
    found = _rounded(x * _power(-(exponent - TO_INTEGER))[:, None])
    less = FROM_INTEGER
    if rotate:
        high = _rounded(found * (1.0 / HALF))
        low = found - high * HALF
        matrix = _hadamard()
        turned = tl.dot(high.to(tl.float16), matrix) * HALF + tl.dot(low.to(tl.float16), matrix)
        found = tl.where(is_whole[:, None], turned, found)
        less = tl.where(is_whole, FROM_ROTATED, FROM_INTEGER)
    unit = _power(exponent - less)
    bits = (tl.max(tl.abs(found), axis=1) * PART * unit).to(tl.int32, bitcast=True)
    cut = tl.maximum((bits + REST) >> CUT, NORMAL)
    largest = tl.max(cut, axis=0)
    below = tl.minimum(largest - cut, FARTHEST)
    factor = tl.div_rn(unit, ((largest - below) << CUT).to(tl.float32, bitcast=True))
    integers = _rounded(found * factor[:, None])
    tl.store(payload + value, integers.to(tl.int8).to(tl.uint8, bitcast=True), mask=has_value)
    tl.store(payload + num_values + step, below.to(tl.uint8), mask=has_step)
    place = payload + num_values + tl.cdiv(num_values, SIZE) + 2 * tl.program_id(0)
    number = largest << TO_BF16
    tl.store(place, (number & 255).to(tl.uint8))
    tl.store(place + 1, ((number >> 8) & 255).to(tl.uint8))
    tl.store(bounds + tl.program_id(0), tl.max(top, axis=0).to(tl.float32, bitcast=True) * 2.0)


@triton.jit
def decode(payload, values, num_values, rotate: tl.constexpr):
    """Decode one block of a payload; see `scaled.decode`."""
    value, has_value, step, has_step, is_whole = _places(num_values)
    place = payload + num_values + tl.cdiv(num_values, SIZE) + 2 * tl.program_id(0)
    largest = tl.load(place).to(tl.int32) | (tl.load(place + 1).to(tl.int8, bitcast=True).to(tl.int32) << 8)
    below = tl.load(payload + num_values + step, mask=has_step, other=0).to(tl.int32) << TO_BF16
    units = ((largest - below) << 16).to(tl.float32, bitcast=True)
    integers = tl.load(payload + value, mask=has_value, other=0).to(tl.int8, bitcast=True)
    found = integers.to(tl.float32)
    if rotate:
        turned = tl.dot(integers.to(tl.float16), _hadamard())
        found = tl.where(is_whole[:, None], turned, found)
    tl.store(values + value, (found * units[:, None]).to(values.dtype.element_ty), mask=has_value)
