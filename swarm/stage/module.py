"""The protocol between the engine and a model: what a stage module is, and who builds it.

`swarm/` never imports a model. A factory (from `models/`, or a user's by dotted path) builds one `torch.nn.Module` for
each stage; the engine calls it with other tensors in its parameters' places (`ParameterSlots`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from swarm.base.errors import ConfigError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tie:
    """One parameter of which several stages hold a copy, under names and in shapes of their own.

    Its elements come in the same order everywhere, and every copy starts from the same bits. The engine adds up the
    copies' gradients, so they stay the same bits for ever; the gradient's norm counts them once.
    """

    #: (stage, parameter name) of each copy, the owner's first; one at most in a stage.
    places: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """The owner's name for it."""
        return self.places[0][1]


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

    Names of its parameters and buffers are unique in the whole model, and their initial values are a function of (seed, name,
    shape) alone, so that peers of a stage agree and another cut is the same model.

    Buffers that its state dict holds and its training forward changes are part of the stage's state: see `state_buffers.py`. A
    module may have an `example`, as a `Compilable` one does: then only buffers that change in it count. Others are left alone.
    """

    num_stages: int
    # `ties: tuple[Tie, ...]` may be left out by a model that has none: see `ties_of`.

    def build(self, stage: int) -> torch.nn.Module:
        """The module of `stage`, on the CPU, in fp64 if the run's precision is fp64, else fp32."""
        ...


@runtime_checkable
class Compilable(Protocol):
    """A stage module on which `torch.compile` (`launch_stage --compile`) and CUDA graphs can be used.

    With CUDA graphs its Python code runs when they are captured and not again, so nothing in it may change from one micro-batch
    to the next but tensors; what asks the device for a value, or draws at random, is never captured.
    """

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The submodules where nearly all time is spent, alike in code: compiled once for all of them."""
        ...

    def example(self, num_samples: int, sequence_length: int) -> tuple[Tensors, Tensors | None]:
        """`inputs` and `labels` of the shapes and dtypes that training uses, on the CPU."""
        ...


@runtime_checkable
class Declaring(Protocol):
    """A stage module some of whose inputs do not have the samples as their first dimension.

    A peer refuses what is larger than in any micro-batch of the run; it knows such inputs from here only.
    """

    def largest_inputs(self, num_samples: int, sequence_length: int) -> Mapping[str, tuple[int, ...]]:
        """Their shapes in the largest micro-batch, by name."""
        ...


@runtime_checkable
class Outlined(StageFactory, Protocol):
    """A factory that tells what a stage is made of without allocating it."""

    def outline(self, stage: int) -> torch.nn.Module:
        """The module of `stage` with its parameters on the meta device and its buffers, with values, on the CPU."""
        ...


@runtime_checkable
class StreamingFactory(Outlined, Protocol):
    """A factory whose initial values lie in files: they are read straight to where they are used.

    A peer without the files has the same modules, and takes the values from its stage's other peers.
    """

    #: Whether this machine has the files.
    has_values: bool

    def load(self, stage: int, into: Mapping[str, torch.Tensor]) -> None:
        """Write the initial values of `stage` into tensors by parameter name, of any floating dtype and device.

        Raises:
            ConfigError: one line: a file is missing or damaged, or the values are not those of the run.
        """
        ...


def is_too_large(
    name: str,
    shape: Sequence[int],
    declared: Mapping[str, tuple[int, ...]],
    *,
    is_floating: bool,
    num_samples: int,
    sequence_length: int,
) -> bool:
    """Whether no micro-batch has an input or label of this shape.

    Args:
        name, shape, is_floating: of the tensor.
        declared: by `Declaring`; of other tensors the first dimension is the samples, and the second one the positions of a
            sequence, unless it is that of a sample's features (floating tensors of two dimensions).
        num_samples, sequence_length: of the largest micro-batch.
    """
    largest = declared.get(name)
    if largest is not None:
        return len(shape) != len(largest) or any(size > most for size, most in zip(shape, largest, strict=True))
    has_sequence = len(shape) >= (3 if is_floating else 2)
    return (len(shape) > 0 and shape[0] > num_samples) or (has_sequence and shape[1] > sequence_length)


def tick_with(module: torch.nn.Module, tick: Callable[[], None]) -> None:
    """Have `tick` called after each forward of `module`, and before each of its backwards."""

    def passed(_: torch.nn.Module, args: object, output: object) -> None:
        tick()
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else (output,)
        made = next((t for t in values if isinstance(t, torch.Tensor) and t.grad_fn is not None), None)
        if made is not None:  # a hook of the tensor's, not of the module's, which would not let it be changed in place
            made.register_hook(lambda _: tick())

    module.register_forward_hook(passed)


def replace_parameters(module: torch.nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Put another tensor in the place of each parameter for which `make(name, parameter)` gives one; ties stay tied."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        value = make(name, parameter)
        made[parameter] = parameter if value is None else torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, made[parameter])


class ParameterSlots:
    """The places where a module looks its parameters up by name: other tensors stand there for one call at a time.

    That is what `torch.func.functional_call` does, without walking the module at each call: that took a fifth of a small stage's
    forward, under Python's lock.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        #: (the table of one submodule, its key there, the parameter's name); a tied parameter has several.
        self._all: list[tuple[dict[str, Any], str, str]] = [
            (child._parameters, key, names[id(parameter)])
            for child in module.modules()
            for key, parameter in child._parameters.items()
            if parameter is not None
        ]

    @contextmanager
    def holding(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Put the values in their parameters' places until the block ends."""
        before = [(table, key, table[key], values[name]) for table, key, name in self._all if name in values]
        try:
            for table, key, _, value in before:
                table[key] = value
            yield
        finally:
            for table, key, parameter, _ in before:
                table[key] = parameter


def saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint holds."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def ties_of(factory: StageFactory, frozen: Sequence[str] = ()) -> tuple[Tie, ...]:
    """The ties that `factory` declares in its optional attribute `ties`, without parameters that are not trained.

    Args:
        factory: of the run's model.
        frozen: patterns of the names of parameters that keep their initial values.

    Raises:
        ConfigError: if one copy of a parameter is frozen and another is not.
    """
    trained = []
    for tie in getattr(factory, "ties", ()):
        kept = [name for _, name in tie.places if any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen)]
        if kept and len(kept) < len(tie.places):
            other = next(name for _, name in tie.places if name not in kept)
            raise ConfigError(f"frozen: {kept[0]} and {other} are one parameter in two stages; freeze both or neither")
        if not kept:
            trained.append(tie)
    return tuple(trained)
