"""Examples that share a sample are trained as if each had one of its own: losses and gradients, through a cut model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.feed.chat import Example
from swarm.feed.packing import PackedExamples

T = 24
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attn_implementation": "eager"},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "gemma3_text", "sliding_window": 5, "head_dim": 8,
     "layer_types": ["sliding_attention", "full_attention"] * 2},
]  # fmt: skip


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
    config = RunConfig(model="causal-lm", model_options={**TINY, **options}, precision="fp64", sequence_length=T)
    factory = factory_of(config)
    stages = [factory.build(stage) for stage in range(config.num_stages)]
    packed = PackedExamples(examples(), T, packed=True)
    unpacked = PackedExamples(examples(), T, packed=False)
    assert len(packed) < len(unpacked) / 1.5, "or nothing is tested"
    loss, gradients = loss_and_gradients(stages, packed)
    expected, expected_gradients = loss_and_gradients(stages, unpacked)
    assert loss == pytest.approx(expected, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-9, atol=1e-9, msg=name)
