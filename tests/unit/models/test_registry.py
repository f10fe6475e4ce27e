"""A model's name in the configuration leads to a factory, or to one line that says why not; presets train."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.feed import Feed, open_feed
from swarm.stage.module import StageFactory
from swarm.testing.simulation.small_model import add_gradients

MLP = "tests.unit.models.mlp_classifier"


def losses_of(config: RunConfig, factory: StageFactory, feed: Feed, num_steps: int) -> list[float]:
    """Plain loop over the stages: AdamW with a constant learning rate, a whole step at a time."""
    stages = [factory.build(stage) for stage in range(factory.num_stages)]
    optimizer = torch.optim.AdamW([p for s in stages for p in s.parameters()], lr=config.learning_rate)
    losses = []
    for step in range(num_steps):
        loss_sum, tokens = add_gradients(stages, feed, config, step)
        for parameter in (p for stage in stages for p in stage.parameters()):
            parameter.grad /= tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum / tokens)
    return losses


def test_llama_tiny_learns_the_builtin_text() -> None:
    torch.set_num_threads(1)
    config = RunConfig()
    losses = losses_of(config, factory_of(config), open_feed(config, None, None, None), 10)
    assert 5.4 < losses[0] < 6.2
    assert losses[-1] < 3.4


def test_a_custom_model_with_custom_data_learns() -> None:
    torch.set_num_threads(1)
    config = RunConfig(model=f"{MLP}:factory", sequence_length=1, learning_rate=1e-2, micro_batch_size=16)
    losses = losses_of(config, factory_of(config), open_feed(config, f"{MLP}:dataset", None, None), 20)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", ["llama-tiny", f"{MLP}:factory"])
def test_a_pattern_of_frozen_parameters_that_fits_none_is_refused(model: str) -> None:
    names = [name for stage in range(3) for name, _ in factory_of(RunConfig(model=model)).build(stage).named_parameters()]
    factory_of(RunConfig(model=model, frozen=(names[0], f"{names[-1][:-1]}*")))  # each is in one stage alone
    with pytest.raises(ConfigError) as raised:
        factory_of(RunConfig(model=model, frozen=(names[0], "embedding.*")))
    assert str(raised.value) == (
        f"frozen: 'embedding.*' fits no parameter of the model; there are {names[0]}, {names[len(names) // 2]}, {names[-1]}, ..."
    )


def test_a_run_that_would_train_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"frozen: model\.\*, lm_head\.\* fit every parameter of the model"):
        factory_of(RunConfig(frozen=("model.*", "lm_head.*")))


def test_a_local_run_of_a_model_with_tied_weights_in_two_stages_is_refused() -> None:
    """In one stage, or frozen, they may be tied."""
    options = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    }

    def made(**changes: object) -> StageFactory:
        base: dict[str, object] = {"model": "causal-lm", "model_options": options, "mode": "local", "inner_batch_size": 8}
        return factory_of(RunConfig(**{**base, "num_stages": 2, **changes}))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="mode 'local' cannot keep parameters equal that several stages hold"):
        made()
    made(num_stages=1)
    made(frozen=("model.embed_tokens.*", "lm_head.*"))
    made(mode="sync", inner_batch_size=0)


def test_model_options_override_a_preset() -> None:
    options = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    factory = factory_of(RunConfig(model="llama-small", model_options=options))
    assert factory.config.num_hidden_layers == 3  # type: ignore[attr-defined]
    assert factory.build(0).get_parameter("model.embed_tokens.weight").shape == (256, 32)
    other = factory_of(RunConfig(model="causal-lm", model_options={**options, "model_type": "qwen3"}))
    assert other.config.model_type == "qwen3"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama-huge", "model 'llama-huge' is none of llama-tiny, llama-small, causal-lm, and no package"),
        ("no_such_package.x:y", "model no_such_package.x:y: No module named 'no_such_package'"),
        (f"{MLP}:nothing", "has no callable 'nothing'"),
        (f"{MLP}:CLASSES", "has no callable 'CLASSES'"),
        (f"{MLP}:dataset", "must return a StageFactory of 3 stages .* got ArraySamples"),
        ("os:system; rm", "and no package"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_in_one_line(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        factory_of(RunConfig(model=model))
    assert "\n" not in str(caught.value)


def test_a_dotted_path_is_not_imported_without_leave() -> None:
    with pytest.raises(ConfigError, match="may not import it"):
        factory_of(RunConfig(model="no_such_package.x:y"), may_import=False)


def test_the_registry_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, models.registry, swarm.feed.feed; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
