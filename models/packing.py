"""Which models keep the examples apart that share a sample. Owns the list; imports no torch, and must not know the data.

Attention is kept apart by `masks.py`. Whether a family looks back in other ways too is not read off its code but measured:
`tests/unit/models/parity.py` compares, for every type, what packed examples give with what each gives alone, and fails
where that differs from this list. What is not on it does not share samples.

Experts do not make samples see each other here: in all of these families a token's route depends on that token alone. The
balancing loss adds up whole batches by its definition, whichever way they are packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models.presets import PRESET_OPTIONS
from swarm.base.config import RunConfig
from swarm.base.dotted import is_dotted

#: Types whose packed examples equal them alone.
SHOWN = frozenset(
    {
        "afmoe",
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "axk1",
        "beam",
        "bloom",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "falcon",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granite_swa",
        "helium",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "kolibri1",
        "laguna",
        "llama",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "sarvam_mla",
        "sarvam_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "vaultgemma",
        "youtu",
    }
)
#: Values of `layer_types` that these were shown with.
SHOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_STATE = "a state that goes on from one token to the next"
_PICKS = "a choice of tokens that reckons with all tokens of the sample"
#: Indexers obey the mask; but a ReLU makes many scores zero, and which of these are picked depends on what stands around.
_TIES = "a choice of tokens in which their places decide between equals"
#: What looks back otherwise, where that is known.
_LOOKS_BACK = {
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "kimi_linear",
            "lara_mini",
            "minimax",
            "olmo_hybrid",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
        ),
        _STATE,
    ),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), _TIES),
    **dict.fromkeys(("doge", "minimax_m3_vl_text"), _PICKS),
    "deepseek_v4": "keys that are compressed across samples",
    "inkling_text": "convolutions over tokens",
}


def why_apart(config: RunConfig) -> str:
    """Why examples must not share samples of this run, as part of a sentence; empty if they may."""
    if is_dotted(config.model):
        return f"nothing tells whether {config.model} keeps them apart"
    options = {**PRESET_OPTIONS.get(config.model, {}), **config.model_options}
    model_type = options.get("model_type")
    if model_type in _LOOKS_BACK:
        return f"{model_type} has {_LOOKS_BACK[model_type]}"
    if model_type not in SHOWN:
        return f"nobody has shown that {model_type} keeps them apart"
    kinds = options.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - SHOWN_LAYERS) if isinstance(kinds, list | tuple) else []
    if others:
        return f"nobody has shown that layers of type {others[0]} keep them apart"
    for rope in _rotary_embeddings(options):
        kind = rope.get("rope_type", rope.get("type"))
        limit = rope.get("original_max_position_embeddings", options.get("original_max_position_embeddings"))
        if kind in ("dynamic", "longrope", "su") and not (isinstance(limit, int) and config.sequence_length <= limit):
            return f"rotary embeddings of type {kind} look at the longest of all examples beyond {limit or 'their first'} tokens"
    return ""


def _rotary_embeddings(options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Their parameters, of all layers or by kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = options.get(name)
        if isinstance(found, Mapping):
            yield found
            yield from (value for value in found.values() if isinstance(value, Mapping))
