"""What the parts of a Hugging Face causal LM are: embedding, layers, tail. Owns the families' peculiarities; must not
know stages, tensors or the swarm.

transformers describes most models for pipelining (`base_model_pp_plan`): the children that come before the layers, the
layers, and the children after. The tables below hold what such a plan does not say, and whole descriptions of families
that have none. `tests/unit/models/parity.py` proves each entry; `ARCHITECTURES.md` lists what it found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from swarm.base.errors import ConfigError


@dataclass(frozen=True)
class Anatomy:
    """Names below `base`: attribute path, in the causal LM, of the module that owns the layers."""

    base: str
    layers: str
    #: Children that work before the first layer, and after the last one.
    first: tuple[str, ...]
    last: tuple[str, ...]
    #: What a layer returns after its hidden states, None where nobody reads it; no tuple: it returns a bare tensor.
    returns: tuple[str | None, ...] | None = None
    #: The keyword argument that is a dictionary of keys and values which later layers use again.
    shared: str | None = None
    #: The dimension of parallel residual streams in the hidden states between layers.
    streams: int | None = None


#: Families without a plan.
_WITHOUT_PLAN = {
    "bloom": Anatomy("transformer", "h", ("word_embeddings", "word_embeddings_layernorm"), ("ln_f",), (None,)),
    "falcon": Anatomy("transformer", "h", ("word_embeddings",), ("ln_f",), (None,)),
    "gpt2": Anatomy("transformer", "h", ("wte", "wpe", "drop"), ("ln_f",)),
    "gpt_bigcode": Anatomy("transformer", "h", ("wte", "wpe", "drop"), ("ln_f",)),
    "opt": Anatomy(
        "model.decoder", "layers", ("embed_tokens", "embed_positions", "project_in"), ("final_layer_norm", "project_out")
    ),
    "stablelm": Anatomy("model", "layers", ("embed_tokens",), ("norm",)),
}
_PER_LAYER = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
#: What a plan leaves out; names are added to those of the plan.
_BESIDE_PLAN: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"last": ("hc_head",), "streams": 2},
    "gemma3n_text": {
        "first": (*_PER_LAYER, "altup_projections"),
        "last": ("altup_unembed_projections",),
        "shared": "shared_kv_states",
        "streams": 0,
    },
    "gemma4_text": {"first": _PER_LAYER, "shared": "shared_kv_states"},
    "gemma4_unified_text": {"shared": "shared_kv_states"},
    "glm_moe_dsa": {"returns": ("topk_indices",)},
    "hy_v4": {"last": ("hc_head",), "returns": ("topk_indices",), "streams": 2},
    "phi4_multimodal": {"first": ("embed_tokens_extend",)},
}
#: Why a family with a plan is not cut.
_NOT_CUT = {"hrm_text": "its layers run several times over, in cycles"}


def check_family(model_type: str, config_class: type[PreTrainedConfig]) -> None:
    """Whether models of this type can be cut, as far as their configuration's class tells.

    Raises:
        ConfigError: one line naming the type and the reason.
    """
    reason = _NOT_CUT.get(model_type)
    if reason is None and not config_class.base_model_pp_plan and model_type not in _WITHOUT_PLAN:
        reason = "transformers gives no pipeline plan for it, and there is no adapter"
    if reason is not None:
        raise ConfigError(f"model_options.model_type {model_type!r} cannot be cut into stages: {reason}")


def anatomy_of(lm: PreTrainedModel) -> Anatomy:
    """The parts of `lm`, which may be without memory.

    Raises:
        ConfigError: if something in it, named, has no place in a cut.
    """
    model_type = lm.config.model_type
    anatomy = _WITHOUT_PLAN.get(model_type) or _from_plan(lm, model_type)
    base = lm.get_submodule(anatomy.base)
    placed = {anatomy.layers, *anatomy.first, *anatomy.last}
    homeless = [name for name, _ in base.named_parameters(recurse=False)]
    homeless += [n for n, child in base.named_children() if n not in placed and any(True for _ in child.parameters())]
    if homeless:
        raise ConfigError(
            f"model_options.model_type {model_type!r} cannot be cut into stages: "
            f"{anatomy.base}.{homeless[0]} belongs to no layer, and the family's pipeline plan does not name it"
        )
    present = dict(base.named_children())
    return replace(
        anatomy,
        first=tuple(name for name in anatomy.first if present.get(name) is not None),
        last=tuple(name for name in anatomy.last if present.get(name) is not None),
    )


def _from_plan(lm: PreTrainedModel, model_type: str) -> Anatomy:
    base: Any = getattr(lm, lm.base_model_prefix)
    plan = list(lm.config.base_model_pp_plan or ())
    lists = [name for name in plan if isinstance(getattr(base, name, None), torch.nn.ModuleList)]
    if len(lists) != 1:
        raise ConfigError(f"model_options.model_type {model_type!r} cannot be cut into stages: its plan names no layer list")
    at = plan.index(lists[0])
    beside = dict(_BESIDE_PLAN.get(model_type, {}))
    return Anatomy(
        lm.base_model_prefix,
        lists[0],
        first=(*plan[:at], *beside.pop("first", ())),
        last=(*beside.pop("last", ()), *plan[at + 1 :]),
        **beside,
    )
