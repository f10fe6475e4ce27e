"""What layers cost: compared with torch's own count of operations, and with what stages really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.causal_lm import CausalLMFactory
from swarm.base.config import RunConfig
from tests.unit.models.shrunken import VOCAB, shrunken

T = 12


def factory_of(model_type: str = "llama", num_stages: int = 3, sequence_length: int = T, **options: Any) -> CausalLMFactory:
    run = RunConfig(num_stages=num_stages, precision="fp32", sequence_length=sequence_length, micro_batch_size=2)
    return CausalLMFactory(run, {**shrunken(model_type), **options})


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "qwen3"])
def test_flops_are_those_that_torch_counts(model_type: str) -> None:
    """Eager attention computes all T x T scores: as many as causal attention over 2 T."""
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if model_type == "phi3":
        options["sliding_window"] = None
    if model_type == "qwen3":
        options["use_sliding_window"] = False
    whole = factory_of(model_type, sequence_length=2 * T, **options).build_whole()
    ids = torch.zeros(3, T, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        whole.logits({"input_ids": ids})
    cost = factory_of(model_type, sequence_length=2 * T, **options).cost
    found = cost.of(range(len(cost.layers))).flops
    rotary = 2 * whole.get_buffer("model.rotary_emb.inv_freq").numel() * T if model_type != "gpt2" else 0
    assert found * ids.numel() == pytest.approx(counter.get_total_flops(), abs=3 * rotary)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma3n_text", "deepseek_v4", "opt", "bloom"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_that_stages_hold(model_type: str, tied: bool) -> None:
    factory = factory_of(model_type, tie_word_embeddings=tied)
    for stage, span in enumerate(factory.spans):
        held = sum(p.numel() for p in factory.outline(stage).parameters())
        assert factory.cost.of(span).num_trained == held, f"stage {stage}"


def test_a_token_goes_through_a_part_of_the_experts() -> None:
    dense, sparse = factory_of("mixtral", num_experts_per_tok=4).cost, factory_of("mixtral", num_experts_per_tok=1).cost
    named = factory_of("mixtral").skeleton().named_parameters()
    experts = sum(p.numel() for n, p in named if ".layers.0." in n and ".experts." in n)
    assert dense.layers[0].flops - sparse.layers[0].flops == pytest.approx(2 * experts * 3 / 4)
    assert dense.layers[0].num_trained == sparse.layers[0].num_trained


def test_frozen_parameters_take_their_own_bytes_only() -> None:
    run = RunConfig(num_stages=3, precision="bf16", sequence_length=T, frozen=("*",))
    frozen = CausalLMFactory(run, shrunken("llama")).cost.of(range(6))
    assert frozen.num_trained == 0
    assert frozen.num_frozen == factory_of().cost.of(range(6)).num_trained


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    small, large = factory_of(vocab_size=VOCAB).spans, factory_of(vocab_size=100 * VOCAB).spans
    assert [len(span) for span in small] == [2, 2, 2]
    assert [len(span) for span in large] == [2, 3, 1], "the embedding takes no work, but memory"


def test_stages_have_the_layers_that_the_options_say() -> None:
    assert factory_of(stage_layers=[1, 4, 1]).spans == [range(1), range(1, 5), range(5, 6)]
