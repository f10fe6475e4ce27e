"""The compressors, by the names that a run's configuration has for them. Owns the registry."""

from __future__ import annotations

from collections.abc import Callable

from swarm.averaging.compressors.buffers_apart import BuffersApart
from swarm.averaging.compressors.fragments import Fragments
from swarm.averaging.compressors.interface import Compressor
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.compressors.powersgd import PowerSgd
from swarm.averaging.reduction import Code
from swarm.base.config import RunConfig
from swarm.base.dotted import imported
from swarm.base.errors import ConfigError
from swarm.stage.layout import Layout
from swarm.wire.compression import AVERAGE_CODECS

#: Makes a compressor for the vectors of a stage with this layout.
MakeCompressor = Callable[[RunConfig, Layout], Compressor]


def _in_code(code: Code) -> MakeCompressor:
    def make(config: RunConfig, layout: Layout) -> Compressor:
        if config.fragments > 1:
            return Fragments(layout.num_elements, config.fragments, code)
        return Plain(layout.num_elements, code, clip_radius=config.clip_radius if config.aggregation == "centered_clip" else None)

    return make


def _powersgd(config: RunConfig, layout: Layout) -> Compressor:
    return PowerSgd(layout, rank=config.powersgd_rank, seed=config.seed, in_copy=config.mode == "local")


def _cocktail(config: RunConfig, layout: Layout) -> Compressor:
    return Fragments(layout.num_elements, config.fragments, Code("sparse4", config.cocktail_top))


#: `RunConfig.average_compression` -> what makes it.
COMPRESSORS: dict[str, MakeCompressor] = {
    **{name: _in_code(Code(codec)) for name, codec in AVERAGE_CODECS.items()},
    "powersgd": _powersgd,
    "cocktail": _cocktail,
}


def compressor_of(config: RunConfig, layout: Layout) -> Compressor:
    """A new compressor; `RunConfig` has refused what does not go together.

    Raises:
        ConfigError: the name is the owner's own, and was not imported; or auxiliaries cannot sum what it makes.
    """
    make = COMPRESSORS.get(config.average_compression) or imported(config.average_compression, "average_compression")
    is_whole = config.average_compression == "none" and config.aggregation == "mean" and config.fragments == 1
    if is_whole or not layout.buffer_dtypes:
        return make(config, layout)
    if config.auxiliaries:
        raise ConfigError(
            f"auxiliaries sum whole averages in one exchange, and buffers that change in forward ({min(layout.buffers)}, ...) "
            "travel apart from compressed ones: leave auxiliaries at 0, or average_compression at 'none'"
        )
    return BuffersApart(make(config, layout.trained), layout)
