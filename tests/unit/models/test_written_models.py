"""What an export writes is what transformers would write: types, shards, index, names, and what describes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from launch.run.models import described, fields_of
from models.files.pretrained import PretrainedFactory
from models.files.shards import INDEX_FILE, Directory, Shards
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError

LIMIT = 6_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bf16, but for its norms; sharded, with settings for generation and a word of how it had been quantized once."""
    directory = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=4,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.3)
        if "norm" in name:
            parameter.data = parameter.data.float() + 1e-3
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=9)
    model.save_pretrained(directory, max_shard_size=LIMIT)
    config_file = directory / "config.json"
    stated = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**stated, "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}))
    return directory


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def factory_of(base: Path, *, has_files: bool = True) -> PretrainedFactory:
    run = RunConfig(num_stages=2, sequence_length=16, **fields_of(str(base), {}), **described(str(base)))
    return PretrainedFactory(run, Directory(base) if has_files else None)


def parameters_of(factory: PretrainedFactory) -> dict[str, torch.Tensor]:
    return {name: p.detach() for k in range(2) for name, p in factory.build(k).named_parameters()}


def test_what_was_not_trained_comes_back_to_the_byte_and_what_was_in_the_types_of_the_base(base: Path, tmp_path: Path) -> None:
    factory = factory_of(base)
    values = parameters_of(factory)
    assert {value.dtype for value in values.values()} == {torch.float32}, "masters"
    trained = "model.layers.1.mlp.up_proj.weight"
    values[trained] = values[trained] + 1
    (tmp_path / "model.safetensors").write_bytes(b"of an older export")
    (tmp_path / "model-00007-of-00009.safetensors").write_bytes(b"so is this")
    factory.save_pretrained(values, tmp_path, factory.form(shard_bytes=LIMIT))
    old, new = tensors_in(base), tensors_in(tmp_path)
    assert new.keys() == old.keys()
    for name, value in new.items():
        assert value.dtype == old[name].dtype, name
        assert torch.equal(value, old[name]) == (name != trained), name
    ours, theirs = (json.loads((place / INDEX_FILE).read_text()) for place in (tmp_path, base))
    assert ours["metadata"] == theirs["metadata"]
    assert set(ours["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(set(ours["weight_map"].values())) == len(set(theirs["weight_map"].values())) > 3
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    settings = GenerationConfig.from_pretrained(tmp_path)
    assert (settings.temperature, settings.max_new_tokens) == (0.7, 9)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert not list(tmp_path.glob("*.partial"))


def test_without_the_bases_files_its_configuration_says_the_type(base: Path, tmp_path: Path) -> None:
    values = parameters_of(factory_of(base))
    factory = factory_of(base, has_files=False)
    factory.save_pretrained(values, tmp_path)
    assert {value.dtype for value in tensors_in(tmp_path).values()} == {torch.bfloat16}
    assert not (tmp_path / INDEX_FILE).exists()
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens is None
    factory.save_pretrained(values, tmp_path, factory.form(torch.float32))
    assert all(torch.equal(value, values[name]) for name, value in tensors_in(tmp_path).items())


def test_only_a_shard_is_in_memory_at_a_time(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.files import export

    factory, order = factory_of(base), []
    values = parameters_of(factory)

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            order.append(name)
            return super().__getitem__(name)

    written = export.save_file

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        written(tensors, path)
        order.append(path.name)

    monkeypatch.setattr(export, "save_file", save)
    factory.save_pretrained(Watched(values), tmp_path, factory.form(shard_bytes=LIMIT))
    shards = [at for at, what in enumerate(order) if what.endswith(".partial")]
    assert shards[0] < len(order) / 2, "the first shard is on disk before the last layers are read"
    layers = [name for name in order[: shards[0]] if ".layers." in name]
    assert not any(".layers.3." in name for name in layers)


def test_values_that_a_type_cannot_hold_are_refused_and_the_old_model_stays(base: Path, tmp_path: Path) -> None:
    factory = factory_of(base)
    values = parameters_of(factory)
    factory.save_pretrained(values, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    values["lm_head.weight"] = values["lm_head.weight"] * 1e6
    with pytest.raises(ConfigError, match=r"lm_head\.weight has values that float16 cannot hold: export with another --dtype"):
        factory.save_pretrained(values, tmp_path, factory.form(torch.float16))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert Shards(Directory(tmp_path)).names == values.keys()
