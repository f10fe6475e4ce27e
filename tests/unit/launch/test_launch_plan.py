"""`plan_run` and `--stages auto`: a plan before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch import plan
from launch.local import parse, resolve_plan
from swarm.base.errors import ConfigError


def test_the_plan_is_a_table_with_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--stages", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["stage", "layers", "parameters", "GFLOP/token", "work", "state", "a", "micro-batch", "sends"]
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "0-1"], ["1", "2-3"], ["2", "4-5"]]
    assert "times the mean's work" in lines[-2]


def test_auto_takes_the_fewest_stages_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    def stages(memory: str) -> list[dict[str, object]]:
        assert plan.main(["--stages", "auto", "--peer-memory", memory, "--log-format", "json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [len(stages(memory)) for memory in ("1GiB", "50MiB", "36MiB", "28MiB")] == [1, 2, 3, 6]
    assert all(row["num_bytes"] <= 36 * 2**20 for row in stages("36MiB"))


def test_memory_that_no_cut_fits_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--stages", "auto", "--peer-memory", "20MB"]) == 2
    line = capsys.readouterr().err
    assert "--peer-memory 20000000: layer 5 and what its stage has besides takes" in line
    assert plan.main(["--stages", "auto"]) == 2
    assert "--stages auto: --peer-memory SIZE must say" in capsys.readouterr().err


def test_a_number_of_stages_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--stages", "2", "--peer-memory", "30MiB"]) == 0
    assert "Peers of 30.00 MiB can NOT serve every stage" in capsys.readouterr().out


def test_a_local_swarm_is_planned_alike() -> None:
    config, _ = resolve_plan(parse(["--stages", "auto", "--peer-memory", "36MiB"]))
    assert config.num_stages == 3
    with pytest.raises(ConfigError, match="--peer-memory SIZE"):
        resolve_plan(parse(["--stages", "auto"]))


def test_a_model_whose_weights_are_cut_short_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    argv = ["--model", str(tmp_path), "--stages", "2"]
    assert plan.main(argv) == 0, "a plan needs no weights"
    weights = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.zeros(16)}, weights)
    assert plan.main(argv) == 0
    weights.write_bytes(weights.read_bytes()[:-1])
    capsys.readouterr()
    assert plan.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"plan_run: {weights}: is truncated")
    (tmp_path / "run.toml").write_text(f'model = "{tmp_path}"\nnum_stages = 2\n')
    assert plan.main(["--run", str(tmp_path / "run.toml")]) == 2
    assert plan.main(["--run", str(tmp_path / "run.toml"), "--model", "llama-tiny"]) == 0
