"""Learnt compression of boundaries: the cut is the whole model, and what travels is narrow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.causal_lm import CausalLMFactory
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from tests.unit.models.parity import B, T, difference, of_stages, sample
from tests.unit.models.shrunken import shrunken


def factory_of(model_type: str = "llama", num_stages: int = 3, **options: Any) -> CausalLMFactory:
    run = RunConfig(num_stages=num_stages, precision="fp32", sequence_length=T, seed=5)
    return CausalLMFactory(run, {**shrunken(model_type), **options})


@pytest.mark.parametrize("kind", ["bottleneck", "maxout"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "granite", "bloom"])
def test_the_cut_equals_the_whole_model(model_type: str, kind: str) -> None:
    torch.set_num_threads(1)
    factory = factory_of(model_type, compressor=kind, compressor_factor=4)
    inputs, labels = sample("left")
    stages = [factory.build(stage) for stage in range(3)]
    boundary = inputs
    for stage in stages[:-1]:
        boundary = stage(boundary)
        assert boundary["hidden_states"].shape == (B, T, 8)
    output, logits, gradients = of_stages(stages, inputs, labels)
    expected, whole_logits, whole_gradients = of_stages([factory.build_whole()], inputs, labels)
    assert difference(output["loss_sum"], expected["loss_sum"], expected["loss_sum"].item()) < 1e-6
    assert difference(logits, whole_logits, 1.0) < 1e-5
    assert gradients.keys() == whole_gradients.keys()
    assert {name for name in gradients if name.startswith("compressors.1.up")} == {"compressors.1.up.linear.weight"}
    for name, gradient in whole_gradients.items():
        assert difference(gradients[name], gradient, gradient.abs().max().item()) < 1e-5, name
        if name.startswith("compressors."):
            assert gradient.abs().max() > 0, name


def test_another_cut_is_the_same_model_if_the_layers_are_named() -> None:
    options = {"compressor": "bottleneck", "compressor_after": [1, 2]}
    expected = dict(factory_of(num_stages=1, **options).build(0).named_parameters())
    for num_stages in (2, 3, 6):
        factory = factory_of(num_stages=num_stages, **options)
        found = {}
        for stage in range(num_stages):
            for name, parameter in factory.build(stage).named_parameters():
                assert factory.stage_of(name) == stage, name
                assert torch.equal(parameter, expected[name]), name
                found[name] = parameter
        assert found.keys() == expected.keys()


def test_hidden_states_keep_their_size_through_a_compressor() -> None:
    """At the start: variance one in every feature of what travels, and about one after it."""
    stage = factory_of(compressor="bottleneck", compressor_factor=2).build(0)
    narrow = stage(sample("none")[0])["hidden_states"]
    assert narrow.shape[-1] == 16
    assert narrow.var(-1, correction=0).mean().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "squeeze"}, "compressor 'squeeze' is none of bottleneck, maxout"),
        ({"compressor": "maxout", "compressor_factor": 5}, "compressor_factor 5 is no divisor above 1 of hidden_size 32"),
        ({"compressor": "maxout", "compressor_after": [5]}, r"compressor_after \[5\] is no list of layers from 0 to 4"),
        ({"compressor_factor": 2}, "compressor_factor: it needs model_options.compressor"),
        ({"model_type": "deepseek_v4", "compressor": "maxout"}, "layers of deepseek_v4 hand on more than one hidden state"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    model_type = options.pop("model_type", "llama")
    with pytest.raises(ConfigError, match=message):
        factory_of(model_type, **options)


def test_transformers_has_no_such_model() -> None:
    factory = factory_of(compressor="maxout")
    with pytest.raises(ConfigError, match="'maxout' is none of transformers'"):
        factory.save_pretrained(dict(factory.build_whole().named_parameters()), "nowhere")
