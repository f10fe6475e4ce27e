"""What a codec of tensors is, and those that the wire has. Owns the codes; must not know specs, messages or who computes.

* `Raw`: the elements as they lie in memory (little-endian), 1 to 8 bytes each.
* `Half`: two bytes an element, fp16 or bf16.
* `Scaled`: 8-bit integers in units of a step of their own for each 64 elements, of these or of their rotation, see `scaled.py`.
* `Steps`: 8-bit integers, or fp16 numbers of at most 1, in units of one fp32 step for each `BLOCK_SIZE` elements:
  `value = code * step`. For sums of gradients: fp16 alone would overflow at 65504 and lose what is below 6e-8.
* `Uniform`: 8-bit codes of equal steps with a codebook, see `uniform.py`.

A sparse code (`sparse.py`) is another thing: it is told how many elements to keep, and the others become 0.
"""

from __future__ import annotations

import abc
from typing import Protocol

import numpy as np
import torch

from swarm.wire import scaled, uniform
from swarm.wire.messages import BLOCK_SIZE
from swarm.wire.scaled import rows_of, split

#: A block whose largest value is below this is all zeros: fp32 has no such step.
_NOTHING = 1e-30


class TensorCodec(abc.ABC):
    """A code of the elements of floating tensors. All tensors are flat, and not empty."""

    #: Only finite elements can be coded.
    needs_finite = False

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that belong together in a payload of elements of `dtype`: it is read from a multiple of them."""
        return 1

    @abc.abstractmethod
    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Code `flat` [n] on its device, which is not waited for.

        Returns:
            The payload, of any dtype; and what must be finite for it to be valid, None if the code loses nothing.
        """

    @abc.abstractmethod
    def decode(self, coded: torch.Tensor, num_elements: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """The elements [n] in `dtype` of a payload, uint8 and of the right length, on its device, which is not waited for.

        They may be written into `out`, a tensor of n elements, and are returned in either case.
        """


class SparseCodec(Protocol):
    """A code that keeps the largest elements of a tensor, such as the module `sparse`."""

    def encode(self, flat: torch.Tensor, num_kept: int) -> torch.Tensor:
        """The payload, as uint8, of finite elements [n] on the CPU."""

    def decode(self, payload: np.ndarray, num_elements: int, num_kept: int) -> torch.Tensor:
        """The elements, fp32 [n]; 0 where nothing was kept."""


class Raw(TensorCodec):
    """The elements as they lie in memory; of integers and bools too."""

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """The size of an element."""
        return dtype.itemsize

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`flat` itself."""
        return flat, None

    def decode(self, coded: torch.Tensor, num_elements: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """A view of `coded`, unless it holds bools."""
        if dtype == torch.bool:  # a byte other than 0 and 1 is no bool to torch: normalise instead of viewing
            return coded != 0
        return coded.view(dtype)


class Half(TensorCodec):
    """Each element rounded to `half`."""

    def __init__(self, half: torch.dtype) -> None:
        self._half = half

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Two."""
        return self._half.itemsize

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rounded elements, which must be finite."""
        coded = flat.to(self._half)
        return coded, coded

    def decode(self, coded: torch.Tensor, num_elements: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """The elements in `dtype`."""
        return coded.view(self._half).to(dtype)


class Scaled(TensorCodec):
    """The 8-bit code of `scaled.py`."""

    def __init__(self, *, rotate: bool) -> None:
        self._rotate = rotate

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `scaled.encode`."""
        return scaled.encode(flat, rotate=self._rotate)

    def decode(self, coded: torch.Tensor, num_elements: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """See `scaled.decode`."""
        return scaled.decode(coded, num_elements, dtype, rotated=self._rotate, out=out)


class Uniform(TensorCodec):
    """The 8-bit code of `uniform.py`; always made on the CPU."""

    needs_finite = True

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `uniform.encode`."""
        return torch.from_numpy(uniform.encode(flat.double().cpu().numpy())), None

    def decode(self, coded: torch.Tensor, num_elements: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """See `uniform.decode`."""
        return torch.from_numpy(uniform.decode(coded.cpu().numpy())).to(dtype)


class Steps(TensorCodec):
    """Codes of `dtype`, `largest` at most, in units of a step for each block; the steps stand after them."""

    def __init__(self, dtype: torch.dtype, largest: float) -> None:
        self._dtype = dtype
        self._largest = largest

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """The size of a code."""
        return self._dtype.itemsize

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes, then steps, as uint8; and the steps, which must be finite."""
        flat = flat.float().contiguous()
        end = flat.numel() * self._dtype.itemsize
        coded = torch.empty(end + 4 * -(-flat.numel() // BLOCK_SIZE), dtype=torch.uint8, device=flat.device)
        steps = []
        for values, out in zip(rows_of(flat, BLOCK_SIZE), rows_of(coded[:end].view(self._dtype), BLOCK_SIZE), strict=True):
            top = torch.maximum(values.amax(dim=1), -values.amin(dim=1))  # half the time of abs().amax()
            is_zero = top < _NOTHING  # false for NaN, which the steps show
            steps.append(torch.where(is_zero, 0.0, top / self._largest))
            codes = values * torch.where(is_zero, 0.0, self._largest / top).unsqueeze(1)
            out.copy_(codes if self._dtype.is_floating_point else codes.round_())
        step = torch.cat(steps)
        coded[end:] = step.view(torch.uint8)
        return coded, step

    def decode(self, coded: torch.Tensor, num_elements: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """Each code times its block's step."""
        end = num_elements * self._dtype.itemsize
        steps = coded[end:].clone().view(torch.float32)  # the copy is aligned
        flat = torch.empty(num_elements, dtype=torch.float32, device=coded.device)
        if out is not None and out.dtype == torch.float32 and out.is_contiguous():
            flat = out.view(-1)
        flat.copy_(coded[:end].view(self._dtype))
        for values, step in zip(rows_of(flat, BLOCK_SIZE), split(steps, flat, BLOCK_SIZE), strict=True):
            values.mul_(step.unsqueeze(1))
        return flat.to(dtype)
