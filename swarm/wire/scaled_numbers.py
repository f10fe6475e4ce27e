"""The numbers that define the 8-bit codes of `scaled.py`, for torch and for Triton alike."""

from __future__ import annotations

import torch

from swarm.wire.messages import BLOCK_SIZE, SUB_BLOCK_SIZE

PER_BLOCK = BLOCK_SIZE // SUB_BLOCK_SIZE
#: 1 / 127 in fp32: products are rounded alike everywhere.
PART = float(torch.tensor(1 / 127, dtype=torch.float32))
#: Units have five significant bits: so many of fp32 are cut off, and so many of bf16 are always 0.
CUT, TO_BF16 = 19, 3
#: The most that a sub-block's byte says.
FARTHEST = 255
#: The bits of an fp32 number's exponent.
EXPONENT = 0x7F800000
#: A cut unit below this would be no normal number of fp32.
NORMAL = 1 << (23 - CUT)
#: Exponents, as fp32 has them. `LEAST`: the least that a top counts as. `TO_INTEGER`: a top's plus that of the factor which
#: makes an integer of 17 bits of it. The others: a top's less that of an integer's unit, 64 times smaller for rotated ones.
LEAST, TO_INTEGER, FROM_INTEGER, FROM_ROTATED = 32, 270, 16, 22
