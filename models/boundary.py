"""What crosses from one stage to the next, and how it gets into and out of a model's own forward. Owns the names of the
boundary's tensors and the stand-ins for other stages' modules; must not know the loss or the swarm.

A stage runs the model's own forward, so that masks, rotary embeddings and the choice by layer type stay the model's.
In the places of other stages' modules are stand-ins that compute nothing. The one right before the stage's first layer
returns what came from the stage before, whatever the model has made of the embedding until there (some families
scale it); a hook on the stage's last layer takes what leaves.

The boundary's tensors, by name:

* `hidden_states`, floating: what the last layer returned, of whatever shape the family's layers hand on.
* `attention_mask`, `position_ids` [B, T], as given; `input_ids` [B, T] where later layers look at tokens.
* `returned.NAME`: what layers return besides (indices of sparse attention).
* `shared.TYPE.key`, `shared.TYPE.value`: keys and values that later layers use again.
* `per_layer_inputs`: embeddings for each of the remaining layers.
* `router_counts`, `router_sums`: see `loss.py`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from models.anatomy import Anatomy
from swarm.stage.module import Tensors

HIDDEN = "hidden_states"
#: Integer inputs that every stage needs.
HANDED_ON = ("attention_mask", "position_ids")
_PER_LAYER = "per_layer_inputs"


class Crossing:
    """One call of a stage: what entered, and what leaves."""

    def __init__(self, entering: Tensors, dtype: torch.dtype, anatomy: Anatomy) -> None:
        self.dtype = dtype
        self._streams = anatomy.streams
        #: Floating tensors in the dtype of this call's parameters.
        self.entering = {n: t.to(dtype) if t.is_floating_point() else t for n, t in entering.items()}
        self.leaving: Tensors = {}

    def placeholder(self) -> torch.Tensor:
        """A tensor [B, T, D] in the place of the embedding, which later stages lack. Nothing that is computed from it is used."""
        hidden = self.entering[HIDDEN].detach()
        return hidden if self._streams is None else hidden.select(self._streams, 0)


crossing: ContextVar[Crossing] = ContextVar("crossing")


class Absent(torch.nn.Module):
    """Stands for another stage's embedding or norm: hidden states go through, ids and positions become a placeholder."""

    def forward(self, first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return hidden states as they came, and a placeholder for everything else."""
        return first if first.is_floating_point() and first.ndim > 2 else crossing.get().placeholder()


class PassThrough(torch.nn.Module):
    """Stands in the place of another stage's layer; keeps what the forward may ask of it (attention type)."""

    def __init__(self, layer: torch.nn.Module, anatomy: Anatomy) -> None:
        super().__init__()
        self._anatomy = anatomy
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and name not in self.__dict__:
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        """Return the hidden states as they came."""
        returns = self._anatomy.returns
        return hidden_states if returns is None else (hidden_states, *(None for _ in returns))


class BoundaryEntry(PassThrough):
    """Stands right before the stage's first layer and brings in what the stage before sent."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        """Return what the stage before sent, whatever came from the layer before."""
        entering = crossing.get().entering
        if self._anatomy.shared is not None:
            shared = kwargs[self._anatomy.shared]
            for name in entering:
                if name.startswith("shared.") and name.endswith(".key"):
                    kind = name.removeprefix("shared.").removesuffix(".key")
                    shared[kind] = entering[name], entering[f"shared.{kind}.value"]
        if self._anatomy.returns is None:
            return entering[HIDDEN]
        return (entering[HIDDEN], *(entering.get(f"returned.{name}") for name in self._anatomy.returns))


def leave_after(layer: torch.nn.Module, anatomy: Anatomy) -> None:
    """Note what `layer`, the last of its stage, hands to the next one."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        leaving = crossing.get().leaving
        returned = output if isinstance(output, tuple) else (output,)
        leaving[HIDDEN] = returned[0]
        for name, value in zip(anatomy.returns or (), returned[1:], strict=False):
            if name is not None and value is not None:
                leaving[f"returned.{name}"] = value
        if anatomy.shared is not None:
            for kind, (key, value) in kwargs[anatomy.shared].items():
                leaving[f"shared.{kind}.key"], leaving[f"shared.{kind}.value"] = key, value

    layer.register_forward_hook(hook, with_kwargs=True)


def carry_per_layer_inputs(base: Any, span: range, num_layers: int) -> None:
    """The embeddings per layer of gemma are made at the first stage; later ones get those of their layers, and the rest's."""
    if not hasattr(base, "project_per_layer_inputs"):
        return
    own = base.project_per_layer_inputs

    def made(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        inputs_BTLP = own(*args, **kwargs)
        if inputs_BTLP is not None and span.stop < num_layers:
            crossing.get().leaving[_PER_LAYER] = inputs_BTLP[:, :, span.stop :]
        return inputs_BTLP

    def brought(*args: Any, **kwargs: Any) -> torch.Tensor:
        current = crossing.get()
        inputs_BTLP = current.entering[_PER_LAYER]
        if span.stop < num_layers:
            current.leaving[_PER_LAYER] = inputs_BTLP[:, :, len(span) :]
        return F.pad(inputs_BTLP, (0, 0, num_layers - inputs_BTLP.shape[2], 0))  # found by layer number

    base.project_per_layer_inputs = made if span.start == 0 else brought
    if span.start > 0:
        base.get_per_layer_inputs = lambda *_, **__: None
