"""A sample of `parity.py`: what is special about a family is in here once. All families: `parity.py --all`."""

from __future__ import annotations

import pytest
import torch

from models.packing import SHOWN
from tests.unit.models.parity import PADDINGS, TOLERANCE, compare, shared_difference, tried
from tests.unit.models.shrunken import ADAPTERS, families_with_a_plan

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

#: Of the types whose examples share samples, each for what keeps them apart.
SHARING = {
    "llama": "a causal mask",
    "gemma3_text": "windows and whole layers in turn",
    "gemma3n_text": "keys and values of earlier layers",
    "gpt_oss": "windows and sinks, masks made without positions",
    "afmoe": "masks made without positions by kind of layer",
    "cohere2": "layers without positions",
    "deepseek_v3": "latent attention",
    "exaone4": "windows by a pattern",
    "mixtral": "experts",
    "longcat_flash": "two attentions a layer, experts that do nothing",
    "mimo_v2_flash": "windows of another size by layer",
    "gpt2": "learnt positions",
    "opt": "learnt positions, masks made without positions",
    "bloom": "alibi over the whole sample",
    "falcon": "alibi added to the mask",
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


@pytest.mark.parametrize("model_type", SHARING)
def test_examples_that_share_a_sample_equal_each_alone(model_type: str) -> None:
    assert shared_difference(model_type) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["minimax", "deepseek_v32", "doge"])
def test_the_comparison_notices_where_examples_see_each_other(model_type: str) -> None:
    assert model_type not in SHOWN
    assert shared_difference(model_type) > 1000 * TOLERANCE


def test_every_type_whose_examples_share_samples_is_one_that_can_be_cut() -> None:
    known = {*families_with_a_plan(), *ADAPTERS}
    assert set(SHARING) <= SHOWN <= known, SHOWN - known


def test_every_family_with_a_plan_is_known_and_a_refusal_names_it() -> None:
    assert len(families_with_a_plan()) > 80
    assert set(SAMPLE) <= {*families_with_a_plan(), *ADAPTERS}
    refused = tried("hrm_text")
    assert refused.outcome == "refused"
    assert "'hrm_text' cannot be cut into stages" in refused.detail


def test_a_wrong_multiplier_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: a cut that scales its input by 1.001 is not the model."""
    from models.boundary import BoundaryEntry

    forward = BoundaryEntry.forward
    monkeypatch.setattr(BoundaryEntry, "forward", lambda self, *a, **k: forward(self, *a, **k) * 1.001)
    with pytest.raises(AssertionError, match="differs by"):
        compare("llama", paddings=("none",))
