"""`launch_local --model DIR --data chat.jsonl` as a user runs it, with and without `--lora`: what comes out loads elsewhere."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from launch.export import main as export_model
from launch.local_swarm.plan import RUN_FILE
from swarm.base.config import parse_config_bytes
from swarm.feed.feed import open_feed
from swarm.testing.processes import environment, launcher
from tests.unit.feed.chat_tokenizer import write_chat_tokenizer

ANSWERS = ["paris", "madrid is the answer", "two three"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as a hub holds it: sharded, in bf16, with its tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("fine_tune") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        num_hidden_layers=4,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="60KB")
    write_chat_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"what is {i % 9}"}, {"role": "assistant", "content": ANSWERS[i % 3]}]}
        for i in range(150)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loss_of(model: Any, config_file: Path, data: Path, tokenizer: Path) -> float:
    """Mean loss on the run's held-out samples, in this process and as transformers computes it."""
    feed = open_feed(parse_config_bytes(config_file.read_bytes()), str(data), None, str(tokenizer))
    loss_sum, tokens = 0.0, 0
    for batch in feed.eval_batches():
        inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        labels = torch.from_numpy(batch.labels["labels"]).flatten()
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
        loss_sum += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        tokens += int((labels != -100).sum())
    return loss_sum / tokens


@pytest.mark.parametrize("lora", [("--lora", "r=8"), ()], ids=["adapter", "whole model"])
def test_a_fine_tuned_model_loads_elsewhere_with_the_same_loss(
    lora: tuple[str, ...], model: Path, chat: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    state, metrics, out = tmp_path / "state", tmp_path / "metrics.jsonl", tmp_path / "exported"
    command = launcher(
        "local",
        "--model",
        model,
        "--data",
        chat,
        *lora,
        "--stages",
        2,
        "--peers-per-stage",
        1,
        "--steps",
        8,
        "--sequence-length",
        48,
        "--compression",
        "none",
        "--learning-rate",
        "1e-2",
        "--state-dir",
        state,
        "--metrics",
        metrics,
        "--log-format",
        "json",
    )
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert losses[-1] < 0.97 * losses[0], losses
    told = [json.loads(line) for line in done.stdout.splitlines()]
    [evaluation] = [line["loss"] for line in told if "evaluation at step" in line["message"]]
    assert lines[-1]["eval_loss"] == pytest.approx(evaluation)
    assert lines[-1]["total_tokens"] == sum(line["tokens"] for line in lines)
    [data] = [line for line in told if line["message"].startswith("data: 150 rows, 0 left out; ")]
    assert data["trained_tokens"] < data["tokens"]
    assert lines[-1]["epoch"] == 8 * 64 / data["samples"]
    assert [line["message"] for line in told if "so taken" in line["message"]] == ["not said, and so taken: warmup_steps 1"]

    assert export_model(["--checkpoints", str(state), "--out", str(out), "--quiet", "--log-level", "warning"]) == 0
    assert f"| base | `{model.resolve()}` |" in (out / "README.md").read_text()
    if lora:
        import peft

        assert peft.PeftConfig.from_pretrained(out).base_model_name_or_path == str(model.resolve())

        assert not list(out.glob("model*")), "the base is no part of it"
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert loss_of(base, state / RUN_FILE, chat, model) > evaluation + 0.1
        found: Any = peft.PeftModel.from_pretrained(base, out)
    else:
        assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16, "as the base"
        assert (out / "generation_config.json").read_bytes() == (model / "generation_config.json").read_bytes()
        again = ["--checkpoints", str(state), "--out", str(out), "--dtype", "float32", "--quiet", "--log-level", "warning"]
        assert export_model(again) == 0
        found = AutoModelForCausalLM.from_pretrained(out)
    assert loss_of(found, state / RUN_FILE, chat, out) == pytest.approx(evaluation, abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
