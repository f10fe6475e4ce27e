"""A sample of `parity.py`: what is special about a family is in here once. All families: `parity.py --all`."""

from __future__ import annotations

import pytest
import torch
from parity import PADDINGS, compare, tried
from shrunken import ADAPTERS, families_with_a_plan

#: Each for what its cut could get wrong.
SAMPLE = {
    "llama": "the plainest",
    "mixtral": "a balancing loss over all layers",
    "qwen2_moe": "layers without a router",
    "gemma2": "caps, windows, a scaled embedding",
    "gemma3n_text": "embeddings per layer, shared keys and values, parallel streams",
    "granite": "four multipliers",
    "cohere2": "scaled logits, layer types",
    "minicpm3": "hidden states scaled before the head",
    "deepseek_v4": "tokens looked at by later layers, hyper-connections, a module between layers and norm",
    "glm_moe_dsa": "indices handed from layer to layer",
    "qwen3_next": "linear attention, initial values computed from draws",
    "minimax": "multipliers by kind of layer",
    "gpt2": "learnt positions",
    "opt": "a decoder inside the base, positions from the mask",
    "bloom": "layers that return tuples, alibi",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_three_stages_equal_the_whole_model(model_type: str) -> None:
    """Logits, loss and every gradient, each multiplier, cap and window off its default."""
    paddings = PADDINGS if model_type in ("llama", "mixtral", "opt") else ("left",)
    assert compare(model_type, paddings=paddings) <= 1e-5


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "opt"])
def test_a_head_tied_to_an_embedding_in_another_stage_equals_the_whole_model(model_type: str) -> None:
    assert compare(model_type, paddings=("left",), tie_word_embeddings=True) <= 1e-5


def test_every_family_with_a_plan_is_known_and_a_refusal_names_it() -> None:
    assert len(families_with_a_plan()) > 80
    assert set(SAMPLE) <= {*families_with_a_plan(), *ADAPTERS}
    refused = tried("hrm_text")
    assert refused.outcome == "refused"
    assert "'hrm_text' cannot be cut into stages" in refused.detail


def test_a_wrong_multiplier_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: a cut that scales its input by 1.001 is not the model."""
    from models.boundary import Entry

    forward = Entry.forward
    monkeypatch.setattr(Entry, "forward", lambda self, *a, **k: forward(self, *a, **k) * 1.001)
    with pytest.raises(AssertionError, match="differs by"):
        compare("llama", paddings=("none",))
