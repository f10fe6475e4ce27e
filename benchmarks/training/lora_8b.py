"""LoRA on a model of Llama-3-8B's shape, cut over stage processes that share one card, against one process with peft.

The weights are random; they lie in a sharded directory as `save_pretrained` writes it, and every launcher is the real one:
`launch_local --model DIR --lora r=8`, 1 peer per stage, activations over HTTP. The baseline (`lora_peft.py`) is
transformers and peft in one process on the same directory, data, micro-batches and steps. Adapters sit in every linear
layer but the head (q, k, v, o, gate, up, down) in both, the optimizer is on in both, and neither recomputes activations
while there is memory. Rates are those of whole steps, commits included, the first ones left out.

Memory on the card is what torch's allocator says of each process; `held` is what the process has taken from the card,
to which some hundred MiB of CUDA context come. `--small` is a model for a CPU, to try everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import ROOT, machine, publish
from launch.status import ask_all
from models.files.byte_tokenizer import write_byte_tokenizer
from swarm.base.errors import SwarmError
from swarm.base.ids import Address
from swarm.testing.launched import LaunchedSwarm, words_of
from swarm.testing.processes import free_port

SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 896,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    },
}
#: Steps before those that are timed.
WARMUP_STEPS = 2
START_TIMEOUT_S, STEP_TIMEOUT_S = 240.0, 120.0
POLL_S = 0.5
GIB = 2**30


@dataclass
class Measured:
    """One case: its committed steps as its metrics file has them, and the most memory that each process had."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    #: Process -> what (`peak_tensor_bytes`, `peak_device_bytes`, `peak_rss_bytes`, `recomputed`) -> how much.
    processes: dict[str, dict[str, int]] = field(default_factory=dict)
    card_mib: int = 0
    started_s: float = 0.0

    @property
    def rates(self) -> list[float]:
        return [step["tokens_per_s"] for step in self.steps[WARMUP_STEPS:]]


# ---------------------------------------------------------------------------------------------------- the model


def write_model(directory: Path, shape: dict[str, Any]) -> int:
    """A sharded safetensors directory of random bf16 weights, a shard a layer; returns its bytes.

    The numbers of one pool are used again and again, from another place in each tensor: which they are does not matter.
    """
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    write_byte_tokenizer(directory)
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config)
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in lm.named_parameters():
        number = next((part for part in name.split(".") if part.isdigit()), "outer")
        shards.setdefault(f"model-{number}.safetensors", []).append((name, tuple(parameter.shape)))
    pool = (0.02 * torch.randn(2**24, generator=torch.Generator().manual_seed(0))).bfloat16()
    with ThreadPoolExecutor(8) as threads:
        sizes = list(threads.map(lambda item: _write_shard(directory / item[0], item[1], pool), shards.items()))
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: file for file, tensors in shards.items() for name, _ in tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes)


def _write_shard(path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], pool: torch.Tensor) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = random.Random(path.name)
    numbers = pool.view(torch.uint8).numpy().data
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            left = 2 * torch.Size(shape).numel()
            if "norm" in name:
                file.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
                continue
            while left:
                offset = 2 * rng.randrange(len(numbers) // 4)
                left -= file.write(numbers[offset : offset + left])
    return end


# ---------------------------------------------------------------------------------------------------- memory


def _peak_rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


class CardWatch:
    """The most memory that was in use on the first card, by whatever process, as the driver tells."""

    def __init__(self, device: str) -> None:
        self.peak_mib = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if device.startswith("cuda"):
            self._thread.start()

    def _watch(self) -> None:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        while not self._ended.wait(POLL_S):
            try:
                self.peak_mib = max(self.peak_mib, int(subprocess.run(words, capture_output=True, check=True).stdout))
            except (OSError, ValueError, subprocess.CalledProcessError):
                return

    def stop(self) -> int:
        self._ended.set()
        return self.peak_mib


# ---------------------------------------------------------------------------------------------------- one process


def with_peft(options: argparse.Namespace, model: Path, data: Path, run: Path, directory: Path) -> Measured:
    result = directory / "peft.json"
    given = {"run": run, "model": model, "data": data, "steps": WARMUP_STEPS + options.repetitions, "device": options.device}
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.training.lora_peft", *words_of({**given, "out": result})]
    watch = CardWatch(options.device)
    subprocess.run(words, check=True, timeout=START_TIMEOUT_S + STEP_TIMEOUT_S, cwd=ROOT)
    found = json.loads(result.read_text())
    return Measured(found["steps"], {"peft": found["memory"]}, watch.stop(), found["started_s"])


# ---------------------------------------------------------------------------------------------------- the swarm


def started(options: argparse.Namespace, model: Path, data: Path, directory: Path, port: int) -> LaunchedSwarm:
    """The swarm's processes."""
    return LaunchedSwarm(
        directory,
        model=model,
        data=data,
        lora=options.lora,
        precision="bf16",
        compression=options.wire,
        stages=options.stages,
        sequence_length=options.sequence,
        micro_batch_size=options.micro_batch,
        target_batch_size=options.micro_batch * options.step_micro_batches,
        total_steps=1000,
        learning_rate="1e-4",
        eval_samples=0,
        checkpoint_every=0,
        timing="lan",
        delay_steps=options.delay_steps,
        peers_per_stage=1,
        trainers=1,
        device=options.device,
        in_flight=options.in_flight,
        port=port,
        quiet=True,
        memory_limit=None if options.device == "cpu" else f"{options.memory_gib / options.stages:g}GiB",
    )


def swarm(options: argparse.Namespace, model: Path, data: Path, directory: Path) -> Measured:
    port = free_port()
    watch = CardWatch(options.device)
    measured, began = Measured(), time.monotonic()
    with started(options, model, data, directory, port) as launched:
        first = launched.steps(1, START_TIMEOUT_S)[0]
        measured.started_s = time.monotonic() - began - first["seconds"]
        count = WARMUP_STEPS + options.repetitions
        measured.steps = launched.steps(count, STEP_TIMEOUT_S * count)
        measured.processes = asyncio.run(_memory(Address("127.0.0.1", port), launched))
    measured.card_mib = watch.stop()
    return measured


async def _memory(backbone: Address, launched: LaunchedSwarm) -> dict[str, dict[str, int]]:
    """Of each stage process: what the card's allocator says, main memory, and micro-batches computed twice."""
    _, replies = await ask_all(backbone, timeout_s=10.0)
    found = {}
    for reply in replies.values():
        if isinstance(reply, str) or reply.stage is None:
            raise SwarmError(f"a stage does not answer: {reply}")
        told = {key: int(reply.detail.get(key, 0)) for key in ("peak_tensor_bytes", "peak_device_bytes", "recomputed")}
        found[f"stage {reply.stage}"] = told | {"peak_rss_bytes": _peak_rss(launched.stage_pids(reply.stage)[0])}
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------------- all


def throughput_row(name: str, measured: Measured, options: argparse.Namespace, peft: Measured) -> dict[str, Any]:
    rate = statistics.median(measured.rates)
    return {
        "case": name,
        "processes": len(measured.processes),
        "tokens/s": rate,
        "lowest": min(measured.rates),
        "highest": max(measured.rates),
        "of peft": rate / statistics.median(peft.rates),
        "loss of step 1": round(measured.steps[0]["loss"], 3),
        "start (s)": measured.started_s,
        "whole card (GiB)": measured.card_mib / 1024,
    }


def memory_row(case: str, process: str, found: dict[str, int]) -> dict[str, Any]:
    return {
        "case": case,
        "process": process,
        "tensors on the card (GiB)": found["peak_tensor_bytes"] / GIB,
        "held on the card (GiB)": found["peak_device_bytes"] / GIB,
        "RSS (GiB)": found["peak_rss_bytes"] / GIB,
        "computed twice": found.get("recomputed", 0),
    }


def draw(rates: Sequence[dict[str, Any]], memory: Sequence[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.bar_label(left.bar([row["case"] for row in rates], [row["tokens/s"] for row in rates]), fmt="%.3g")
        left.set(ylabel="tokens/s", title="LoRA, optimizer on")
        names = [row["process"] for row in memory]
        right.bar(names, [row["held on the card (GiB)"] for row in memory], color="0.7", label="held by the process")
        right.bar(names, [row["tensors on the card (GiB)"] for row in memory], label="tensors")
        right.set(ylabel="GiB", title="Most memory on the card")
        right.legend()

    return on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model for a CPU: tries the script, measures nothing")
    parser.add_argument("--device", default=None, help="cpu or cuda:N (default: cuda:0, with --small cpu)")
    parser.add_argument("--directory", type=Path, default=None, help="where the model goes: 16 GB (default: a temporary one)")
    parser.add_argument("--lora", default="r=8", help="as the run's field (default: r=8, in every linear layer but the head)")
    parser.add_argument("--wire", default="8bit", help="compression of activations (default: 8bit)")
    parser.add_argument("--in-flight", default="3", help="micro-batches under way, or auto (default: 3)")
    parser.add_argument("--memory-gib", type=float, default=72, help="that all stages may take together (default: 72)")
    for name, default, text in (
        ("stages", 4, "stage processes"),
        ("sequence", None, "tokens per sample (default: 2048, with --small 128)"),
        ("micro-batch", 1, "samples per micro-batch"),
        ("step-micro-batches", None, "micro-batches per step (32, 8)"),
        ("repetitions", 4, "steps that are timed"),
        ("delay-steps", 0, "1 overlaps a commit with the next step"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    options = parser.parse_args()
    options.device = options.device or ("cpu" if options.small else "cuda:0")
    options.sequence = options.sequence or (128 if options.small else 2048)
    options.step_micro_batches = options.step_micro_batches or (8 if options.small else 32)
    return options


def main() -> None:
    options = parse()
    name = "small" if options.small else "8B"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model, data = (options.directory or directory) / "model", directory / "data.txt"
        began = time.monotonic()
        num_bytes = write_model(model, SHAPES[name])
        print(f"model of {num_bytes / 1e9:.1f} GB written in {time.monotonic() - began:.0f} s", flush=True)
        rng = random.Random(0)
        data.write_text("".join(chr(rng.randrange(32, 127)) for _ in range(2**21)))
        cut = swarm(options, model, data, directory)
        print(f"swarm: {[round(rate) for rate in cut.rates]} tokens/s", flush=True)
        peft = with_peft(options, model, data, directory / "state" / "run.json", directory)
        print(f"peft: {[round(rate) for rate in peft.rates]} tokens/s, all in {time.monotonic() - began:.0f} s", flush=True)
    cases = {"one process, peft": peft, f"{options.stages} stages": cut}
    rates = [throughput_row(case, measured, options, peft) for case, measured in cases.items()]
    memory = [
        memory_row(case, process, found) for case, measured in cases.items() for process, found in measured.processes.items()
    ]
    card = torch.cuda.get_device_name(0) if options.device.startswith("cuda") else "none"
    facts = machine() | {
        "card": card,
        "model": f"Llama of shape {name} ({num_bytes / 2e9:.2f}e9 random weights, bf16), sequence {options.sequence}, "
        f"micro-batch {options.micro_batch}, {options.step_micro_batches} micro-batches a step",
        "adapters": f"{options.lora}, in q, k, v, o, gate, up and down of every layer",
        "swarm": f"{options.stages} stage processes on one card, {options.wire} wire, {options.in_flight} micro-batches in "
        f"flight, {'a step late' if options.delay_steps else 'synchronous'}",
        "timed": f"median of {options.repetitions} whole steps after {WARMUP_STEPS}",
    }
    publish(
        "lora_8b_small" if options.small else "lora_8b",
        facts=facts,
        tables={"Throughput": rates, "Most memory of each process": memory},
        details={case: vars(measured) for case, measured in cases.items()},
        draw=draw(rates, memory),
    )


if __name__ == "__main__":
    main()
