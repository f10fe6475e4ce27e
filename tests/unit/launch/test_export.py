"""What `export_model` writes is of use to whoever loads it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from launch import export
from models.registry import factory_of
from swarm.base.config import RunConfig


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_not_exported(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = RunConfig(model_options=small)
    parameters = {name: p.detach() for name, p in factory_of(config).build_whole().named_parameters()}
    monkeypatch.setattr(export, "_from_checkpoints", lambda options: (config, parameters, 7, "a" * 64))
    argv = ["--checkpoints", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"]
    parameters["model.layers.1.mlp.up_proj.weight"].view(-1)[3] = value
    assert export.main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "the model of step 7 is of no use: model.layers.1.mlp.up_proj.weight holds numbers that are not finite" in line
    assert not (tmp_path / "out").exists()
    parameters["model.layers.1.mlp.up_proj.weight"].view(-1)[3] = 1e30
    assert export.main(argv) == 0
