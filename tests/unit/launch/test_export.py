"""What `export_model` writes is of use to whoever loads it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from launch import export
from launch.run.model_card import CARD_FILE, write_card
from launch.run.stage_tensors import StageTensors
from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.base.ids import ZERO_BALLOT
from swarm.wire.messages import CommitRecord

RECORD = CommitRecord(
    run="b" * 64, step=6, version_id="a" * 64, ballot=ZERO_BALLOT, members=((),), loss_sum=3.0, tokens=2, learning_rate=1e-3
)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_not_exported(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = RunConfig(model_options=small)
    parameters = {name: p.detach() for name, p in factory_of(config).build_whole().named_parameters()}

    def found(options: export.ExportOptions) -> export.Exported:
        export._checked(parameters, 7)
        return export.Exported(config=config, factory=factory_of(config), tensors=parameters, record=RECORD)

    monkeypatch.setattr(export, "_from_checkpoints", found)
    argv = ["--checkpoints", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"]
    parameters["model.layers.1.mlp.up_proj.weight"].view(-1)[3] = value
    assert export.main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "the model of step 7 is of no use: model.layers.1.mlp.up_proj.weight holds numbers that are not finite" in line
    assert not (tmp_path / "out").exists()
    parameters["model.layers.1.mlp.up_proj.weight"].view(-1)[3] = 1e30
    assert export.main(argv) == 0
    card = (tmp_path / "out" / CARD_FILE).read_text()
    assert "| steps | 7 of 60, 64 samples each |" in card
    assert "| training loss of the last step | 1.5000 |" in card
    assert "none: llama-tiny, from random values" in card


def test_nothing_of_an_older_model_stays_beside_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its template would be taken for the new model's. Other files stay."""
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = RunConfig(model_options=small)
    parameters = {name: p.detach() for name, p in factory_of(config).build_whole().named_parameters()}
    whole = export.Exported(config=config, factory=factory_of(config), tensors=parameters, record=RECORD)
    monkeypatch.setattr(export, "_from_checkpoints", lambda options: whole)
    out = tmp_path / "out"
    out.mkdir()
    older = ("adapter_config.json", "chat_template.jinja", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    for name in (*older, "config.json", "tokenizer.json", "notes.txt"):
        (out / name).write_text("older")
    assert export.main(["--checkpoints", str(tmp_path), "--out", str(out)]) == 0
    assert "removed of an older model there: adapter_config.json, chat_template.jinja" in capsys.readouterr().out
    assert not any((out / name).exists() for name in older)
    assert (out / "notes.txt").read_text() == "older"
    assert "older" not in ((out / "config.json").read_text(), (out / "tokenizer.json").read_text())


def test_one_part_of_a_model_is_in_memory_at_a_time() -> None:
    read: list[int] = []

    def part(number: int) -> dict[str, torch.Tensor]:
        read.append(number)
        return {f"{number}.a": torch.tensor(number), f"{number}.b": torch.tensor(-number)}

    parts = StageTensors([(frozenset({f"{n}.a", f"{n}.b"}), partial(part, n)) for n in range(3)])
    assert [int(value) for value in parts.values()] == [0, 0, 1, -1, 2, -2]
    assert read == [0, 1, 2], "each once, in order"
    assert int(parts["0.b"]) == 0
    assert "3.a" not in parts
    assert len(parts) == 6


def test_a_model_card_names_base_and_data_and_one_of_the_users_own_stays(tmp_path: Path) -> None:
    config = RunConfig(
        model="pretrained", weights_source="owner/base@0123abc", lora={"r": 4}, dataset="chat.jsonl", data_digest="e" * 64
    )
    write_card(tmp_path, config, RECORD, base="/models/base", evaluation=0.25)
    text = (tmp_path / CARD_FILE).read_text()
    assert text.startswith("---\nlibrary_name: peft\nbase_model: owner/base\n---\n")
    for part in ("`owner/base@0123abc`", "chat.jsonl, digest `" + "e" * 64, "adapters of rank 4", "held-out samples | 0.2500"):
        assert part in text
    write_card(tmp_path, config, RECORD.model_copy(update={"step": 9}), base=None)
    assert "| steps | 10 of" in (tmp_path / CARD_FILE).read_text(), "an older one is replaced"
    (tmp_path / CARD_FILE).write_text("mine")
    write_card(tmp_path, config, RECORD, base=None)
    assert (tmp_path / CARD_FILE).read_text() == "mine"
