"""Where an optimizer's moments are and in which form: numbers or 8-bit codes, beside the parameters or in main memory.

Owns the tensors that a state consists of, by name. Must not know the optimizer's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarm.stage import eight_bit
from swarm.stage.flat import empty_flat
from swarm.stage.layout import Layout

#: Vectors that an optimizer keeps, of one number for each parameter. `SECOND` is never negative, any other may be.
FIRST, SECOND = "first", "second"
_SCALES = "_scales"
#: Elements that are coded at a time.
_PART_ELEMENTS = 2**20


@dataclass(frozen=True)
class OptimizerState:
    """The state after `num_updates` updates: flat tensors by name, as `Moments.entries` lists them."""

    tensors: Mapping[str, torch.Tensor]
    num_updates: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class MomentSlice:
    """Consecutive elements of a stage's flat vectors, and the 8-bit blocks that they make up."""

    elements: slice
    blocks: slice


class Moments:
    """The form and place of the moments of a stage's trained parameters.

    As numbers: `first` and `second`, in the masters' dtype. In 8 bits: codes under the same names, and `first_scales` and
    `second_scales`; blocks begin anew at each parameter, so that another cut of the model has the same ones. The second
    moment is coded as its square root: so what is too small for its block is lost in both moments at about the same
    gradient, and no first moment is divided by a second one that was lost.

    Args:
        layout: of the stage; buffers have no moments.
        kept: names of the moments.
        dtype: of the masters.
        device: of the masters, which `read` gives numbers to and `write` takes them from.
        in_8_bits: codes instead of numbers; the masters are fp32 then.
        home: device where a state is; the masters' own if not given.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        kept: Sequence[str] = (FIRST, SECOND),
        dtype: torch.dtype,
        device: str,
        in_8_bits: bool = False,
        home: str | None = None,
    ) -> None:
        self.layout = layout
        self.kept = tuple(kept)
        self.dtype = dtype
        self._device = torch.device(device)
        self._in_8_bits = in_8_bits
        self.home = torch.device(home or device)
        #: Name -> dtype, and how it is made up of parts that belong to a parameter each.
        self.entries: dict[str, tuple[torch.dtype, Layout]] = {}
        trained = layout.trained
        for name in self.kept:
            self.entries[name] = (torch.uint8 if in_8_bits else dtype, trained)
            if in_8_bits:
                self.entries[name + _SCALES] = (torch.float32, trained.in_blocks(eight_bit.BLOCK))

    def alike(self, *, kept: Sequence[str], in_8_bits: bool) -> Moments:
        """Other moments of the same parameters, in the same place."""
        return Moments(
            self.layout, kept=kept, dtype=self.dtype, device=str(self._device), in_8_bits=in_8_bits, home=str(self.home)
        )

    def zero(self) -> OptimizerState:
        """The state before the first update. On a CPU it takes memory only once it is written to."""
        return OptimizerState(
            {name: _zeros(layout.num_elements, dtype, self.home) for name, (dtype, layout) in self.entries.items()}, 0
        )

    def empty(self) -> dict[str, torch.Tensor]:
        """Tensors for a state that is to be written."""
        return {
            name: empty_flat(layout.num_elements, dtype=dtype, device=self.home) for name, (dtype, layout) in self.entries.items()
        }

    def parts(self, most: int) -> Iterator[MomentSlice]:
        """All elements in order, `most` (whole blocks) at a time; no block is in two parts."""
        start = block = 0
        for end in self._ends():
            for begin in range(start, end, most):
                stop = min(begin + most, end)
                after = block + eight_bit.num_blocks(stop - begin)
                yield MomentSlice(slice(begin, stop), slice(block, after))
                block = after
            start = end

    def _ends(self) -> list[int]:
        """The end of all, and where a block ends early because its parameter does."""
        ends, start = set(), 0
        for end in self.layout.trained.offsets[1:] if self._in_8_bits else ():
            if (end - start) % eight_bit.BLOCK:
                ends.add(end)
                start = end
        return sorted(ends | {self.layout.num_trained})

    def of_numbers(self, numbers: Mapping[str, torch.Tensor], num_updates: int) -> OptimizerState:
        """A state that holds these moments [N], by name, which lie where the masters do and have their dtype."""
        tensors = self.empty()
        for part in self.parts(_PART_ELEMENTS):
            for name in self.kept:
                self.write(tensors, name, part, numbers[name][part.elements])
        return OptimizerState(tensors, num_updates)

    @property
    def is_in_place(self) -> bool:
        """The numbers themselves lie beside the masters: `read` and `place` need no scratch."""
        return not self._in_8_bits and self.home == self._device

    def read(self, state: OptimizerState, name: str, part: MomentSlice, scratch: torch.Tensor) -> torch.Tensor:
        """The numbers of a moment, beside the masters: in `scratch`, or in their own place and not to be changed."""
        stored = state.tensors[name][part.elements]
        if self.is_in_place:
            return stored
        if not self._in_8_bits:
            return scratch.copy_(stored)
        scales = state.tensors[name + _SCALES][part.blocks]
        return _decoded(name, stored.to(self._device), scales.to(self._device), scratch)

    def place(self, tensors: Mapping[str, torch.Tensor], name: str, part: MomentSlice, scratch: torch.Tensor) -> torch.Tensor:
        """Memory for new numbers of a moment before they are written: their own place, or `scratch`."""
        return tensors[name][part.elements] if self.is_in_place else scratch

    def write(self, tensors: Mapping[str, torch.Tensor], name: str, part: MomentSlice, numbers: torch.Tensor) -> None:
        """Store numbers of a moment, which lie beside the masters."""
        target = tensors[name][part.elements]
        if self._in_8_bits:
            coded = square_root(numbers, out=torch.empty_like(numbers)) if name == SECOND else numbers
            codes, scales = eight_bit.encode(coded, signed=name != SECOND)
            target.copy_(codes)
            tensors[name + _SCALES][part.blocks].copy_(scales)
        elif target.data_ptr() != numbers.data_ptr():
            target.copy_(numbers)


def numbers_of(moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turn the moments of a checkpoint, named `first/<parameter>` and the like, into numbers."""
    found = {}
    for key, stored in moments.items():
        entry, _, parameter = key.partition("/")
        scales = moments.get(f"{entry}{_SCALES}/{parameter}")
        if scales is not None:
            out = torch.empty(stored.numel(), dtype=torch.float32)
            found[key] = _decoded(entry, stored.view(-1), scales, out).view(stored.shape)
        elif not entry.endswith(_SCALES):
            found[key] = stored
    return found


def square_root(tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The correctly rounded root of each element. On a CPU torch's vector library is off by a bit once in 150 times."""
    if tensor.device.type != "cpu":
        return torch.sqrt(tensor, out=out)
    np.sqrt(tensor.numpy(), out=out.numpy())
    return out


def _decoded(name: str, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    eight_bit.decode(codes, scales, out, signed=name != SECOND)
    return out.mul_(out) if name == SECOND else out


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_elements, dtype=torch.empty(0, dtype=dtype).numpy().dtype))
