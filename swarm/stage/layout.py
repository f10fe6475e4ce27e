"""How a stage's trainable parameters lie in one flat vector. Owns names, shapes and offsets; holds no values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Layout:
    """Parameter `names[i]` of `shapes[i]` takes elements `offsets[i]:offsets[i+1]` of every flat tensor of the stage."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Layout:
        """The layout of the parameters of `module` that are trained, in the module's order."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        offsets = [0]
        for _, parameter in named:
            offsets.append(offsets[-1] + parameter.numel())
        return cls(tuple(n for n, _ in named), tuple(p.shape for _, p in named), tuple(offsets))

    @property
    def num_elements(self) -> int:
        """Elements of every flat tensor."""
        return self.offsets[-1]

    def in_blocks(self, size: int) -> Layout:
        """The layout of one number for each block of `size` elements; each parameter begins a block."""
        shapes = tuple(torch.Size([-(-shape.numel() // size)]) for shape in self.shapes)
        return Layout(self.names, shapes, (0, *accumulate(shape.numel() for shape in shapes)))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` [num_elements], one in each parameter's shape."""
        return [
            flat[start:end].view(shape) for start, end, shape in zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        ]

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `flat` by parameter name."""
        return dict(zip(self.names, self.views(flat), strict=True))

    def flatten(self, tensors: Iterable[torch.Tensor], *, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A new flat tensor holding copies of `tensors`, in the layout's order.

        Raises:
            ValueError: if a shape is not the layout's.
        """
        flat = torch.empty(self.num_elements, dtype=dtype, device=device)
        for view, tensor, shape in zip(self.views(flat), tensors, self.shapes, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} where {tuple(shape)} belongs")
            view.copy_(tensor.detach())
        return flat
