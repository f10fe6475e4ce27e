"""Named models. Owns their sizes; imports transformers only when one is built.

Any field of the Hugging Face configuration can be overridden through `RunConfig.model_options`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swarm.base.config import RunConfig

if TYPE_CHECKING:
    from models.causal_lm import CausalLMFactory

#: The model whose configuration and weights came from files; not for people to name: they name the files.
PRETRAINED = "pretrained"
#: Bytes as tokens; sized so that 60 steps with the defaults of `RunConfig` cost less than a minute of one CPU core.
LLAMA_TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: 26M parameters: large enough that compute, not Python, decides a benchmark.
LLAMA_SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "bos_token_id": None,
    "eos_token_id": None,
}


#: What the named models say of themselves; `causal-lm` takes everything from `model_options`: `model_type` (llama, qwen3,
#: ...) and fields of its configuration.
PRESET_OPTIONS: dict[str, dict[str, Any]] = {"llama-tiny": LLAMA_TINY, "llama-small": LLAMA_SMALL, "causal-lm": {}}


def _causal_lm(**defaults: Any) -> Callable[[RunConfig], CausalLMFactory]:
    def build(config: RunConfig) -> CausalLMFactory:
        from models.causal_lm import CausalLMFactory

        return CausalLMFactory(config, {**defaults, **config.model_options})

    return build


PRESETS: dict[str, Callable[[RunConfig], CausalLMFactory]] = {
    name: _causal_lm(**options) for name, options in PRESET_OPTIONS.items()
}
