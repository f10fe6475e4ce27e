"""Small configurations of every causal LM family, with each multiplier, cap and window off its default.

`shrunken(model_type)` gives the options; `still_at_default` finds what a new release of transformers may add.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS = 6
VOCAB = 64
#: Families that have no plan in transformers and an adapter here.
ADAPTERS = ("gpt2", "opt", "bloom", "falcon", "stablelm", "gpt_bigcode")

#: Fields of sizes and switches, for every family that has them.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "n_embd": 32,
    "n_layer": NUM_LAYERS,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rotary_dim": 4,
    "num_mtp_layers": 0,
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "use_qkv_bias": True,
    "attention_out_bias": True,
    "output_router_logits": True,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "residual_dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
}
#: Multipliers, caps and windows.
_OFF_DEFAULT: dict[str, Any] = {
    "sliding_window": 5,
    "sliding_window_size": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "keep_window_size": 5,
    "sliding_window_pattern": 3,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "moe_router_logit_softcapping": 2.0,
    "embedding_multiplier": 5.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "query_pre_attn_scalar": 20,
    "logit_scale": 0.3,
    "routed_scaling_factor": 1.7,
    "route_scale": 1.7,
    "router_scaling_factor": 1.7,
    "moe_routed_scaling_factor": 1.7,
    "mup_enabled": True,
    "scale_emb": 3,
    "scale_depth": 1.7,
    "dim_model_base": 16,
    "attention_value_scale": 0.6,
    "logits_mup_width_multiplier": 3.0,
    "log_scaling_alpha": 0.3,
    "clip_qkv": 0.5,
    "router_aux_loss_coef": 0.7,
    "swiglu_limit": 1.0,
    "swiglu_alpha": 1.3,
    "full_attn_alpha_factor": 0.7,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 0.9,
    "linear_attn_beta_factor": 1.1,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 1.3,
    "altup_coef_clip": 0.5,
    "altup_correct_scale": False,
    "hc_magnitude": 1.5,
    "scale_attn_by_inverse_layer_idx": True,
    "kda_lower_bound": -3.0,
    "scale_attn_weights": False,
    "scale_attention_softmax_in_fp32": False,
    "prefix_dense_sliding_window_pattern": 2,
    "log_scaling_n_floor": 4,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
#: What a family needs besides.
_FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 3},
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": None},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "full", "shared", "shared"]},
    "cwm": {"bos_token_id": 1, "eos_token_id": 1},
    "hy_v4": {"indexer_types": ["full", "full", "shared", "full", "shared", "shared"]},
    "laguna": {"layer_types": _ALTERNATING},
    "longcat_flash": {
        "num_layers": 3,
        "head_dim": 4,
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 12,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mellum": {"layer_types": _ALTERNATING},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 3,
        "index_block_size": 2,
        "index_topk_blocks": 2,
        "mlp_layer_types": ["dense", "sparse"] * 3,
    },
    "doge": {"is_moe": True, "output_router_logits": False},
    "falcon": {"alibi": True},
    "gpt_neox": {"use_parallel_residual": False},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 3,
        "layer_types": _ALTERNATING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_kv_shared_layers": 3,
        "layer_types": _ALTERNATING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gemma4_unified_text": {"num_kv_shared_layers": 3, "layer_types": _ALTERNATING},
}
#: Fields that look like a multiplier, a cap or a window.
_LOOKS = re.compile(r"multiplier|scal|softcap|window|capping|limit|alpha|beta|factor|clip|magnitude")
#: Those that are none, or must stay.
_NO_MULTIPLIER = {
    "mtp_loss_scaling_factor": "of heads that transformers does not have",
    "partial_rotary_factor": "stands in the rotary embedding's parameters",
    "rope_scaling": "the rotary embedding's parameters by their old name",
}


def families_with_a_plan() -> list[str]:
    """Every causal LM type of this transformers that can be cut as it declares."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if CONFIG_MAPPING[name].base_model_pp_plan]


def shrunken(model_type: str) -> dict[str, Any]:
    """`model_options` of a model of some ten thousand parameters."""
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    general = {name: value for name, value in {**_SIZES, **_OFF_DEFAULT}.items() if name in fields}
    if "qk_rope_head_dim" in fields:  # multi-head latent attention
        general = {**general, "num_key_value_heads": 4} if "num_key_value_heads" in fields else general
        general.pop("head_dim", None)
    return {"model_type": model_type, **general, **_FAMILIES.get(model_type, {})}


def still_at_default(config: PreTrainedConfig) -> list[str]:
    """Multipliers, caps and windows of `config` that have the value that the family gives them."""
    found = []
    for field in dataclasses.fields(config):
        number = isinstance(field.default, int | float) or field.default is None
        if number and _LOOKS.search(field.name) and field.name not in _NO_MULTIPLIER:
            value = getattr(config, field.name)
            if value == field.default or (field.default is None and value is None):
                found.append(field.name)
    return found
