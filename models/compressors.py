"""Learnt compression of what crosses a boundary, for training from scratch (SWARM, arXiv 2301.11913, appendix on
compression). Owns the two halves and where they stand; must not know how a stage runs.

After some layers the hidden states are narrowed to D / k features and widened again: the narrow ones travel.

* `bottleneck`: LayerNorm, Linear(D -> D / k), LayerNorm, [the wire], Linear(D / k -> D).
* `maxout`: LayerNorm, maximum over k neighbours, LayerNorm, [the wire], Linear(D / k -> D).

Where they stand is part of the model, not of the cut: one that no boundary falls on works inside a stage. By default they
stand at the boundaries of the run's stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from swarm.base.errors import ConfigError

KINDS = ("bottleneck", "maxout")
#: Of `model_options`.
OPTIONS = ("compressor", "compressor_factor", "compressor_after")


@dataclass(frozen=True)
class Compression:
    """`kind` with factor k = `factor` after each layer of `after`."""

    kind: str
    factor: int
    hidden_size: int
    after: frozenset[int]

    @property
    def width(self) -> int:
        """Elements of a compressed hidden state."""
        return self.hidden_size // self.factor

    def down(self) -> torch.nn.Module:
        """A new module that narrows hidden states."""
        return _Down(self)

    def up(self) -> torch.nn.Module:
        """A new module that widens them again."""
        return _Up(self)


def compression_of(
    options: Mapping[str, Any], config: PreTrainedConfig, *, spans: Sequence[range], can_narrow: bool
) -> Compression | None:
    """What `model_options` ask for: `compressor` (one of `KINDS`), `compressor_factor` (k, 4 if not given) and
    `compressor_after` (numbers of layers; the last of each stage but the last if not given).

    Args:
        options: of the run.
        config: of the model.
        spans: of the stages.
        can_narrow: whether the family's layers hand on hidden states [B, T, D].

    Raises:
        ConfigError: one line naming the option and what is wrong with it.
    """
    kind = options.get("compressor")
    if kind is None:
        unused = [name for name in OPTIONS if name in options]
        if unused:
            raise ConfigError(f"model_options.{unused[0]}: it needs model_options.compressor, one of {', '.join(KINDS)}")
        return None
    if kind not in KINDS:
        raise ConfigError(f"model_options.compressor {kind!r} is none of {', '.join(KINDS)}")
    if not can_narrow:
        raise ConfigError(f"model_options.compressor: layers of {config.model_type} hand on more than one hidden state")
    factor = options.get("compressor_factor", 4)
    hidden_size, num_layers = int(config.hidden_size), spans[-1].stop
    if not isinstance(factor, int) or factor < 2 or hidden_size % factor:
        raise ConfigError(f"model_options.compressor_factor {factor!r} is no divisor above 1 of hidden_size {hidden_size}")
    after = options.get("compressor_after", [span.stop - 1 for span in spans[:-1]])
    inner = range(num_layers - 1)
    if not isinstance(after, list) or any(not isinstance(number, int) or number not in inner for number in after):
        raise ConfigError(f"model_options.compressor_after {after!r} is no list of layers from 0 to {num_layers - 2}")
    return Compression(kind, factor, hidden_size, frozenset(after))


class _Down(torch.nn.Module):
    """[B, T, D] -> [B, T, D / k]."""

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self.factor = compression.factor
        self.norm = torch.nn.LayerNorm(compression.hidden_size)
        self.linear: torch.nn.Linear | None = None
        if compression.kind == "bottleneck":
            self.linear = torch.nn.Linear(compression.hidden_size, compression.width, bias=False)
        self.out_norm = torch.nn.LayerNorm(compression.width)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden_BTD)
        if self.linear is None:
            narrow = normed.unflatten(-1, (-1, self.factor)).amax(-1)
        else:
            narrow = self.linear(normed)
        return self.out_norm(narrow)


class _Up(torch.nn.Module):
    """[B, T, D / k] -> [B, T, D]."""

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(compression.width, compression.hidden_size, bias=False)

    def forward(self, narrow: torch.Tensor) -> torch.Tensor:
        return self.linear(narrow)


def initial(module: torch.nn.Module) -> None:
    """Initial values: norms that scale nothing, linear layers that keep the variance."""
    if isinstance(module, torch.nn.LayerNorm):
        torch.nn.init.ones_(module.weight)
        torch.nn.init.zeros_(module.bias)
    elif isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
