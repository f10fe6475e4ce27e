"""How a stage's state lies in one flat vector: trainable parameters, then buffers that its forward changes.

Owns names, shapes and offsets; holds no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch

from swarm.stage.optimizers.decay import norm_parameters


@dataclass(frozen=True)
class Layout:
    """Parameter or buffer `names[i]` of `shapes[i]` takes elements `offsets[i]:offsets[i+1]` of each flat tensor of the stage."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    #: Names of those that belong to normalisation layers.
    norms: frozenset[str] = frozenset()
    #: Of the buffers, which come last.
    buffer_dtypes: tuple[torch.dtype, ...] = ()

    @classmethod
    def of(cls, module: torch.nn.Module, buffers: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Layout:
        """The layout of the parameters of `module` that are trained, in the module's order, and of these of its buffers."""
        named: list[tuple[str, torch.Tensor]] = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        named += buffers.items()
        offsets = [0]
        for _, parameter in named:
            offsets.append(offsets[-1] + parameter.numel())
        return cls(
            tuple(n for n, _ in named),
            tuple(p.shape for _, p in named),
            tuple(offsets),
            norm_parameters(module),
            tuple(b.dtype for b in buffers.values()),
        )

    @property
    def num_elements(self) -> int:
        """Elements of every flat tensor."""
        return self.offsets[-1]

    @property
    def num_trained(self) -> int:
        """Elements of the parameters, which come first."""
        return self.offsets[len(self.names) - len(self.buffer_dtypes)]

    @property
    def trained(self) -> Layout:
        """The layout of the parameters alone."""
        count = len(self.names) - len(self.buffer_dtypes)
        return Layout(self.names[:count], self.shapes[:count], self.offsets[: count + 1], self.norms)

    @property
    def buffers(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the buffers."""
        return dict(zip(self.names[len(self.names) - len(self.buffer_dtypes) :], self.buffer_dtypes, strict=True))

    @property
    def uncounted(self) -> tuple[tuple[int, int], ...]:
        """The range of the buffers, if there are any: no part of the gradient's norm."""
        return ((self.num_trained, self.num_elements),) if self.buffer_dtypes else ()

    def joined(self, trained: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """`trained` [num_trained] with the buffers of `whole` [num_elements]; itself if there are none."""
        return torch.cat([trained, whole[self.num_trained :]]) if self.buffer_dtypes else trained

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
