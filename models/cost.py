"""What each part of a causal LM costs, computed from its shapes: parameters, FLOPs, bytes kept for a backward. Owns the
counting rules; must not know how parts become stages.

FLOPs count multiplications and additions of matrix products for one token's forward. An expert's weights count as often
as a token chooses an expert. Attention over T tokens looks back T / 2 on average, or over its window.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from models.anatomy import Anatomy
from swarm.base.config import RunConfig
from swarm.policy.spans import LayerLoad, Loads
from swarm.stage.compute import PRECISION_DTYPES
from swarm.stage.memory_plan import memory_for


@dataclass(frozen=True, slots=True)
class Cost:
    """What one part of a model costs."""

    num_trained: int = 0
    num_frozen: int = 0
    #: Per token, forward.
    flops: float = 0.0
    #: Elements per token that a backward needs: what goes into and comes out of matrix products.
    num_kept: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.num_trained + other.num_trained,
            self.num_frozen + other.num_frozen,
            self.flops + other.flops,
            self.num_kept + other.num_kept,
        )


@dataclass(frozen=True)
class ModelCost:
    """`first` is what the stage with the first layer has besides (embeddings), `last` that with the last one."""

    layers: tuple[Cost, ...]
    first: Cost
    last: Cost

    def of(self, span: range) -> Cost:
        """What the layers of `span` cost, with the embedding or the head where the span has it."""
        total = sum((self.layers[number] for number in span), Cost())
        total = total + self.first if span.start == 0 else total
        return total + self.last if span.stop == len(self.layers) else total

    def loads(self, run: RunConfig) -> Loads:
        """Work in FLOPs; bytes of parameters with all that is kept beside them, and of one micro-batch under way."""

        def load(cost: Cost) -> LayerLoad:
            return LayerLoad(cost.flops, state_of(cost, run) + kept_of(cost, run))

        return Loads(tuple(load(cost) for cost in self.layers), load(self.first), load(self.last))


def state_of(cost: Cost, run: RunConfig) -> int:
    """Bytes of parameters, optimizer and averages at the worst moment, of a peer that computes on its CPU and writes
    checkpoints; a GPU takes a little less."""
    frozen_bytes = cost.num_frozen * PRECISION_DTYPES[run.precision].itemsize
    return memory_for(
        cost.num_trained, cost.num_frozen, run, frozen_bytes=frozen_bytes, writes_checkpoints=True, on_cpu=True
    ).num_bytes


def kept_of(cost: Cost, run: RunConfig) -> int:
    """Bytes that one micro-batch keeps for its backward."""
    return int(cost.num_kept * run.micro_batch_size * run.sequence_length * PRECISION_DTYPES[run.precision].itemsize)


def cost_of(lm: PreTrainedModel, anatomy: Anatomy, *, sequence_length: int, frozen: Sequence[str] = ()) -> ModelCost:
    """From a model that may be without memory. A head that is tied to the embedding counts at both: each stage has a copy.

    Args:
        lm: the whole model.
        anatomy: of it.
        sequence_length: tokens of a sample.
        frozen: patterns of the names of parameters that are not trained.
    """
    base = lm.get_submodule(anatomy.base)
    layers: Any = getattr(base, anatomy.layers)

    def part(module: torch.nn.Module, prefix: str, chosen: float = 1.0) -> Cost:
        return _weights(module, prefix, frozen, chosen)

    of_layers = []
    for number, layer in enumerate(layers):
        config: Any = lm.config
        if getattr(config, "per_layer_attributes", None):  # its layers differ in more than their type
            config = config.per_layer_config[number]
        weights = part(layer, f"{anatomy.base}.{anatomy.layers}.{number}.", _chosen_part(config))
        of_layers.append(weights + _attention(config, lm.config, number, sequence_length))
    first = sum((part(getattr(base, name), f"{anatomy.base}.{name}.") for name in anatomy.first), Cost())
    last = sum((part(getattr(base, name), f"{anatomy.base}.{name}.") for name in anatomy.last), Cost())
    root = anatomy.base.split(".")[0]
    for name, child in lm.named_children():
        if name != root:
            last = last + part(child, f"{name}.")
    return ModelCost(tuple(of_layers), first, last)


def _weights(module: torch.nn.Module, prefix: str, frozen: Sequence[str], chosen: float) -> Cost:
    """Of matrix products: every parameter with two dimensions or more, but an embedding is only looked up."""
    total = Cost()
    tables = {id(child.weight) for child in module.modules() if isinstance(child, torch.nn.Embedding)}
    for name, parameter in module.named_parameters():
        number = parameter.numel()
        is_frozen = any(fnmatch.fnmatchcase(prefix + name, pattern) for pattern in frozen)
        multiplied, kept = 0.0, 0.0
        if parameter.ndim >= 2 and id(parameter) not in tables:
            part = chosen if ".experts." in f".{name}" else 1.0
            stacked = parameter.shape[0] if parameter.ndim == 3 and part < 1.0 else 1
            multiplied = 2.0 * number * part
            kept = (sum(parameter.shape[-2:])) * stacked * part
        total += Cost(0 if is_frozen else number, number if is_frozen else 0, multiplied, kept)
    return total


def _chosen_part(config: PreTrainedConfig) -> float:
    """The part of its layer's experts that a token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), None)
    per_token = next((n for name in ("num_experts_per_tok", "moe_topk", "moe_k") if (n := getattr(config, name, None))), None)
    return min(1.0, per_token / experts) if experts and per_token else 1.0


def _attention(config: PreTrainedConfig, of_model: PreTrainedConfig, number: int, sequence_length: int) -> Cost:
    """Scores and values of one layer, by its own configuration; types of layers are the model's."""
    types = getattr(of_model, "layer_types", None)
    kind = types[number] if types and number < len(types) else "full_attention"
    if "linear" in kind or "recurrent" in kind:
        return Cost()
    window = getattr(config, "sliding_window", None) if "sliding" in kind or not types else None
    context = min(sequence_length / 2, window or sequence_length)
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    return Cost(flops=4.0 * context * heads * size)
