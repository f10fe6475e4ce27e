"""A stage reads its own tensors and no others, straight to where they belong; what does not fit is refused by name."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from launch.run.models import described, fields_of, place_of
from models.files import shards
from models.files.pretrained import PretrainedFactory
from models.files.shards import INDEX_FILE, Directory, Shards, block_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.compute import StageCompute
from swarm.stage.module import StreamingFactory

torch.set_num_threads(1)
NUM_STAGES = 3


def save_llama(
    directory: Path, *, dtype: torch.dtype = torch.float32, shard_size: str = "6KB", **changes: Any
) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 6,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_theta": 5000.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    model = LlamaForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pretrained") / "model"
    save_llama(directory)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def run_of(directory: Path, **changes: Any) -> RunConfig:
    place = str(directory)
    return RunConfig(**{"num_stages": NUM_STAGES, "sequence_length": 16, **fields_of(place, {}), **described(place), **changes})


def factory_of(directory: Path, **changes: Any) -> PretrainedFactory:
    return PretrainedFactory(run_of(directory, **changes), Directory(directory))


def test_the_stages_together_are_the_checkpoint(saved: Path) -> None:
    factory = factory_of(saved)
    assert isinstance(factory, StreamingFactory)
    stages = [factory.build(stage) for stage in range(NUM_STAGES)]
    expected = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    found = {name: p.detach() for stage in stages for name, p in stage.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_stage_opens_its_own_shards_and_reads_its_own_tensors(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_map = json.loads((saved / INDEX_FILE).read_text())["weight_map"]
    run = run_of(saved)
    for stage in range(NUM_STAGES):
        factory = PretrainedFactory(run, Directory(saved))
        assert factory._shards.opened == set(), "the accounting needs the index alone"
        read: list[str] = []
        real = Shards.read

        def spy(self: Shards, entry: Any, *args: Any, real: Any = real, read: list[str] = read) -> None:
            read.append(entry)
            real(self, entry, *args)

        monkeypatch.setattr(Shards, "read", spy)
        compute = StageCompute(factory, stage, precision="bf16", seed=0)
        monkeypatch.setattr(Shards, "read", real)
        names = set(compute.layout.names)
        assert factory._shards.opened == {weight_map[name] for name in names} < set(weight_map.values())
        assert len(read) == len(names), "each of its tensors once, and no other"
        masters = compute.layout.named(compute.initial_masters())
        tensors = {name: load_file(saved / weight_map[name])[name] for name in names}
        assert all(torch.equal(masters[name], tensors[name]) for name in names)
        again = compute.layout.named(compute.initial_masters())
        assert all(torch.equal(again[name], tensors[name]) for name in names), "for a run that is set back to its start"


def test_values_arrive_in_the_precision_of_the_run(tmp_path: Path) -> None:
    model = save_llama(tmp_path, dtype=torch.bfloat16)
    for precision, dtype in (("fp64", torch.float64), ("bf16", torch.float32)):
        compute = StageCompute(factory_of(tmp_path, precision=precision), 0, precision=precision, seed=0)
        masters = compute.initial_masters()
        assert masters.dtype == dtype
        embedding = compute.layout.named(masters)["model.embed_tokens.weight"]
        assert torch.equal(embedding, model.model.embed_tokens.weight.to(dtype))


def test_frozen_parameters_have_no_masters_and_the_precision_of_the_computation(saved: Path) -> None:
    factory = factory_of(saved)
    compute = StageCompute(factory, 0, precision="bf16", seed=0, frozen=["model.embed_tokens.*", "*.layers.0.*"])
    trained = {block_of(name) for name in compute.layout.names}
    assert trained == {"model.layers.1"}
    assert {block_of(name) for name in compute.frozen} == {"model.embed_tokens.weight", "model.layers.0"}
    assert {tensor.dtype for tensor in compute.frozen.values()} == {torch.bfloat16}
    expected = load_file(saved / json.loads((saved / INDEX_FILE).read_text())["weight_map"]["model.embed_tokens.weight"])
    assert torch.equal(compute.frozen["model.embed_tokens.weight"], expected["model.embed_tokens.weight"].bfloat16())


def test_a_tied_head_may_be_left_out_of_the_files_or_be_there_twice(tmp_path: Path) -> None:
    model = save_llama(tmp_path, tie_word_embeddings=True)
    for twice in (False, True):
        if twice:
            index = json.loads((tmp_path / INDEX_FILE).read_text())
            index["weight_map"]["lm_head.weight"] = "model-of-the-head.safetensors"
            (tmp_path / INDEX_FILE).write_text(json.dumps(index))
            save_file({"lm_head.weight": model.lm_head.weight.detach().clone()}, tmp_path / "model-of-the-head.safetensors")
        factory = factory_of(tmp_path, num_stages=1)
        [module] = [factory.build(0)]
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert torch.equal(module.lm_head.weight, model.lm_head.weight)
        factory = factory_of(tmp_path)
        assert factory.ties[0].places == ((0, "model.embed_tokens.weight"), (NUM_STAGES - 1, "lm_head.weight"))
        first, last = factory.build(0), factory.build(NUM_STAGES - 1)
        assert torch.equal(first.model.embed_tokens.weight, model.lm_head.weight)
        assert torch.equal(last.lm_head.weight, model.lm_head.weight)


# ------------------------------------------------------------------------------------------------ refusals


def shard_of(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX_FILE).read_text())["weight_map"][name]


def edit_index(directory: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    edit(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


def remove_shard(d: Path) -> str:
    shard = shard_of(d, "model.layers.3.mlp.up_proj.weight")
    shard.unlink()
    return f"{shard.name}, which the index names, is missing"


def truncate_shard(d: Path) -> str:
    shard = shard_of(d, "model.layers.3.mlp.up_proj.weight")
    shard.write_bytes(shard.read_bytes()[:-10])
    return f"{shard.name}: is truncated: [0-9]+ bytes, where its header tells of [0-9]+"


def cut_header(d: Path) -> str:
    shard = shard_of(d, "model.layers.3.mlp.up_proj.weight")
    shard.write_bytes(shard.read_bytes()[:20])
    return f"{shard.name}: is truncated"


def misplace_tensor(d: Path) -> str:
    shard = shard_of(d, "model.norm.weight").name
    edit_index(d, lambda names: names.update({"model.layers.0.mlp.up_proj.weight": shard}))
    return f"{shard} does not hold model.layers.0.mlp.up_proj.weight, which the index places there"


def break_index(d: Path) -> str:
    (d / INDEX_FILE).write_text('{"weight_map": [1]}')
    return f"{INDEX_FILE}: has no weight_map"


def leave_the_directory(d: Path) -> str:
    edit_index(d, lambda names: names.update({"model.norm.weight": "../x.safetensors"}))
    return f"{INDEX_FILE}: has no weight_map"


def edit_header(d: Path, edit: Callable[[dict[str, Any]], Any]) -> str:
    shard = shard_of(d, "model.norm.weight")
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    written = json.dumps(header).encode()
    shard.write_bytes(len(written).to_bytes(8, "little") + written + data[end:])
    return f"{shard.name}: "


def endless_shape(d: Path) -> str:
    return edit_header(d, lambda h: h["model.norm.weight"].update(shape=[math.inf])) + "has a malformed header at"


def list_for_a_type(d: Path) -> str:
    return edit_header(d, lambda h: h["model.norm.weight"].update(dtype=["F32"])) + "model.norm.weight is of type"


def half_a_character(d: Path) -> str:
    return edit_header(d, lambda h: h.update({"\ud800": h["model.norm.weight"]})) + "has a malformed header at"


def pickle_only(d: Path) -> str:
    for path in d.glob("*.safetensors*"):
        path.unlink()
    (d / "pytorch_model.bin").write_bytes(b"")
    return "its weights are pickled, which is never read"


def no_weights(d: Path) -> str:
    for path in d.glob("*.safetensors*"):
        path.unlink()
    return "holds no weights"


def no_config(d: Path) -> str:
    (d / "config.json").unlink()
    return "holds no config.json"


@pytest.mark.parametrize(
    "damage",
    [
        remove_shard,
        truncate_shard,
        cut_header,
        misplace_tensor,
        break_index,
        leave_the_directory,
        pickle_only,
        no_weights,
        no_config,
        endless_shape,
        list_for_a_type,
        half_a_character,
    ],
)
def test_damaged_files_are_named_when_the_run_is_created(damage: Callable[[Path], str], directory: Path) -> None:
    message = damage(directory)
    with pytest.raises(ConfigError, match=message) as caught:
        run_of(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [remove_shard, truncate_shard])
def test_damaged_files_are_named_at_the_peer_that_needs_them(damage: Callable[[Path], str], directory: Path, saved: Path) -> None:
    run = run_of(saved)
    message = damage(directory)
    # Whoever needs none of that shard does not look at it.
    StageCompute(PretrainedFactory(run, Directory(directory)), 0, precision="fp32", seed=0)
    with pytest.raises(ConfigError, match=message):
        StageCompute(PretrainedFactory(run, Directory(directory)), 1, precision="fp32", seed=0)


def test_missing_and_unexpected_tensors_are_named_before_anything_is_read(directory: Path, saved: Path) -> None:
    run = run_of(saved)
    edit_index(directory, lambda names: names.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"1 tensors are missing, first model.layers.3.mlp.up_proj.weight"):
        PretrainedFactory(run, Directory(directory))
    shard = shard_of(directory, "model.norm.weight").name
    added = {"model.layers.3.mlp.up_proj.weight": shard, "model.layers.5.mlp.more.weight": shard, "odd": shard}
    edit_index(directory, lambda names: names.update(added))
    with pytest.raises(ConfigError, match=r"2 tensors belong to no parameter, first model.layers.5.mlp.more.weight"):
        PretrainedFactory(run, Directory(directory))
    edit_index(directory, lambda names: [names.pop(name) for name in list(added)[1:]])
    edit_index(directory, lambda names: names.update({"model.layers.0.self_attn.rotary_emb.inv_freq": shard}))
    PretrainedFactory(run, Directory(directory))  # what older versions saved though it is computed


COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "moe_intermediate_size": 8,
}
DRAFTING: dict[str, tuple[dict[str, Any], list[str]]] = {
    "glm4_moe": (
        {
            "num_key_value_heads": 1,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
        ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight", "model.layers.3.enorm.weight"],
    ),
    "deepseek_v3": (
        {
            "num_key_value_heads": 2,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        ["model.layers.3.embed_tokens.weight", "model.layers.3.mlp.experts.1.down_proj.weight"],
    ),
    "qwen3_next": (
        {
            "num_key_value_heads": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "linear_num_value_heads": 2,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.norm.weight"],
    ),
}


@pytest.mark.parametrize("family", DRAFTING)
def test_layers_for_drafting_are_left_out_as_transformers_does_and_told(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, extra = DRAFTING[family]
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**COMMON, **options})).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), **{name: torch.ones(4) for name in extra}}, path, metadata={"format": "pt"})
    factory = factory_of(tmp_path, num_stages=2)
    said = f"model {tmp_path}: {len(extra)} tensors are left out, first {min(extra)}: no part of the 3 layers that are trained"
    assert factory.remarks[0].startswith(said)
    assert [record.getMessage() for record in caplog.records if record.name == "models.files.pretrained"] == factory.remarks
    found = {name: p.detach() for stage in range(2) for name, p in factory.build(stage).named_parameters()}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_index_decides_and_other_copies_of_the_weights_are_named(
    saved: Path, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(saved)
    save_file({"x": torch.zeros(2)}, directory / "model.safetensors")
    save_file({"x": torch.zeros(2)}, directory / "consolidated.safetensors")
    assert run_of(directory).weights == run.weights
    factory = PretrainedFactory(run, Directory(directory))
    [remark] = factory.remarks
    assert f"consolidated.safetensors and 1 more are not read: {INDEX_FILE} lists the weights" in remark
    assert remark in caplog.text
    single = tmp_path / "single"
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(single)
    shutil.copy(single / "model.safetensors", single / "consolidated.safetensors")
    [remark] = PretrainedFactory(run_of(single), Directory(single)).remarks
    assert "consolidated.safetensors is not read: model.safetensors lists the weights" in remark


BAD_NUMBERS = [math.nan, -math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_one_number_that_is_not_finite_is_refused_with_its_tensor_and_file(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """When the run is created, and at the peer that loads it; the largest finite numbers are none."""
    save_llama(tmp_path, dtype=dtype, num_hidden_layers=3)
    name = "model.layers.1.mlp.up_proj.weight"
    shard = shard_of(tmp_path, name)
    tensors = load_file(shard)
    flat = tensors[name].view(-1)
    largest = torch.finfo(dtype).max
    flat[0], flat[1] = largest, -largest
    save_file(tensors, shard, metadata={"format": "pt"})
    run = run_of(tmp_path)
    StageCompute(PretrainedFactory(run, Directory(tmp_path)), 1, precision="fp64", seed=0)
    flat[-1] = value
    save_file(tensors, shard, metadata={"format": "pt"})
    for load in (
        lambda: run_of(tmp_path),
        lambda: StageCompute(PretrainedFactory(run, Directory(tmp_path)), 1, precision="fp32", seed=0),
    ):
        with pytest.raises(ConfigError, match=rf"{shard.name}: {name} holds a number that is not finite"):
            load()


def test_every_number_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the windows end."""
    monkeypatch.setattr(shards, "_WINDOW_BYTES", 16)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 32)
    for number in range(25):
        values = torch.zeros(25, dtype=torch.bfloat16)
        values[number] = math.nan
        with tempfile.NamedTemporaryFile() as file:
            save_file({"x": values}, file.name)
            entry = shards._read_header(Path(file.name))["x"]
            with pytest.raises(ConfigError, match="x holds a number"):
                Shards.read(None, entry, lambda *_: None, hashlib.sha256())  # type: ignore[arg-type]


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    run = run_of(saved, model_options={**fields_of(str(saved), {})["model_options"], "vocab_size": 65})
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight has shape \(64, 16\), the model \(65, 16\)"):
        StageCompute(PretrainedFactory(run, Directory(saved)), 0, precision="fp32", seed=0)


def test_a_directory_with_other_weights_than_the_runs_is_refused_by_layer(directory: Path, saved: Path) -> None:
    run = run_of(saved)
    shard = shard_of(directory, "model.layers.3.mlp.up_proj.weight")
    tensors = load_file(shard)
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"is not the run's: model.layers.3 has digest [0-9a-f]{12}, the run [0-9a-f]{12}; "):
        StageCompute(PretrainedFactory(run, Directory(directory)), 1, precision="fp32", seed=0)


def test_the_digests_do_not_depend_on_how_tensors_are_spread_over_files(saved: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path / "one")
    assert not (tmp_path / "one" / INDEX_FILE).exists()
    digests = described(str(saved))["weights"]
    assert described(str(tmp_path / "one"))["weights"] == digests
    assert len(digests) == 6 + 3, "one a layer, and embedding, norm and head"


def test_what_a_model_may_be_called(saved: Path, tmp_path: Path) -> None:
    assert place_of(str(saved)) == str(saved)
    assert place_of("model", relative_to=saved.parent) == str(saved)
    assert place_of("owner/name@main") == "owner/name@main"
    assert [place_of(name) for name in ("llama-tiny", "pretrained", "package.module:factory", "nonsense", None)] == [None] * 5


def test_a_peer_without_the_files_has_the_same_modules_and_no_values(saved: Path) -> None:
    with_files = StageCompute(factory_of(saved), 1, precision="fp32", seed=0, frozen=["*.mlp.*"])
    without = StageCompute(PretrainedFactory(run_of(saved), None), 1, precision="fp32", seed=0, frozen=["*.mlp.*"])
    assert without.layout == with_files.layout
    assert {n: t.shape for n, t in without.frozen.items()} == {n: t.shape for n, t in with_files.frozen.items()}
    assert (without.has_values, without.has_frozen) == (False, False)
    with pytest.raises(LookupError):
        without.initial_masters()


# ------------------------------------------------------------------------------------------------ other names in files

MOE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 12},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, **MOE},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        **MOE,
    },
    "phi3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_renamed_tensors_of_the_files_find_their_places(family: str, tmp_path: Path) -> None:
    """Files hold an expert at a time, the model all in one; and buffers that a router learnt, which no seed gives."""
    config = CONFIG_MAPPING[family](
        **{
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **FAMILIES[family],
        }
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(sum(name.encode())))
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    factory = factory_of(tmp_path)
    found = {name: t for stage in range(NUM_STAGES) for name, t in factory.build(stage).state_dict().items()}
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    factory.save_pretrained({name: found[name] for name, _ in model.named_parameters()}, tmp_path / "again")
    files, old = Shards(Directory(tmp_path / "again")), Shards(Directory(tmp_path))
    assert files.names == old.names, "the names are those of the family's checkpoints"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected), "what is not trained is exported, too"
    computes = [StageCompute(PretrainedFactory(run_of(tmp_path), None), k, precision="fp32", seed=0) for k in range(NUM_STAGES)]
    asked_for = {name for compute in computes for name in (*compute.layout.names, *compute.frozen)}
    assert asked_for == expected.keys(), "a peer without the files takes buffers over, too"
    if (tmp_path / INDEX_FILE).exists() and family != "phi3":
        one = next(name for name in Shards(Directory(tmp_path)).names if ".experts.3." in name)
        edit_index(tmp_path, lambda names: names.pop(one))
        stage = next(k for k, span in enumerate(factory.cut.spans) if int(one.split(".")[2]) in span)
        with pytest.raises(ConfigError, match=r"the \d+ tensors that make model.layers.\d+.* do not fit together|has shape"):
            StageCompute(factory_of(tmp_path), stage, precision="fp32", seed=0)
