"""Buffers that a stage's forward changes, such as BatchNorm's running statistics: part of the stage's state, like its parameters.

Owns which buffers those are, and their rule. A ticket's forward starts from the version's buffers, and what it makes of them
counts with the ticket's gradients: their distance times the ticket's tokens. So a commit takes the token-weighted mean over the
step's tickets. Must not know who computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from swarm.base.errors import ConfigError
from swarm.stage.flat import empty_flat
from swarm.stage.layout import Layout
from swarm.stage.module import Outlined, StageFactory, Tensors, saved_buffers
from swarm.stage.moments import OptimizerState
from swarm.stage.optimizers.interface import Optimizer
from swarm.stage.versions import Version
from swarm.wire.messages import CommitRecord

#: Samples and positions of the example that shows what changes.
_SAMPLES, _POSITIONS = 2, 8


@runtime_checkable
class Exemplary(Protocol):
    """A stage module that tells what it is called with."""

    def example(self, num_samples: int, sequence_length: int) -> tuple[Tensors, Tensors | None]:
        """`inputs` and `labels` of the shapes and dtypes that training uses, on the CPU."""
        ...


def stage_layout(factory: StageFactory, module: torch.nn.Module) -> Layout:
    """The layout of a stage's state: parameters that are trained, then buffers that change.

    Args:
        factory: of the run's model. One that outlines its stages has none that change.
        module: that it built, with what is not trained frozen.

    Raises:
        ConfigError: a buffer changes in a way that cannot be averaged.
    """
    return Layout.of(module) if isinstance(factory, Outlined) else Layout.of(module, changing(module))


def changing(module: torch.nn.Module) -> Tensors:
    """The buffers that a checkpoint holds and the forward changes, as far as an example tells; without one, all that it holds."""
    saved = saved_buffers(module)
    if saved and isinstance(module, Exemplary):
        saved = _changed_by_example(module, saved)
    for name, buffer in saved.items():
        if buffer.is_complex():
            raise ConfigError(f"buffer {name} is of {buffer.dtype}: only real numbers that change in forward can be averaged")
    return saved


def _changed_by_example(module: Any, saved: Tensors) -> Tensors:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    was_training = module.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            inputs, labels = module.example(_SAMPLES, _POSITIONS)
            inputs = {n: torch.randn(t.shape).to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
            module.train()
            with BufferSlots(module, tuple(saved)).holding(saved) as after:
                module(inputs, labels)
    except ConfigError:
        raise
    except Exception:  # its owner's code: an example of this size may be none
        return saved
    finally:
        module.train(was_training)
    return {name: buffer for name, buffer in saved.items() if not _is_same(buffer, after[name])}


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


class BufferSlots:
    """The places of a module's buffers: those of a version stand there for one call at a time.

    Args:
        module: has them.
        names: of those that are part of the state.
    """

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]) -> None:
        known = {id(buffer): name for name, buffer in module.named_buffers()}
        every = [
            (child._buffers, key, known[id(buffer)])
            for child in module.modules()
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]
        saved = saved_buffers(module).keys()
        self._all = [place for place in every if place[2] in names]
        #: Those that must not change, until the first training forward has shown that they do not.
        self._constant = [place for place in every if place[2] in saved and place[2] not in names]

    @contextmanager
    def holding(self, values: Tensors, *, train: bool = True) -> Iterator[Tensors]:
        """Put copies of the values in their buffers' places until the block ends.

        Yields:
            What is there at the end of the block, by name; empty until then.

        Raises:
            ConfigError: one line: a buffer changed in a way that cannot be averaged.
        """
        after: Tensors = {}
        if not self._all and not (train and self._constant):
            yield after
            return
        before = [(table, key, table[key]) for table, key, _ in self._all]
        copies = {name: value.clone() for name, value in values.items()}
        constant, self._constant = (self._constant, []) if train else ([], self._constant)
        kept = [(name, table, key, table[key], _copy_of(table[key])) for table, key, name in constant]
        try:
            for table, key, name in self._all:
                table[key] = copies[name]
            yield after
            for table, key, name in self._all:
                after[name] = _fitting(name, values[name], table[key])
            for name, table, key, buffer, copy in kept:
                if buffer is None or table[key] is not buffer or not _is_same(buffer, copy):
                    raise ConfigError(
                        f"the forward changes buffer {name}, which counts as constant, since the stage's example did not show it "
                        "or its factory outlines its stages: peers of the stage would differ"
                    )
        finally:
            for table, key, buffer in before:
                table[key] = buffer


def _copy_of(buffer: Any) -> Any:
    return buffer.detach().clone()


def _fitting(name: str, before: torch.Tensor, after: Any) -> torch.Tensor:
    is_alike = isinstance(after, torch.Tensor) and after.is_floating_point() == before.is_floating_point()
    if not is_alike or after.shape != before.shape or not (after.dtype == before.dtype or before.is_floating_point()):
        found = f"{tuple(after.shape)} of {after.dtype}" if isinstance(after, torch.Tensor) else repr(after)
        raise ConfigError(
            f"the forward changes buffer {name} from {tuple(before.shape)} of {before.dtype} to {found}: what is averaged "
            "between peers keeps its shape and kind of numbers; register it with persistent=False if it is no state"
        )
    return after.detach()


def distances(before: Tensors, after: Tensors, weight: float | torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """What one ticket adds for each buffer: its distance from before to after, backwards as a gradient's, times `weight`."""
    return [(value.to(dtype) - after[name].to(dtype)) * weight for name, value in before.items()]


def applied(
    optimizer: Optimizer, newest: Version, used: Version, total: torch.Tensor, state: OptimizerState, record: CommitRecord
) -> tuple[torch.Tensor, OptimizerState]:
    """Masters and the optimizer's state after `record`, which is not skipped.

    Whole numbers are rounded: all tickets of a step count from the same number, so a counter rises once in a step.

    Args:
        optimizer: updates the parameters.
        newest: the version that the record builds on.
        used: the version that the step's tickets computed with: the buffers' mean is one of what became of its buffers.
        total: the step's sum.
        state: of the optimizer.
        record: of the commit.
    """
    layout = optimizer.moments.layout
    parameters, new_state = optimizer.update(
        newest.masters[: layout.num_trained],
        total[: layout.num_trained],
        state,
        step=record.step,
        learning_rate=record.learning_rate,
        factor=record.clip_coefficient / record.tokens,
    )
    if not layout.buffer_dtypes:
        return parameters, new_state
    masters = empty_flat(layout.num_elements, dtype=parameters.dtype, device=parameters.device)
    masters[: layout.num_trained] = parameters
    moved = layout.named(total * (1.0 / record.tokens))
    of_newest, of_used, made = (layout.named(flat) for flat in (newest.masters, used.masters, masters))
    for name, dtype in layout.buffers.items():
        if dtype.is_floating_point:
            torch.sub(of_used[name], moved[name], out=made[name])
        else:
            torch.sub(of_newest[name], moved[name], out=made[name]).round_()
    return masters, new_state
