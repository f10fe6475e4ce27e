"""The protocol between the engine and a model: what a stage module is, and who builds it.

`swarm/` never imports a model. A factory (from `models/`, or a user's by dotted path) builds one `torch.nn.Module` for
each stage; the engine calls it with other parameter values through `torch.func.functional_call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

Tensors = dict[str, torch.Tensor]


@runtime_checkable
class StageFactory(Protocol):
    """Builds the stages of one model.

    A stage module is called as `module(inputs, labels)`:

    * `inputs`: named tensors, for stage 0 the trainer's batch (such as `input_ids` [B, T] int64), otherwise what the
      stage before returned. Floating ones get a gradient; integer and bool ones do not.
    * `labels`: `None`, except at the last stage: the trainer's label tensors (such as `labels` [B, T] int64).
    * It returns named boundary tensors; the last stage returns `{"loss_sum": 0-d, "tokens": 0-d int64}`: the sum of
      losses over the counted tokens (not the mean) and their number.

    Random draws are repeated on recomputation inside dropout modules, and inside submodules that have an attribute
    `draws_at_random = True`: those are seeded whenever they are called.

    Its parameters' names are unique in the whole model, and their initial values are a function of (seed, name, shape)
    alone, so that peers of a stage agree and another cut is the same model.
    """

    num_stages: int

    def build(self, stage: int) -> torch.nn.Module:
        """The module of `stage`, on the CPU, in fp64 if the run's precision is fp64, else fp32."""
        ...


@runtime_checkable
class Compilable(Protocol):
    """What a stage module offers in addition, so that `torch.compile` can be used on it (`launch_stage --compile`)."""

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The submodules where nearly all time is spent, alike in code: compiled once for all of them."""
        ...

    def example(self, num_samples: int, sequence_length: int) -> tuple[Tensors, Tensors | None]:
        """`inputs` and `labels` of the shapes and dtypes that training uses, on the CPU."""
        ...
