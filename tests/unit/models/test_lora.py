"""Adapters in a cut model: the same computation as peft in the whole one, in any cut, and nothing else is trained."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models.files.shards import Directory
from models.lora import LoraFactory
from models.registry import factory_of
from swarm.base.config import RunConfig, parse_config
from swarm.base.errors import ConfigError
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.lifecycle.commit_record import genesis_record
from swarm.stage.compute import StageCompute
from swarm.stage.module import Tensors
from swarm.stage.versions import Version, make_version
from tests.unit.models.test_pretrained import run_of, save_llama

torch.set_num_threads(1)
B, T = 3, 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora") / "model"
    save_llama(directory)
    return directory


def make(saved: Path, lora: str = "r=4", **changes: Any) -> tuple[RunConfig, LoraFactory]:
    run = parse_config({**run_of(saved, **changes).model_dump(), "lora": lora}, where="here")
    factory = factory_of(run, source=Directory(saved))
    assert isinstance(factory, LoraFactory)
    return run, factory


def batch() -> tuple[Tensors, Tensors]:
    tokens = torch.randint(0, 64, (B, T + 1), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens[:, :-1]}, {"labels": tokens[:, 1:].clone()}


class Pipeline:
    """All stages of a run, with adapters that are no longer at their first values (where they do nothing)."""

    def __init__(self, run: RunConfig, factory: LoraFactory, *, recompute: bool = False, device: str = "cpu") -> None:
        self.recompute = recompute
        self.device = device
        self.computes = [
            StageCompute(factory, k, precision=run.precision, seed=run.seed, device=device) for k in range(run.num_stages)
        ]
        self.versions = [self._version(run, compute) for compute in self.computes]

    def _version(self, run: RunConfig, compute: StageCompute) -> Version:
        record = genesis_record(run, "0" * 64, ZERO_BALLOT, ((),) * run.num_stages)
        masters = compute.initial_masters()
        for name, view in compute.layout.named(masters).items():
            if ".lora_B." in name:
                seed = sum(name.encode())
                view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.3)
        return make_version(record, compute.layout, masters, compute.dtype)

    def parameters(self) -> Tensors:
        return {name: value for version in self.versions for name, value in version.parameters.items()}

    def train(self, ticket: Ticket = Ticket(0, 0)) -> tuple[float, Tensors]:
        boundary, labels = ({name: tensor.to(self.device) for name, tensor in part.items()} for part in batch())
        activations = []
        for compute, version in zip(self.computes, self.versions, strict=True):
            activation = compute.forward(
                version, ticket, boundary, labels if compute.last else None, keep_graph=not self.recompute or compute.last
            )
            activations.append(activation)
            outputs = activation.outputs or {}
            boundary = {name: tensor.detach() for name, tensor in outputs.items()}
            if self.recompute and not compute.last:
                activation.outputs = None
        loss, gradients, sent = float(boundary["loss_sum"]), {}, None
        for compute, activation in zip(reversed(self.computes), reversed(activations), strict=True):
            result = compute.backward(activation, sent)
            sent = result.inputs
            for name, gradient in zip(compute.layout.names, result.parameters, strict=True):
                if gradient is not None:
                    gradients[name] = gradient
        return loss, gradients


def test_a_cut_model_with_adapters_is_the_whole_one_with_peft(saved: Path, tmp_path: Path) -> None:
    run, factory = make(saved, "r=4,alpha=12,targets=q_proj+down_proj", precision="fp64")
    pipeline = Pipeline(run, factory)
    loss, gradients = pipeline.train()
    factory.save_pretrained(pipeline.parameters(), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    inputs, labels = batch()
    logits = model(**inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels["labels"].flatten(), reduction="sum")
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6), "the adapter's file is fp32"
    expected.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(theirs) == len(gradients) == 2 * 2 * 6
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[f"base_model.model.{name}"], rtol=1e-5, atol=1e-5)


def test_names_and_first_values_do_not_depend_on_the_cut(saved: Path) -> None:
    def first(num_stages: int) -> Tensors:
        run, factory = make(saved, num_stages=num_stages)
        values: Tensors = {}
        for stage in range(num_stages):
            compute = StageCompute(factory, stage, precision=run.precision, seed=run.seed)
            values |= compute.layout.named(compute.initial_masters())
        return values

    one, three = first(1), first(3)
    assert one.keys() == three.keys()
    assert len(one) == 6 * 7 * 2, "all linear layers but the head"
    assert all(torch.equal(one[name], three[name]) for name in one)
    assert all(bool(value.any()) == (".lora_A." in name) for name, value in one.items()), "B is zero: nothing changes yet"


def test_before_the_first_step_the_model_is_the_base(saved: Path) -> None:
    run, factory = make(saved, precision="fp64")
    pipeline = Pipeline(run, factory)
    pipeline.versions = [
        make_version(v.record, c.layout, c.initial_masters(), c.dtype)
        for v, c in zip(pipeline.versions, pipeline.computes, strict=True)
    ]
    base = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)
    inputs, labels = batch()
    logits = base(**inputs).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels["labels"].flatten(), reduction="sum")
    assert pipeline.train()[0] == pytest.approx(float(expected.detach()), rel=1e-6)


def test_a_stage_without_target_layers_passes_gradients_on(saved: Path) -> None:
    """A layer of the first stage alone is a target; stages 1 and 2 train nothing, and the first still gets its gradient."""
    run, factory = make(saved, "r=4,targets=q_proj", precision="fp64")
    only_first = factory.outline

    def outline(stage: int) -> torch.nn.Module:
        return only_first(0) if stage == 0 else _without_adapters(factory, stage)

    factory.outline = outline  # type: ignore[method-assign]
    pipeline = Pipeline(run, factory)
    assert [compute.layout.num_elements for compute in pipeline.computes][1:] == [0, 0]
    loss, gradients = pipeline.train()
    assert loss > 0
    assert len(gradients) == 4
    assert all(bool(gradient.any()) for gradient in gradients.values())


def test_a_first_stage_without_target_layers_has_nothing_to_do_backwards(saved: Path) -> None:
    run, factory = make(saved, "r=4,targets=q_proj")
    plain = factory.outline
    factory.outline = lambda stage: _without_adapters(factory, 0) if stage == 0 else plain(stage)  # type: ignore[method-assign]
    for recompute in (False, True):
        _, gradients = Pipeline(run, factory, recompute=recompute).train()
        assert len(gradients) == 8


def _without_adapters(factory: LoraFactory, stage: int) -> torch.nn.Module:
    module = factory.base.outline(stage)
    return module.requires_grad_(False)


@pytest.mark.parametrize("frozen_input", [True, False], ids=["input needs no gradient", "all stages"])
def test_case_18_recomputation_with_dropout_gives_the_same_gradients(frozen_input: bool, saved: Path) -> None:
    """The first stage's input is tokens, and its embedding is frozen: nothing that enters it needs a gradient."""
    lora = "r=4,dropout=0.3,targets=q_proj+up_proj" if frozen_input else "r=4,dropout=0.3"
    run, factory = make(saved, lora, precision="fp64")
    loss, gradients = Pipeline(run, factory).train(Ticket(3, 1))
    again, recomputed = Pipeline(run, factory, recompute=True).train(Ticket(3, 1))
    assert again == loss
    assert gradients.keys() == recomputed.keys()
    assert any(name.startswith("model.layers.0.") for name in gradients)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, recomputed[name]), name
        assert bool(gradient.any()), name
    assert Pipeline(run, factory).train(Ticket(3, 2))[0] != loss, "another ticket drops others"


def test_dropout_does_not_depend_on_the_cut(saved: Path) -> None:
    losses = []
    for num_stages in (1, 3):
        run, factory = make(saved, "r=4,dropout=0.3", num_stages=num_stages, precision="fp64")
        losses.append(Pipeline(run, factory).train(Ticket(3, 1))[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_base_in_8_bits_computes_nearly_the_same_and_takes_a_quarter(saved: Path) -> None:
    losses, gradients, sizes = [], [], []
    for lora in ("r=4", "r=4,bits=8"):
        run, factory = make(saved, lora)
        pipeline = Pipeline(run, factory)
        loss, found = pipeline.train()
        again, recomputed = Pipeline(run, factory, recompute=True).train()
        assert again == loss
        assert all(torch.equal(found[name], recomputed[name]) for name in found)
        losses.append(loss)
        gradients.append(torch.cat([found[name].reshape(-1) for name in sorted(found)]))
        layers = {n: t for c in pipeline.computes for n, t in c.frozen.items() if "proj" in n}
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in layers.values()))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]
    assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.98
    assert sizes[1] < 0.27 * sizes[0]


def test_the_decoded_weight_is_that_of_the_files_up_to_the_code(saved: Path) -> None:
    from models.quantized import QuantizedLinear

    run, factory = make(saved, "r=4,bits=8")
    compute = StageCompute(factory, 1, precision=run.precision, seed=run.seed)
    weights = {name: p for name, p in AutoModelForCausalLM.from_pretrained(saved).named_parameters()}
    layers = {n: m for n, m in compute._module.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        expected = weights[name.replace(".base_layer", "") + ".weight"].detach()
        assert (layer.decoded(torch.float32) - expected).norm() / expected.norm() < 0.02


def test_4_bits_need_a_gpu(saved: Path) -> None:
    _, factory = make(saved, "r=4,bits=4")
    with pytest.raises(ConfigError, match=r"lora.bits 4: needs a CUDA device; use bits=8 on a CPU"):
        StageCompute(factory, 0, precision="fp32", seed=0)


def test_the_base_is_frozen_in_the_precision_of_the_computation(saved: Path) -> None:
    _, factory = make(saved, precision="bf16")
    compute = StageCompute(factory, 1, precision="bf16", seed=0)
    assert {tensor.dtype for tensor in compute.frozen.values()} == {torch.bfloat16}
    assert compute.initial_masters().dtype == torch.float32
    names = {name for name, _ in factory.base.outline(1).named_parameters()}
    assert {name.replace(".base_layer", "") for name in compute.frozen} == names


def test_the_adapters_file_is_what_peft_writes(saved: Path, tmp_path: Path) -> None:
    run, factory = make(saved, "r=4")
    factory.save_pretrained(Pipeline(run, factory).parameters(), tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(saved)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    assert peft.PeftConfig.from_pretrained(tmp_path / "ours").base_model_name_or_path == str(saved.resolve())


def test_an_adapter_names_its_base_or_is_not_written(saved: Path, tmp_path: Path) -> None:
    run, factory = make(saved, "r=4")
    adapters = Pipeline(run, factory).parameters()
    with pytest.raises(ConfigError, match="say where it is with --model"):
        LoraFactory(run, None).save_pretrained(adapters, tmp_path)
    public = run.model_copy(update={"weights_source": "owner/base@0123abc"})
    LoraFactory(public, None).save_pretrained(adapters, tmp_path, dtype=torch.bfloat16)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    assert (config.base_model_name_or_path, config.revision) == ("owner/base", "0123abc")
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("lora", "message"), [("r=0", "lora.r"), ("rank=3", "lora.rank"), ("dropout=1", "lora.dropout"), ("r=x", "lora.r")]
)
def test_malformed_options_are_named(lora: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config({"lora": lora}, where="run.toml")
    assert "\n" not in str(caught.value)


def test_a_layer_that_the_model_does_not_have_is_named(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets c_attn: the linear layers of the model are down_proj, gate_proj"):
        make(saved, "targets=c_attn")


def test_adapters_need_weights() -> None:
    with pytest.raises(ConfigError, match=r"lora: adapters need a model with weights .*, not llama-tiny"):
        factory_of(RunConfig(lora="r=2"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("bits", "similarity"), [(8, 0.98), (4, 0.85)])
def test_on_a_gpu_a_quantised_base_computes_nearly_the_same(bits: int, similarity: float, saved: Path) -> None:
    found = {}
    for lora in ("r=4", f"r=4,bits={bits}"):
        run, factory = make(saved, lora)
        pipeline = Pipeline(run, factory, device="cuda:0")
        loss, gradients = pipeline.train()
        again, recomputed = Pipeline(run, factory, recompute=True, device="cuda:0").train()
        assert again == pytest.approx(loss, rel=1e-6)
        assert gradients.keys() == recomputed.keys()
        found[lora] = loss, torch.cat([gradients[name].reshape(-1) for name in sorted(gradients)])
    (loss, plain), (coded_loss, coded) = found.values()
    assert coded_loss == pytest.approx(loss, rel=0.1)
    assert coded_loss != loss
    assert torch.nn.functional.cosine_similarity(plain, coded, dim=0) > similarity


def test_importing_bitsandbytes_prints_nothing_and_fetches_nothing() -> None:
    code = (
        "import sys; from models.quantized import bitsandbytes_functional;"
        "bitsandbytes_functional(); assert 'kernels' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.NOTSET
