"""The compressor that a run's configuration asks for."""

from __future__ import annotations

from swarm.averaging.compressors.fragments import Fragments
from swarm.averaging.compressors.interface import Compressor
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.compressors.powersgd import PowerSgd
from swarm.averaging.reduction import Code
from swarm.base.config import RunConfig
from swarm.stage.layout import Layout
from swarm.wire.compression import AVERAGE_CODECS


def compressor_of(config: RunConfig, layout: Layout) -> Compressor:
    """A new one; `RunConfig` has refused what does not go together."""
    if config.average_compression == "powersgd":
        return PowerSgd(layout, rank=config.powersgd_rank, seed=config.seed)
    if config.average_compression == "cocktail":
        return Fragments(layout.num_elements, config.fragments, Code("sparse4", config.cocktail_top))
    code = Code(AVERAGE_CODECS[config.average_compression])
    if config.fragments > 1:
        return Fragments(layout.num_elements, config.fragments, code)
    return Plain(layout.num_elements, code, clip_radius=config.clip_radius if config.aggregation == "centered_clip" else None)
