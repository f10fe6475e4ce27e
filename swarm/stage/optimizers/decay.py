"""Which parameters weight decay is for. Owns the rule: `norms` and `biases` are what transformers' Trainer leaves out, and the
other words of `RunConfig.no_decay` are patterns of parameters' names.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from swarm.base.errors import ConfigError
from swarm.stage.module import StageFactory, ties_of

if TYPE_CHECKING:
    from swarm.stage.layout import Layout

NORMS, BIASES = "norms", "biases"
#: Torch's normalisation layers; batch, group and instance norms count as layer norms do.
_NORM_LAYERS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase)
#: What others call theirs.
_NORM_NAME = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def norm_parameters(module: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters of normalisation layers, by the layer's type or its name."""
    inside = tuple(f"{name}." for name, child in module.named_modules() if name and isinstance(child, _NORM_LAYERS))
    names = [name for name, _ in module.named_parameters()]
    return frozenset(name for name in names if name.startswith(inside) or _NORM_NAME.search(name.lower()))


def has_decay(name: str, norms: frozenset[str], no_decay: Sequence[str]) -> bool:
    """Whether a parameter decays.

    Args:
        name: of the parameter.
        norms: those of its module that `norm_parameters` found.
        no_decay: of the run.
    """
    for word in no_decay:
        if word == NORMS:
            is_left_out = name in norms
        elif word == BIASES:
            is_left_out = "bias" in name.lower()
        else:
            is_left_out = fnmatch.fnmatchcase(name, word)
        if is_left_out:
            return False
    return True


def undecayed(layout: Layout, no_decay: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Elements `start:end` of the flat parameters that do not decay, ascending; neighbours are one range."""
    found: list[tuple[int, int]] = []
    for name, start, end in zip(layout.names, layout.offsets, layout.offsets[1:], strict=False):
        if has_decay(name, layout.norms, no_decay) or start == end:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return tuple(found)


def require_fitting(factory: StageFactory, no_decay: Sequence[str], frozen: Sequence[str]) -> None:
    """Check that each pattern fits a parameter, and that copies of one parameter decay alike; without patterns nothing is built.

    Raises:
        ConfigError: one line.
    """
    from swarm.stage.frozen import stage_module

    patterns = [word for word in no_decay if word not in (NORMS, BIASES)]
    if not patterns:
        return
    names = [n for stage in range(factory.num_stages) for n, _ in stage_module(factory, stage, ()).named_parameters()]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
            raise ConfigError(f"no_decay: {pattern!r} is neither norms nor biases and fits no parameter; there are {some}, ...")
    for tie in ties_of(factory, frozen):
        decays = {name: has_decay(name, frozenset(), patterns) for _, name in tie.places}
        if len(set(decays.values())) > 1:
            raise ConfigError(f"no_decay: {' and '.join(decays)} are one parameter in two stages; name both or neither")
