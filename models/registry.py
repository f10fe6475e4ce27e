"""`RunConfig.model` -> `StageFactory`. Owns the names; imports torch and transformers only when a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.presets import PRESETS
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.dotted import import_factory, is_dotted

if TYPE_CHECKING:
    from swarm.stage.module import StageFactory


def factory_of(config: RunConfig, *, may_import: bool = True) -> StageFactory:
    """The factory of the run's model: a preset's, or what `package.module:factory` returns when called with `config`.

    Args:
        may_import: False refuses dotted paths. For a configuration that came from the network, pass what the operator
            of this machine agreed to: importing runs code.

    Raises:
        ConfigError: one line: an unknown name, a failed import, a factory of the wrong kind, or unfit options.
    """
    if config.model in PRESETS:
        return PRESETS[config.model](config)
    if not is_dotted(config.model):
        raise ConfigError(f"model {config.model!r} is none of {', '.join(PRESETS)}, and no package.module:factory")
    if not may_import:
        raise ConfigError(f"model {config.model}: this peer may not import it; --allow-import allows it if you trust the code")
    factory = import_factory(config.model, "model")(config)
    if not callable(getattr(factory, "build", None)) or getattr(factory, "num_stages", None) != config.num_stages:
        raise ConfigError(
            f"model {config.model}: must return a StageFactory of {config.num_stages} stages "
            f"(`num_stages` and `build(stage)`), got {type(factory).__name__}"
        )
    return factory
