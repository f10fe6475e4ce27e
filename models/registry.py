"""`RunConfig.model` -> `StageFactory`. Owns the names; imports torch and transformers only when a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.presets import PRESETS, PRETRAINED
from swarm.base.config import RunConfig
from swarm.base.dotted import import_factory, imported, is_dotted
from swarm.base.errors import ConfigError

if TYPE_CHECKING:
    from models.files.shards import Source
    from swarm.stage.module import StageFactory


def require_known(model: str) -> None:
    """Look at a run's model by its name alone; imports nothing.

    Raises:
        ConfigError: it is neither one of ours nor a dotted path.
    """
    if model != PRETRAINED and model not in PRESETS and not is_dotted(model):
        raise ConfigError(f"model {model!r} is none of {', '.join(PRESETS)}, and no package.module:factory, directory or hub id")


def factory_of(config: RunConfig, *, may_import: bool = True, source: Source | None = None) -> StageFactory:
    """The factory of the run's model: a preset's, or what `package.module:factory` returns when called with `config`.

    Where the run names parameters that are not trained, every stage is outlined to see that there are such. A local run's
    stages share no trained parameter.

    The run's own optimizer and compressor are imported too, for `imported` to find.

    Args:
        may_import: False refuses dotted paths. For a configuration that came from the network, pass what the operator
            of this machine agreed to: importing runs code.
        source: where this machine has the files of a model whose weights came from files.

    Raises:
        ConfigError: one line: an unknown name, a failed import, a factory of the wrong kind, or unfit options.
    """
    for field, name in config.imports.items():
        if not may_import:
            raise ConfigError(f"{field} {name}: this peer may not import it; --allow-import allows it if you trust the code")
        import_factory(name, field)
    factory = _made(config, source)
    if config.frozen:
        from swarm.stage.frozen import require_parameters

        require_parameters(factory, config.frozen)
    if config.no_decay:
        from swarm.stage.optimizers.decay import require_fitting

        require_fitting(factory, config.no_decay, config.frozen)
    if config.mode == "local":
        from swarm.stage.module import ties_of

        if ties_of(factory, config.frozen):
            raise ConfigError(
                "mode 'local' cannot keep parameters equal that several stages hold (tied weights): use mode 'sync', or a model "
                "without tied weights"
            )
    return factory


def _made(config: RunConfig, source: Source | None) -> StageFactory:
    if config.model == PRETRAINED:
        if config.lora is not None:
            from models.lora import LoraFactory

            return LoraFactory(config, source)
        from models.files.pretrained import PretrainedFactory

        return PretrainedFactory(config, source)
    if config.lora is not None:
        raise ConfigError(f"lora: adapters need a model with weights (--model DIR or a hub id), not {config.model}")
    if config.model in PRESETS:
        return PRESETS[config.model](config)
    require_known(config.model)
    make = imported(config.model, "model")
    try:
        factory = make(config)
    except ConfigError:
        raise
    except Exception as error:  # its owner's code
        raise ConfigError(f"model {config.model}: {type(error).__name__}: {error}") from error
    if not callable(getattr(factory, "build", None)) or getattr(factory, "num_stages", None) != config.num_stages:
        raise ConfigError(
            f"model {config.model}: must return a StageFactory of {config.num_stages} stages "
            f"(`num_stages` and `build(stage)`), got {type(factory).__name__}"
        )
    return factory
