"""The optimizers, by the names that a run's configuration has for them. Owns the registry, and which of them a run uses:
one that a stage's peers share, and in a local run one of each peer's own.
"""

from __future__ import annotations

import torch

from swarm.base.config import RunConfig
from swarm.base.dotted import imported
from swarm.base.errors import ConfigError
from swarm.stage.layout import Layout
from swarm.stage.moments import Moments
from swarm.stage.optimizers.adamw import AdamW, AdamW8bit
from swarm.stage.optimizers.interface import Optimizer
from swarm.stage.optimizers.lamb import Lamb
from swarm.stage.optimizers.nesterov import Nesterov

#: `RunConfig.optimizer` -> what updates with gradients.
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adamw8bit": AdamW8bit, "lamb": Lamb}


def gradient_optimizer(config: RunConfig) -> type[Optimizer]:
    """The class that `config.optimizer` names.

    Raises:
        ConfigError: the name is the owner's own, and is no optimizer or was not imported.
    """
    known = OPTIMIZERS.get(config.optimizer)
    if known is not None:
        return known
    found = imported(config.optimizer, "optimizer")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"optimizer {config.optimizer}: must be a class derived from {Optimizer.__module__}.Optimizer")
    return found


def shared_optimizer(config: RunConfig) -> type[Optimizer]:
    """The class whose state all peers of a stage share: in a local run that of the outer update."""
    return Nesterov if config.mode == "local" else gradient_optimizer(config)


def optimizer_of(config: RunConfig, layout: Layout, *, dtype: torch.dtype, device: str, offload: bool = False) -> Optimizer:
    """The optimizer that a stage's peers share.

    Args:
        config: names it.
        layout: of the stage's trained parameters.
        dtype: of the masters.
        device: of the masters.
        offload: its state stays in main memory.
    """
    made = shared_optimizer(config)
    home = "cpu" if offload else None
    moments = Moments(layout, kept=made.kept, dtype=dtype, device=device, in_8_bits=made.in_8_bits, home=home)
    return made(config, moments)


def inner_optimizer_of(config: RunConfig, shared: Optimizer) -> Optimizer:
    """A peer's own optimizer in a local run; its state lies where that of `shared` does."""
    made = gradient_optimizer(config)
    return made(config, shared.moments.alike(kept=made.kept, in_8_bits=made.in_8_bits))
