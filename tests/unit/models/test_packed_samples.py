"""Examples that share a sample are trained as if each had one of its own: losses and gradients, through a cut model.

Every type, and which models must not share samples: `parity.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.packing import why_apart
from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.feed.examples import Example, Examples
from swarm.feed.packing import PackedExamples

T = 24
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attn_implementation": "eager"},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "gemma3_text", "sliding_window": 5, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"model_type": "bloom", "n_head": 2, "n_layer": 4},
]


def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    sizes = [5, 20, 9, 2, 13, 3, 7, 25, 4]
    return [Example(rng.integers(0, 64, n).astype(np.uint16), np.arange(n) >= min(2, n - 1)) for n in sizes]


def loss_and_gradients(stages: list[torch.nn.Module], samples: PackedExamples) -> tuple[float, dict[str, torch.Tensor]]:
    batch = samples.take(np.arange(len(samples)))
    boundary = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    labels = {name: torch.from_numpy(array) for name, array in batch.labels.items()}
    for number, stage in enumerate(stages):
        stage.zero_grad()
        boundary = stage(boundary, labels if number == len(stages) - 1 else None)
    boundary["loss_sum"].backward()
    gradients = {n: p.grad.clone() for stage in stages for n, p in stage.named_parameters() if p.grad is not None}
    return boundary["loss_sum"].item(), gradients


@pytest.mark.parametrize("options", FAMILIES, ids=lambda o: "-".join(str(v) for v in o.values())[:30])
def test_packed_equals_unpacked(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    fields = TINY if options["model_type"] != "bloom" else {name: TINY[name] for name in ("vocab_size", "hidden_size")}
    config = RunConfig(model="causal-lm", model_options={**fields, **options}, precision="fp64", sequence_length=T)
    factory = factory_of(config)
    stages = [factory.build(stage) for stage in range(config.num_stages)]
    packed = PackedExamples(Examples.of([examples()]), T, packed=True)
    unpacked = PackedExamples(Examples.of([examples()]), T, packed=False)
    assert len(packed) < len(unpacked) / 1.5, "or nothing is tested"
    loss, gradients = loss_and_gradients(stages, packed)
    expected, expected_gradients = loss_and_gradients(stages, unpacked)
    assert loss == pytest.approx(expected, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-9, atol=1e-9, msg=name)


CAUSAL: dict[str, Any] = {"model": "causal-lm", "sequence_length": 8192}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": "llama-tiny"}, ""),
        ({**CAUSAL, "model_options": {"model_type": "gpt_oss"}}, ""),
        ({**CAUSAL, "model_options": {"model_type": "qwen3_next"}}, "a state that goes on from one token to the next"),
        ({**CAUSAL, "model_options": {"model_type": "glm_moe_dsa"}}, "a choice of tokens"),
        ({**CAUSAL, "model_options": {"model_type": "of_tomorrow"}}, "nobody has shown that of_tomorrow"),
        ({"model": "package.module:factory"}, "whether package.module:factory keeps them apart"),
        ({**CAUSAL, "model_options": {"model_type": "qwen3", "layer_types": ["full_attention", "conv"]}}, "of type conv"),
        ({**CAUSAL, "model_options": {"model_type": "phi3", "rope_scaling": LONGROPE}}, "beyond their first tokens"),
        (
            {
                **CAUSAL,
                "model_options": {"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 4096},
            },
            "beyond 4096 tokens",
        ),
        (
            {
                **CAUSAL,
                "model_options": {"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 8192},
            },
            "",
        ),
        (
            {
                **CAUSAL,
                "model_options": {
                    "model_type": "gemma3_text",
                    "rope_parameters": {"full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 4096}},
                },
            },
            "beyond 4096 tokens",
        ),
        ({**CAUSAL, "model_options": {"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}}, ""),
    ],
)
def test_samples_are_shared_only_where_that_was_shown(fields: dict[str, Any], why: str) -> None:
    found = why_apart(RunConfig.model_validate(fields))
    assert why in found, found
    assert bool(found) == bool(why)


def test_rotary_embeddings_that_look_at_the_longest_example_do_see_it() -> None:
    """Why such models do not share samples: the same tokens at the same positions, beside a longer row."""
    rope = {"rope_type": "longrope", "long_factor": [8.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 100.0}
    options = {**TINY, "model_type": "phi3", "rope_parameters": rope, "original_max_position_embeddings": 8}
    config = RunConfig(model="causal-lm", model_options=options, num_stages=1, sequence_length=T)
    stage = factory_of(config).build(0)
    ids = torch.arange(T)[None]
    short, long = (torch.arange(T)[None] % n for n in (8, T))
    with torch.no_grad():
        alone = stage.logits({"input_ids": ids, "position_ids": short})
        beside = stage.logits({"input_ids": ids.repeat(2, 1), "position_ids": torch.cat([short, long])})
    assert (alone[0] - beside[0]).abs().max() > 1e-3
    assert why_apart(config)
