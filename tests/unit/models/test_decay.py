"""Which parameters weight decay leaves out: those that transformers' Trainer leaves out, in whole models and in stages."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig, Trainer

from models.causal_lm import CausalLMFactory
from models.registry import factory_of
from swarm.base.config import NEW_NO_DECAY, RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.layout import Layout
from swarm.stage.optimizers.choice import optimizer_of
from swarm.stage.optimizers.decay import has_decay, undecayed

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}


def whole(config: object) -> torch.nn.Module:
    make = AutoModel if isinstance(config, BertConfig) else AutoModelForCausalLM
    with torch.device("meta"):
        return make.from_config(config)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL, attention_bias=True), GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=64), BertConfig(**SMALL)],
    ids=["llama", "gpt2", "bert"],
)
def test_the_groups_are_those_of_transformers_trainer(config: object) -> None:
    model = whole(config)
    layout = Layout.of(model)
    mine = {name for name in layout.names if has_decay(name, layout.norms, NEW_NO_DECAY)}
    theirs = set(Trainer.get_decay_parameter_names(None, model)) & set(layout.names)
    assert mine == theirs
    assert 0 < len(mine) < len(layout.names)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_stage_decays_what_the_whole_model_does(model_type: str) -> None:
    sizes = SMALL if model_type == "llama" else {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 64}
    factory = CausalLMFactory(RunConfig(num_stages=3), {"model_type": model_type, **sizes})
    theirs = set(Trainer.get_decay_parameter_names(None, factory.skeleton()))
    mine: set[str] = set()
    for stage in range(3):
        layout = Layout.of(factory.outline(stage))
        ranges = undecayed(layout, NEW_NO_DECAY)
        for name, start, end in zip(layout.names, layout.offsets, layout.offsets[1:], strict=False):
            inside = [low <= start and end <= high for low, high in ranges]
            mine |= set() if any(inside) else {name}
    assert mine - {"lm_head.weight"} == theirs - {"lm_head.weight"}  # a tied head is one parameter there


def test_only_what_is_named_stays_without_decay() -> None:
    """AdamW equals torch's with two groups."""
    net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3, bias=False))
    config = RunConfig(weight_decay=0.5, no_decay=("norms", "biases", "2.*"))
    layout = Layout.of(net)
    optimizer = optimizer_of(config, layout, dtype=torch.float64, device="cpu")
    masters, state = layout.flatten(net.parameters(), dtype=torch.float64, device="cpu"), optimizer.moments.zero()
    twin = {name: torch.nn.Parameter(value.clone()) for name, value in layout.named(masters).items()}
    decayed = [twin["0.weight"]]
    groups = [
        {"params": decayed, "weight_decay": 0.5},
        {"params": [p for p in twin.values() if p is not decayed[0]], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.1, betas=(config.beta1, config.beta2), eps=config.epsilon, foreach=False)
    for step in range(3):
        gradient = torch.randn(layout.num_elements, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for parameter, part in zip(twin.values(), layout.views(gradient), strict=True):
            parameter.grad = part
        plain.step()
        masters, state = optimizer.update(masters, gradient, state, step=step, learning_rate=0.1)
    for name, value in layout.named(masters).items():
        torch.testing.assert_close(value, twin[name].detach(), rtol=1e-12, atol=1e-14)


def test_a_pattern_that_fits_nothing_or_one_copy_of_two_is_refused() -> None:
    def made(**fields: object) -> None:
        factory_of(RunConfig(model="causal-lm", **fields))  # type: ignore[arg-type]

    options = {"model_type": "llama", **SMALL, "tie_word_embeddings": True}
    made(model_options=options, no_decay=("norms", "*.q_proj.*"))
    with pytest.raises(ConfigError, match=r"no_decay: '\*\.ln\.\*' is neither norms nor biases and fits no parameter; there are"):
        made(model_options=options, no_decay=("*.ln.*",))
    with pytest.raises(
        ConfigError, match=r"no_decay: .*embed_tokens\.weight and lm_head\.weight are one parameter in two stages"
    ):
        made(model_options=options, no_decay=("*embed_tokens*",))
