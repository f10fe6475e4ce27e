"""A cut model is the same model: values, logits, loss and gradients, for every family that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.causal_lm import CausalLMFactory
from models.cut import CausalLMStage
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, StorageError
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.feed.tokenizers import ByteTokenizer
from swarm.stage.compute import StageCompute
from swarm.stage.module import StageFactory, Tensors, Tie
from swarm.stage.versions import make_version
from swarm.wire.messages import CommitRecord
from tests.unit.models.shrunken import VOCAB, shrunken

B, T, V = 3, 12, 256
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
TINY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: Every multiplier, cap and window off its default: those are what a cut gets wrong.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "gemma2": {"sliding_window": 5, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "olmo2": {},
    "phi3": {"sliding_window": 5},
}
NO_HEAD_DIM = ("qwen2", "granite", "olmo2", "phi3")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def factory_of(num_stages: int = 3, family: str = "llama", precision: str = "fp64", **options: Any) -> CausalLMFactory:
    fields = {**TINY, **FAMILIES[family], **options}
    if family in NO_HEAD_DIM:
        fields.pop("head_dim")
    run = RunConfig(num_stages=num_stages, precision=precision, sequence_length=T, seed=5)
    return CausalLMFactory(run, {"model_type": family, **fields})


def sample(padding: str = "none") -> tuple[Tensors, Tensors]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, T + 1), generator=generator)
    inputs, labels = {"input_ids": tokens[:, :-1]}, tokens[:, 1:].clone()
    labels[0, 3:5] = -100
    if padding != "none":
        mask = torch.ones(B, T, dtype=torch.int64)
        mask[1, slice(0, 4) if padding == "left" else slice(T - 4, T)] = 0
        labels[mask == 0] = -100
        inputs |= {"attention_mask": mask, "position_ids": 3 * (mask.cumsum(1) - 1).clamp(min=0)}
    return inputs, {"labels": labels}


def loss_and_gradients(
    stages: list[CausalLMStage], inputs: Tensors, labels: Tensors, dtype: torch.dtype | None = None
) -> tuple[Tensors, Tensors]:
    """Through `functional_call` with copies of the parameters, as the engine does."""
    copies = [
        {name: p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for name, p in stage.named_parameters()}
        for stage in stages
    ]
    for stage in stages:  # whoever uses a module's own values gets NaN
        for parameter in stage.parameters():
            parameter.data.fill_(torch.nan)
    for stage, params in zip(stages, copies, strict=True):
        inputs = torch.func.functional_call(stage, params, (inputs, labels if stage.is_last else None))
    inputs["loss_sum"].backward()
    return inputs, {name: p.grad for params in copies for name, p in params.items()}  # type: ignore[misc]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5)])
def test_cut_equals_whole(precision: str, tolerance: float, num_stages: int, padding: str) -> None:
    factory = factory_of(num_stages, precision=precision)
    assert isinstance(factory, StageFactory)
    inputs, labels = sample(padding)
    whole = factory.build_whole()
    boundary = inputs
    for stage in range(num_stages - 1):
        boundary = factory.build(stage)(boundary, None)
    torch.testing.assert_close(
        factory.build(num_stages - 1).logits(boundary), whole.logits(inputs), atol=tolerance, rtol=tolerance
    )
    out, gradients = loss_and_gradients([factory.build(s) for s in range(num_stages)], inputs, labels)
    expected, expected_gradients = loss_and_gradients([whole], inputs, labels)
    assert out["tokens"].item() == (labels["labels"] != -100).sum().item()
    assert out["tokens"].dtype == torch.int64
    assert out["loss_sum"].dtype == (torch.float64 if precision == "fp64" else torch.float32)
    assert out["loss_sum"].item() == pytest.approx(expected["loss_sum"].item(), rel=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_cut_equals_the_family_as_transformers_runs_it(family: str, tmp_path: Path) -> None:
    factory = factory_of(3, family, precision="fp32")
    stages = [factory.build(stage) for stage in range(3)]
    factory.save_pretrained({n: p for s in stages for n, p in s.named_parameters()}, tmp_path)
    reference, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation=factory.config._attn_implementation
    )
    assert not any(info.values()), info
    for padding in ("none", "left"):
        inputs, labels = sample(padding)
        logits = reference(**inputs).logits
        boundary = inputs
        for stage in stages[:-1]:
            boundary = stage(boundary, None)
        real = labels["labels"] != -100
        torch.testing.assert_close(stages[-1].logits(boundary)[real], logits[real], atol=2e-5, rtol=1e-5)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels["labels"].flatten(), reduction="sum")
        assert stages[-1](boundary, labels)["loss_sum"].item() == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(factory.build_whole().logits(inputs)[real], logits[real], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_initial_values_do_not_depend_on_the_cut(family: str) -> None:
    whole = dict(factory_of(1, family).build_whole().named_parameters())
    for num_stages in (1, 2, 4):
        factory = factory_of(num_stages, family)
        names: list[str] = []
        for stage in range(num_stages):
            for name, parameter in factory.build(stage).named_parameters():
                names.append(name)
                assert parameter.dtype == torch.float64
                assert torch.equal(parameter, whole[name]), name
        assert sorted(names) == sorted(whole), "a parameter is in no stage or in two"


def test_initial_values_follow_the_seed_and_the_configured_distribution() -> None:
    def values(seed: int) -> dict[str, torch.Tensor]:
        options = {"model_type": "llama", **TINY, "attention_bias": True}
        return dict(CausalLMFactory(RunConfig(num_stages=1, seed=seed), options).build_whole().named_parameters())

    one, two = values(1), values(2)
    embedding = one["model.embed_tokens.weight"]
    assert not torch.equal(embedding, two["model.embed_tokens.weight"])
    assert embedding.std().item() == pytest.approx(TINY["initializer_range"], rel=0.05)
    assert torch.equal(one["model.norm.weight"], torch.ones(16))
    assert not one["model.layers.0.self_attn.q_proj.bias"].any()
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(one["lm_head.weight"], values(1)["lm_head.weight"])


def test_fp32_and_fp64_start_from_the_same_values() -> None:
    narrow = factory_of(1, precision="fp32").build_whole()
    for name, parameter in factory_of(1, precision="fp64").build_whole().named_parameters():
        assert torch.equal(parameter.float(), narrow.get_parameter(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_is_fp64_throughout(family: str) -> None:
    """A change of 1e-11 arrives at the other end: a cast to fp32 anywhere in between would swallow or blow it up."""
    stage = factory_of(2, family).build(1)
    generator = torch.Generator().manual_seed(2)
    hidden, direction = (torch.randn(B, T, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    slopes = [
        (stage.logits({"hidden_states": hidden + e * direction}) - stage.logits({"hidden_states": hidden})) / e
        for e in (1e-7, 1e-11)
    ]
    assert (slopes[0] - slopes[1]).norm() <= 1e-3 * slopes[0].norm()


def test_a_stage_holds_nothing_of_another() -> None:
    factory = factory_of(3)
    middle = factory.build(1)
    names = [name for name, _ in middle.named_parameters()]
    assert all(name.startswith("model.layers.2.") for name in names) or factory.spans[1] != range(2, 3)
    layers = {int(name.split(".")[2]) for name in names}
    assert layers == set(factory.spans[1])
    assert not any(tensor.is_meta for tensor in [*middle.parameters(), *middle.buffers()])


@pytest.mark.parametrize("num_stages", [1, 3])
def test_bf16_copies_of_the_parameters_compute_in_bf16(num_stages: int) -> None:
    factory = factory_of(num_stages, precision="fp32", initializer_range=0.05)
    inputs, labels = sample("left")
    expected, _ = loss_and_gradients([factory.build_whole()], inputs, labels)
    stages = [factory.build(s) for s in range(num_stages)]
    out, gradients = loss_and_gradients(stages, inputs, labels, torch.bfloat16)
    assert out["loss_sum"].dtype == torch.float32
    assert out["loss_sum"].item() == pytest.approx(expected["loss_sum"].item(), rel=2e-2)
    assert {g.dtype for g in gradients.values()} == {torch.bfloat16}


def test_a_boundary_of_another_dtype_is_cast_and_its_gradient_cast_back() -> None:
    factory = factory_of(2, precision="fp32")
    hidden = torch.randn(B, T, 16, dtype=torch.float64, requires_grad=True)
    factory.build(1)({"hidden_states": hidden}, sample()[1])["loss_sum"].backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float64
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_attention_gets_no_mask_where_it_needs_none(is_recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a CUDA graph is recorded, which then computes as it would be launched, and as its blocks were compiled."""
    masks: list[object] = []
    stage = factory_of(1).build(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_recorded)
    for block in stage.blocks:
        block.register_forward_pre_hook(lambda _, args, options: masks.append(options["attention_mask"]), with_kwargs=True)
    stage(*sample())
    assert masks == [None] * 4


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_loss_in_chunks_equals_loss_at_once(precision: str) -> None:
    factory = factory_of(1, precision=precision)
    inputs, labels = sample()
    expected, expected_gradients = loss_and_gradients([factory.build(0)], inputs, labels)
    chunked = factory.build(0)
    chunked.tail.max_logit_elements = 7 * V  # 36 tokens in chunks of 7
    out, gradients = loss_and_gradients([chunked], inputs, labels)
    tolerance = 1e-12 if precision == "fp64" else 1e-5
    assert out["loss_sum"].item() == pytest.approx(expected["loss_sum"].item(), rel=tolerance)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=tolerance, rtol=tolerance, msg=name)


def test_labels_that_are_all_ignored_give_zero() -> None:
    inputs, _ = sample()
    out = factory_of(1).build(0)(inputs, {"labels": torch.full((B, T), -100)})
    out["loss_sum"].backward()
    assert (out["loss_sum"].item(), out["tokens"].item()) == (0.0, 0)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_tied_embeddings_are_exported_once_and_copies_that_differ_are_refused(num_stages: int, tmp_path: Path) -> None:
    factory = factory_of(num_stages, precision="fp32", tie_word_embeddings=True)
    whole = factory.build_whole()
    stages = [factory.build(stage) for stage in range(num_stages)]
    params = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert ("lm_head.weight" in params) == (num_stages > 1)
    inputs, labels = sample()
    factory.save_pretrained(params, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(whole.logits(inputs), reference(**inputs).logits, atol=2e-5, rtol=1e-5)
    _, gradients = loss_and_gradients([whole], inputs, labels)
    assert gradients.keys() == params.keys() - {"lm_head.weight"}
    if num_stages > 1:
        assert factory.ties == (Tie(((0, "model.embed_tokens.weight"), (2, "lm_head.weight"))),)
        other = params["lm_head.weight"] + 1e-6
        with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight are one parameter"):
            factory.export_state_dict({**params, "lm_head.weight": other})


def test_an_export_carries_the_byte_tokenizer(tmp_path: Path) -> None:
    factory = factory_of(1)
    factory.save_pretrained(dict(factory.build_whole().named_parameters()), tmp_path / "new" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new" / "model")
    text = "Grüße,\n\tworld \x00\x7f  2+2=4 don't 🙂" + bytes(range(1, 128)).decode()
    assert tokenizer(text)["input_ids"] == ByteTokenizer().encode([text])[0].tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_export_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    factory = factory_of(1)
    params = dict(factory.build_whole().named_parameters())
    with pytest.raises(ValueError, match=r"1 parameters do not fit, first model\.norm\.weight, which is missing"):
        factory.export_state_dict({name: p for name, p in params.items() if name != "model.norm.weight"})
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        factory.save_pretrained(params, tmp_path / "file")


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "starcoder2"])
def test_dropout_is_the_same_in_every_cut_and_in_every_recomputation(model_type: str) -> None:
    """Dropout modules and dropout called as a function, in attention, in layers and after the embedding."""
    rates = {name: 0.3 for name in shrunken(model_type) if "drop" in name}
    if model_type == "starcoder2":
        rates["embedding_dropout"] = 0.3
    options = shrunken(model_type) | rates

    def gradients_of(num_stages: int, ticket: Ticket, *, keep_graph: bool) -> Tensors:
        run = RunConfig(num_stages=num_stages, precision="fp32", sequence_length=T, seed=5)
        factory = CausalLMFactory(run, options)
        activations, found = [], {}
        inputs, labels = {"input_ids": sample()[0]["input_ids"] % VOCAB}, {"labels": sample()[1]["labels"] % VOCAB}
        computes = [StageCompute(factory, stage, precision="fp32", seed=5) for stage in range(num_stages)]
        for compute in computes:
            version = make_version(record, compute.layout, compute.initial_masters(), torch.float32)
            given = labels if compute.last else None
            activations.append(compute.forward(version, ticket, inputs, given, keep_graph=keep_graph))
            inputs = activations[-1].outputs
        coming: Tensors | None = None
        for compute, activation in zip(reversed(computes), reversed(activations), strict=True):
            result = compute.backward(activation, coming)
            coming = result.inputs
            found |= dict(zip(compute.layout.names, result.parameters, strict=True))
        return found

    assert len(rates) > 1
    record = CommitRecord(run="1" * 64, step=-1, head="2" * 64, ballot=ZERO_BALLOT, members=((), (), ()))
    expected = gradients_of(1, Ticket(0, 1), keep_graph=True)
    for found in (gradients_of(3, Ticket(0, 1), keep_graph=True), gradients_of(3, Ticket(0, 1), keep_graph=False)):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    other = gradients_of(1, Ticket(0, 2), keep_graph=True)
    assert any(not torch.equal(other[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 5}, "num_stages 5 is more than the model's 4 layers"),
        ({"stage_layers": [2, 3]}, r"stage_layers \[2, 3\] is no list of 3 numbers that add up to the model's 4 layers"),
        ({"hidden_sizes": 3}, "hidden_sizes: the llama configuration has no such field"),
        ({"hidden_size": "wide"}, "model_options: .*hidden_size"),
        ({"num_attention_heads": 3}, "model_options: .*heads"),
        ({"attn_implementation": "flash"}, "attn_implementation 'flash' is none of"),
        ({"max_position_embeddings": 4}, "sequence_length 12 is over"),
        ({"model_type": "gtp2"}, "model_type 'gtp2' is no causal LM"),
        ({"model_type": "rwkv"}, "model_type 'rwkv' cannot be cut into stages: transformers gives no pipeline plan"),
        ({"model_type": "hrm_text"}, "model_type 'hrm_text' cannot be cut into stages: its layers run several times"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        factory_of(**changes)
    assert "\n" not in str(caught.value)


def test_a_draw_that_skips_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_options\.layerdrop: .* use 0"):
        CausalLMFactory(RunConfig(), {"model_type": "opt", "layerdrop": 0.1})


@pytest.mark.parametrize("num_layers", [0, -3])
def test_a_model_without_layers_is_refused(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"model_options\.num_hidden_layers {num_layers}: .* at least one layer"):
        CausalLMFactory(RunConfig(), {"model_type": "llama", "num_hidden_layers": num_layers})
