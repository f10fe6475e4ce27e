"""What whoever begins a run is told of the way it averages: the defaults that were taken, and what will cost loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.base.choices import COCKTAIL, DILOCO, compressor_facts
from swarm.base.config import RunConfig

#: With an outer momentum, fewer inner steps than this are warned of.
LEAST_INNER_STEPS = 5


def taken_defaults(config: RunConfig) -> str:
    """The options of a local run that its user left to the method, in one line; "" if there are none."""
    if config.mode != "local":
        return ""
    said = [
        f"{option} {getattr(config, option):g}"
        for option in DILOCO
        if option not in config.model_fields_set and (option != "inner_steps" or config.inner_steps)
    ]
    method = "CocktailSGD" if compressor_facts(config.average_compression).local is COCKTAIL else "DiLoCo"
    return f"mode local, as {method} was published: {', '.join(said)}" if said else ""


def warnings(config: RunConfig) -> list[str]:
    """A line for each choice that is known to cost loss."""
    return [line for line in (_lossy(config), _few_inner_steps(config)) if line]


def _lossy(config: RunConfig) -> str:
    facts = compressor_facts(config.average_compression)
    if not facts.loses or facts.keeps_back:
        return ""
    return (
        f"average_compression {config.average_compression!r} loses {facts.loses} % of a gradient's norm for good; int8 and 8bit "
        "send as much and lose 3 and 1 %"
    )


def _few_inner_steps(config: RunConfig) -> str:
    if config.mode != "local" or not config.outer_momentum:
        return ""
    most = config.inner_steps or config.target_batch_size / config.inner_batch_size / config.min_peers_per_stage
    if most >= LEAST_INNER_STEPS:
        return ""
    return (
        f"{'' if config.inner_steps else 'at most '}{most:.3g} inner steps are too few for outer_momentum "
        f"{config.outer_momentum:g}: with 1 the loss of llama-tiny was 3.20 after 40 steps, and 2.75 in mode sync. Take "
        "inner_steps of 20 or more, or outer_learning_rate 1 and outer_momentum 0"
    )


def follow_compressor(saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a saved run without the defaults that were those of another mode or compressor than `overrides` ask for."""
    fields = dict(saved)
    if all(key not in overrides or overrides[key] == fields[key] for key in ("mode", "average_compression")):
        return fields
    defaults = compressor_facts(fields["average_compression"]).local if fields["mode"] == "local" else DILOCO
    for option, value in defaults.items():
        if fields.get(option) == value:
            del fields[option]
    return fields
