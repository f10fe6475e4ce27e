"""A sharded checkpoint of 1.1B parameters at four stage peers: what each reads, and what it takes of memory meanwhile.

The checkpoint is a randomly initialised Llama that transformers saved (bf16, `max_shard_size`). Four real `launch_stage`
processes load their part of it, fp32 masters on the CPU; their anonymous memory (`RssAnon`) and the bytes they read
(`rchar`) are sampled until they serve. The baseline is a `launch_stage` of the smallest preset, idle. A peer may take its
stage's bytes and 15 % on top of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine, publish
from swarm.testing.launched import Launched

NUM_STAGES = 4
ALLOWED = 1.15
SHAPES: dict[str, dict[str, Any]] = {
    "1.1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_shard_size": "400MB",
    },
    "70M": {
        "hidden_size": 512,
        "num_hidden_layers": 16,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8000,
        "max_shard_size": "20MB",
    },
}
#: In a process of its own: the model's memory is gone when it ends.
_MAKE = """
import json, sys, torch, transformers
options = json.loads(sys.argv[1])
shard = options.pop("max_shard_size")
torch.set_default_dtype(torch.bfloat16)
config = transformers.LlamaConfig(**options, tie_word_embeddings=False)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[2], max_shard_size=shard)
"""


class Peer(Launched):
    """One `launch_stage`, watched from outside."""

    def __init__(self, directory: Path, name: str, **options: object) -> None:
        super().__init__("launch.stage", directory / f"{name}.log", host="127.0.0.1", threads=1, no_restart=True, **options)
        self.peak_bytes = self.bytes_read = 0
        self._began = time.monotonic()
        self.seconds = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.ended:
            try:
                self.peak_bytes = max(self.peak_bytes, _rss_anon(self.pid))
                if not self.seconds:
                    self.bytes_read = _bytes_read(self.pid)
                    if "serving stage" in self.log.read_text():
                        self.seconds = time.monotonic() - self._began
            except (OSError, IndexError):
                pass
            time.sleep(0.02)

    def until_serving(self, timeout_s: float) -> None:
        self.until(lambda: self.seconds, "serving stage", timeout_s)
        time.sleep(1.0)


def _rss_anon(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _bytes_read(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split("rchar:")[1].split()[0])


def _backbone(directory: Path, run: Path) -> Launched:
    """A backbone that creates the run."""
    return Launched("launch.backbone", directory / f"{run.stem}.log", run=run, host="127.0.0.1", log_format="json")


def _idle(directory: Path) -> Peer:
    run = directory / "idle.toml"
    run.write_text(f"num_stages = {NUM_STAGES}\n")
    with _backbone(directory, run) as backbone, Peer(directory, "idle", join=backbone.address(), stage=0) as peer:
        peer.until_serving(120)
    return peer


def measure(directory: Path, shape: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a stage, and facts."""
    model = directory / "model"
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MAKE, json.dumps(SHAPES[shape]), str(model)], capture_output=True, check=False
    )
    if made.returncode:
        raise SystemExit(made.stderr.decode()[-500:])
    idle = _idle(directory)
    run = directory / "run.toml"
    tokens = directory / "tokens"
    tokens.mkdir()
    _write_tokenizer(tokens)
    run.write_text(f'num_stages = {NUM_STAGES}\nsequence_length = 64\nmodel = "model"\ntokenizer = "tokens"\n')
    began = time.monotonic()
    rows = []
    with _backbone(directory, run) as backbone:
        address = backbone.address()
        created_s = time.monotonic() - began
        for stage in range(NUM_STAGES):  # one after another: the machine's memory is limited
            with Peer(directory, f"stage-{stage}", join=address, stage=stage, model=model) as peer:
                peer.until_serving(300)
            rows.append(_row(directory, stage, peer, idle))
    sizes = [path.stat().st_size for path in model.glob("*.safetensors")]
    facts = {
        "checkpoint": f"{shape} parameters, {sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards (bf16)",
        "idle peer (MB)": round(idle.peak_bytes / 1e6, 1),
        "creating the run, with a digest of every tensor (s)": round(created_s, 1),
    }
    return rows, facts


def _row(directory: Path, stage: int, peer: Peer, idle: Peer) -> dict[str, Any]:
    options = SHAPES[directory_shape(directory)]
    stage_bytes = 4 * stage_parameters(options)[stage]
    extra = peer.peak_bytes - idle.peak_bytes
    return {
        "stage": stage,
        "parameters (M)": stage_bytes / 4e6,
        "stage's bytes (MB)": stage_bytes / 1e6,
        "read beyond an idle peer (MB)": (peer.bytes_read - idle.bytes_read) / 1e6,
        "peak RssAnon (MB)": peer.peak_bytes / 1e6,
        "beyond idle / stage's bytes": extra / stage_bytes,
        "allowed": ALLOWED,
        "within": "yes" if extra <= ALLOWED * stage_bytes else "NO",
        "seconds": peer.seconds,
    }


def directory_shape(directory: Path) -> str:
    """Which of `SHAPES` was made in `directory`."""
    config = json.loads((directory / "model" / "config.json").read_text())
    return next(name for name, options in SHAPES.items() if options["hidden_size"] == config["hidden_size"])


def stage_parameters(options: dict[str, Any]) -> list[int]:
    """Parameters of each stage."""
    from models.registry import factory_of
    from swarm.base.config import RunConfig

    fields = {key: value for key, value in options.items() if key != "max_shard_size"}
    run = RunConfig(
        num_stages=NUM_STAGES, model="causal-lm", model_options={"model_type": "llama", "tie_word_embeddings": False, **fields}
    )
    factory: Any = factory_of(run)
    return [sum(p.numel() for p in factory.outline(stage).parameters()) for stage in range(NUM_STAGES)]


def _write_tokenizer(directory: Path) -> None:
    from models.files.byte_tokenizer import write_byte_tokenizer

    write_byte_tokenizer(directory)


def _draw(rows: list[dict[str, Any]], idle_mb: float) -> Any:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        stages = [row["stage"] for row in rows]
        axes.bar(stages, [row["peak RssAnon (MB)"] for row in rows], label="peak RssAnon")
        limit = [idle_mb + ALLOWED * row["stage's bytes (MB)"] for row in rows]
        axes.plot(stages, limit, "k_", markersize=40, label="idle peer + stage's bytes + 15 %")
        axes.set(xlabel="stage", ylabel="MB", xticks=stages, title="Memory of a stage peer that loads its part")
        axes.legend(loc="lower right")

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.1B")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows, facts = measure(Path(temporary), options.shape)
    publish(
        "load_weights",
        facts={**machine(), **facts},
        tables={"four stage peers, one after another": rows},
        draw=_draw(rows, facts["idle peer (MB)"]),
    )


if __name__ == "__main__":
    main()
