"""The swarm's pipeline on GPUs next to a plain loop and to NCCL pipelining: tokens/s of forward and backward.

The swarm is the real one: `launch_local` with 1 peer per stage, 1 trainer and 1 backbone, activations over HTTP. Its
tokens/s are counted inside one long step, at the first stage: micro-batches whose whole round trip is done and whose
gradients are accumulated, over the time between two counts. So the optimizer is off for all, while validation, claims,
ledger, heartbeats and fp32 accumulation are on. Rows "optimizer on" are whole steps of the swarm, commits included.
The baselines are in `gpu_baselines.py`; they sum gradients in bf16 and their parameters are the same modules'.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, publish
from launch.status import ask
from swarm.base.config import TIMING_PRESETS, RunConfig
from swarm.base.errors import SwarmError
from swarm.base.ids import Address
from swarm.net.http.transport import HttpTransport
from swarm.testing.launched import LaunchedSwarm
from swarm.testing.processes import free_port

START_TIMEOUT_S = 240.0
WINDOW_TIMEOUT_S = 120.0
#: Seldom: each look takes half a millisecond of the event loop that is measured.
POLL_S = 0.2
#: Micro-batches before the first window: a few trials of the in-flight control.
WARMUP = 256


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    kind: str  # plain, nccl, swarm
    stages: int = 1
    cards: int = 1
    wire: str = "8bit"
    is_stepping: bool = False
    in_flight: str = "auto"
    is_compiled: bool = False


CASES = {
    case.name: case
    for case in (
        Case("plain", "plain"),
        Case("nccl", "nccl", stages=2, cards=2),
        Case("nccl-compiled", "nccl", stages=2, cards=2, is_compiled=True),
        Case("swarm", "swarm", stages=2, cards=2),
        Case("swarm-compiled", "swarm", stages=2, cards=2, is_compiled=True),
        Case("swarm-compiled-16bit", "swarm", stages=2, cards=2, wire="bf16", is_compiled=True),
        Case("swarm-compiled-optimizer", "swarm", stages=2, cards=2, is_stepping=True, is_compiled=True),
        Case("swarm-6-in-flight", "swarm", stages=2, cards=2, in_flight="6"),
        Case("swarm-16bit", "swarm", stages=2, cards=2, wire="bf16"),
        Case("swarm-optimizer", "swarm", stages=2, cards=2, is_stepping=True),
        Case("swarm-2-on-1", "swarm", stages=2),
        Case("swarm-4-on-1", "swarm", stages=4),
    )
}


def config_of(case: Case, options: argparse.Namespace) -> RunConfig:
    tickets = options.step_micro_batches if case.is_stepping else WARMUP + 2 * options.repetitions * options.micro_batches
    return RunConfig(
        name="gpu-pipeline",
        model="llama-small",
        num_stages=case.stages,
        sequence_length=options.sequence,
        model_options={
            "hidden_size": options.hidden,
            "intermediate_size": options.ffn,
            "vocab_size": options.vocab,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 128,
        },
        micro_batch_size=options.micro_batch,
        target_batch_size=options.micro_batch * tickets,
        total_steps=1000,
        learning_rate=1e-4,
        eval_samples=0,
        checkpoint_every=0,
        precision="bf16",
        compression=case.wire,
        delay_steps=int(case.is_stepping),
        timing=TIMING_PRESETS["lan"],
    )


@dataclass(frozen=True)
class Measured:
    """Tokens/s of each repetition; part of the time that each stage's device worked on micro-batches, if known."""

    rates: list[float]
    busy: Sequence[float] = ()


# ---------------------------------------------------------------------------------------------------- baselines


def baseline(case: Case, options: argparse.Namespace, directory: Path) -> Measured:
    run = directory / "run.json"
    run.write_bytes(config_of(case, options).to_bytes())
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu.gpu_baselines",
        case.kind,
        "--run",
        str(run),
        "--micro-batches",
        str(options.micro_batches),
        "--repetitions",
        str(options.repetitions),
    ]
    words += ["--compile"] if case.is_compiled else []
    port = free_port()
    ranks = []
    for rank in range(case.stages):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(case.stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [rank.communicate(timeout=START_TIMEOUT_S + WINDOW_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case.name} failed")
    return Measured(json.loads(outputs[0].strip().splitlines()[-1]))


# ---------------------------------------------------------------------------------------------------- the swarm


def memory_of_card(options: argparse.Namespace) -> float:
    """Bytes that training may take of each card."""
    return options.memory_gib * 2**30 or 0.9 * torch.cuda.get_device_properties(0).total_memory


def started(case: Case, options: argparse.Namespace, directory: Path, port: int) -> LaunchedSwarm:
    """The swarm's processes."""
    run, data = directory / "run.json", directory / "data.txt"
    run.write_bytes(config_of(case, options).to_bytes())
    rng = random.Random(0)
    data.write_text("".join(chr(rng.randrange(32, 127)) for _ in range(2**21)))
    return LaunchedSwarm(
        directory,
        run=run,
        data=data,
        peers_per_stage=1,
        trainers=1,
        device="auto" if case.cards > 1 else "cuda:0",
        port=port,
        quiet=True,
        in_flight=case.in_flight,
        log_level="info",
        memory_limit=int(memory_of_card(options) * case.cards / case.stages),
        compile=case.is_compiled,
    )


@dataclass(frozen=True)
class Mark:
    """What the stages had done at one moment."""

    at: float
    done: int
    busy_s: tuple[float, ...]


async def mark(transport: HttpTransport, stages: Sequence[Address]) -> Mark:
    details = [(await ask(transport, address, timeout_s=5.0)).detail for address in stages]
    return Mark(time.monotonic(), int(details[0]["accumulated"]), tuple(float(d["busy_s"]) for d in details))


async def windows(port: int, launched: LaunchedSwarm, options: argparse.Namespace, tokens: int) -> Measured:
    """Consecutive windows of micro-batches, all inside the first step."""
    transport = HttpTransport()
    try:
        stages = await _stages(transport, Address("127.0.0.1", port), launched)
        marks: list[Mark] = []
        due, until = WARMUP, time.monotonic() + START_TIMEOUT_S
        while len(marks) <= options.repetitions:
            if time.monotonic() > until or launched.ended:
                raise launched.fail(f"no progress after {marks}")
            now = await mark(transport, stages)
            if now.done >= due:
                marks.append(now)
                due, until = now.done + options.micro_batches, now.at + WINDOW_TIMEOUT_S
            await asyncio.sleep(POLL_S)
    finally:
        await transport.close()
    rates = [(b.done - a.done) * tokens / (b.at - a.at) for a, b in itertools.pairwise(marks)]
    first, last = marks[0], marks[-1]
    busy = [(b - a) / (last.at - first.at) for a, b in zip(first.busy_s, last.busy_s, strict=True)]
    return Measured(rates, busy)


async def _stages(transport: HttpTransport, backbone: Address, launched: LaunchedSwarm) -> list[Address]:
    """One peer of each stage."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and not launched.ended:
        try:
            stages = (await ask(transport, backbone, timeout_s=2.0)).stages
        except SwarmError:
            stages = ()
        if stages and all(stages):
            return [Address("127.0.0.1", members[0].port) for members in stages]
        await asyncio.sleep(0.2)
    raise launched.fail("the swarm did not start")


def swarm(case: Case, options: argparse.Namespace, directory: Path) -> Measured:
    port = free_port()
    with started(case, options, directory, port) as launched:
        if case.is_stepping:  # the first two steps are left out
            lines = launched.steps(2 + options.repetitions, START_TIMEOUT_S + WINDOW_TIMEOUT_S)
            return Measured([line["tokens_per_s"] for line in lines[2:]])
        return asyncio.run(windows(port, launched, options, options.micro_batch * options.sequence))


# ---------------------------------------------------------------------------------------------------- all


def row_of(case: Case, measured: Measured, medians: dict[str, float]) -> dict[str, Any]:
    rate = medians[case.name]

    def against(name: str) -> float:
        return rate / medians[name] if name in medians else float("nan")

    return {
        "case": case.name,
        "stages": case.stages,
        "cards": case.cards,
        "wire": case.wire if case.kind == "swarm" else "-",
        "optimizer": "on" if case.is_stepping else "off",
        "in flight": case.in_flight if case.kind == "swarm" else "-",
        "compiled": "yes" if case.is_compiled else "no",
        "tokens/s": rate,
        "lowest": min(measured.rates),
        "highest": max(measured.rates),
        "of NCCL": against("nccl"),
        "of plain": against("plain"),
        "devices busy": " ".join(f"{part:.2f}" for part in measured.busy) or "-",
    }


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        colours = ["0.6" if row["wire"] == "-" else "C0" for row in rows]
        bars = axes.barh([row["case"] for row in rows], [row["tokens/s"] for row in rows], color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.set_xlabel("tokens/s")
        axes.invert_yaxis()
        axes.margins(x=0.12)

    return on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("hidden", 4096, "hidden size; heads have 128"),
        ("ffn", 11008, "size of the feed-forward layer"),
        ("layers", 8, "layers"),
        ("vocab", 32000, "vocabulary"),
        ("sequence", 2048, "tokens per sample"),
        ("micro-batch", 1, "samples per micro-batch"),
        ("micro-batches", 128, "micro-batches per repetition"),
        ("step-micro-batches", 256, "micro-batches per step with the optimizer on"),
        ("repetitions", 3, "repetitions"),
        ("memory-gib", 0, "memory that training may take per card; 0 is nine tenths of what it has"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--name", default="", help="of the results (default: gpu_pipeline_HIDDEN)")
    parser.add_argument("--cases", default="plain,nccl,swarm", help=f"of {','.join(CASES)}")
    return parser.parse_args()


def measure_case(case: Case, options: argparse.Namespace, measured: dict[str, Measured]) -> None:
    """Adds to `measured`, or says why not."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        measure = swarm if case.kind == "swarm" else baseline
        try:
            measured[case.name] = measure(case, options, Path(directory))
        except SystemExit as error:
            print(f"{case.name}: {error}", file=sys.stderr, flush=True)
            return
    rates = [round(rate) for rate in measured[case.name].rates]
    print(f"{case.name}: {rates} tokens/s, {time.monotonic() - began:.0f} s in all", flush=True)


def main() -> None:
    options = parse()
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    measured: dict[str, Measured] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who is told to stop tells what there is
    try:
        for name in options.cases.split(","):
            measure_case(CASES[name], options, measured)
    except KeyboardInterrupt:
        print("stopped: without the cases that were to come", file=sys.stderr, flush=True)
    if not measured:
        raise SystemExit("no case was measured")
    medians = {name: statistics.median(each.rates) for name, each in measured.items()}
    rows = [row_of(CASES[name], each, medians) for name, each in measured.items()]
    facts = machine() | {
        "cards": f"{len(cards)} x {cards[0]}" if cards else "none",
        "model": f"Llama blocks, hidden {options.hidden}, ffn {options.ffn}, {options.layers} layers, vocabulary "
        f"{options.vocab}, sequence {options.sequence}, micro-batch {options.micro_batch}, bf16",
        "timed": f"median of {options.repetitions} times {options.micro_batches} micro-batches, forward and backward",
        "devices busy": "part of the time that each stage's device worked on micro-batches, by its own events",
    }
    publish(
        options.name or f"gpu_pipeline_{options.hidden}",
        facts=facts,
        tables={"Throughput": rows},
        details={name: vars(each) for name, each in measured.items()},
        draw=draw(rows),
    )


if __name__ == "__main__":
    main()
