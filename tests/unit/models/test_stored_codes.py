"""Codes are never taken for weights, whether the configuration calls a checkpoint quantized or not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.run.models import described, fields_of, require_whole, source_of
from models.files.stored_codes import is_code, method_of
from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError

OPTIONS = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**OPTIONS)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OPTIONS))
    return tmp_path


def change(model: Path, tensors: dict[str, torch.Tensor | None], config: dict[str, Any]) -> None:
    found = {**load_file(model / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({**OPTIONS, **config}))


def fp8() -> dict[str, torch.Tensor | None]:
    return {f"{Q}.weight": torch.ones(16, 16).to(torch.float8_e4m3fn)}


CASES: dict[str, tuple[dict[str, torch.Tensor | None], dict[str, Any], str]] = {
    "fp8 with scales": (
        {**fp8(), f"{Q}.weight_scale_inv": torch.ones(1, 1)},
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantized \(fp8\)",
    ),
    "fp8 alone": (fp8(), {}, r"quantized, though .*F8_E4M3"),
    "gptq": (
        {f"{Q}.weight": None, f"{Q}.qweight": torch.zeros(2, 16, dtype=torch.int32)},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"quantized \(gptq\).*qweight",
    ),
    "bitsandbytes": (
        {f"{Q}.weight": torch.zeros(128, 1, dtype=torch.uint8), f"{Q}.weight.absmax": torch.ones(4)},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        r"quantized \(bitsandbytes\)",
    ),
    "int8 under plain names": ({f"{Q}.weight": torch.ones(16, 16, dtype=torch.int8)}, {}, r"quantized, though .*I8"),
    "a method without a name": (
        {f"{Q}.weight": torch.ones(16, 2, dtype=torch.uint32), f"{Q}.scales": torch.ones(16, 1)},
        {"quantization": {"bits": 4}},
        r"quantized \(by a method .*U32",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_is_called_that_and_refused(case: str, model: Path) -> None:
    tensors, config, said = CASES[case]
    change(model, tensors, config)
    for look in (described, require_whole):
        with pytest.raises(ConfigError, match=said) as refused:
            look(str(model))
        assert "take the model in full precision" in str(refused.value)


def test_a_configuration_that_speaks_of_quantization_over_plain_weights_is_said_to_be_ignored(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(model, {}, {"quantization_config": {"quant_method": "fp8"}})
    with caplog.at_level(logging.WARNING):
        assert described(str(model))["weights"]
    [line] = [record.getMessage() for record in caplog.records]
    assert "quantized (fp8)" in line
    assert "is ignored" in line
    assert "quantization_config" not in fields_of(str(model), {})["model_options"], "or an export would be called quantized"


def test_a_peer_takes_no_codes_for_weights_either(model: Path) -> None:
    """Of a hub's files the run's creator has seen the names alone."""
    change(model, {f"{Q}.weight": torch.ones(16, 16, dtype=torch.int8)}, {"quantization_config": {"quant_method": "x8"}})
    config = RunConfig(
        num_stages=1,
        sequence_length=8,
        model="pretrained",
        model_options=OPTIONS,
        weights={"model.safetensors": _sha256(model / "model.safetensors")},
    )
    with pytest.raises(ConfigError, match=r"quantized \(x8\).*q_proj.weight is of type I8"):
        factory_of(config, source=source_of(str(model))).build(0)


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "dtype", "codes"),
    [
        ("a.weight", "BF16", False),
        ("a.weight", "I8", True),
        ("a.inv_freq", "F8_E8M0", True),
        ("a.position_ids", "I64", False),
        ("a.bias_mask", "BOOL", False),
        ("weight", "U8", True),
    ],
)
def test_whole_numbers_that_are_no_weights_are_no_codes(name: str, dtype: str, codes: bool) -> None:
    assert is_code(name, dtype) is codes


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {}}, None),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"compression_config": []}, None),
        ({"quantization_config": "int8"}, "by a method that it does not name"),
    ],
)
def test_the_method_is_the_configurations_word(config: dict[str, Any], method: str | None) -> None:
    assert method_of(config) == method
