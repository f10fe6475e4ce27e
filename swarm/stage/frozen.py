"""The parameters of a model that are not trained. Owns which those are: their names fit a pattern of `RunConfig.frozen`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch

from swarm.base.errors import ConfigError
from swarm.stage.module import Outlined, StageFactory


def is_frozen(name: str, frozen: Sequence[str]) -> bool:
    """Whether one of the patterns fits the name of a parameter."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen)


def stage_module(factory: StageFactory, stage: int, frozen: Sequence[str]) -> torch.nn.Module:
    """Build the module of `stage`, without memory where the factory can tell; what is not trained needs no gradient.

    Args:
        factory: of the run's model.
        stage: of its stages.
        frozen: patterns of the names of parameters that are not trained.
    """
    module = factory.outline(stage) if isinstance(factory, Outlined) else factory.build(stage)
    freeze(module, frozen)
    return module


def freeze(module: torch.nn.Module, frozen: Sequence[str]) -> None:
    """Have parameters whose names fit one of the patterns need no gradient."""
    for name, parameter in module.named_parameters():
        if is_frozen(name, frozen):
            parameter.requires_grad_(False)


def require_parameters(factory: StageFactory, frozen: Sequence[str]) -> None:
    """Check that each pattern fits a parameter of some stage, and that something is left to train.

    Raises:
        ConfigError: one line; it names some parameters.
    """
    stages = (stage_module(factory, stage, ()) for stage in range(factory.num_stages))  # one after another: some take memory
    names = [name for module in stages for name, _ in module.named_parameters()]
    for pattern in frozen:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
            raise ConfigError(f"frozen: {pattern!r} fits no parameter of the model; there are {some}, ...")
    if frozen and all(is_frozen(name, frozen) for name in names):
        raise ConfigError(f"frozen: {', '.join(frozen)} fit every parameter of the model: nothing is left to train")
