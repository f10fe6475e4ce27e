"""The runs that `convergence.py` compares: each variant's configuration, and its plain process or its swarm of processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT
from launch.run.models import described, fields_of
from launch.status import ask
from swarm.base.config import RunConfig, parse_config
from swarm.base.errors import SwarmError
from swarm.base.ids import Address, parse_address
from swarm.net.http.transport import HttpTransport
from swarm.testing.launched import words_of

NUM_STAGES = 2
ASK_EVERY_S = 1.0
LAST_ASK_EVERY_S = 0.1
ASK_TIMEOUT_S = 5.0
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    "3m": {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8},
    "10m": {"hidden_size": 384, "intermediate_size": 960, "num_hidden_layers": 6, "num_attention_heads": 8},
}


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    #: Fields of `RunConfig` in which it differs from the synchronous run.
    fields: dict[str, Any] = field(default_factory=dict)
    #: Inner steps for each step of the run.
    inner_steps: int = 1
    is_plain: bool = False


def variants_of(options: argparse.Namespace) -> dict[str, Variant]:
    """By the name that `--variants` knows."""
    local = {"mode": "local", "inner_batch_size": options.batch // options.peers_per_stage}
    outer = {"outer_learning_rate": options.outer_learning_rate, "outer_momentum": options.outer_momentum}
    cocktail = {"mode": "local", "average_compression": "cocktail"}  # as published, without more words
    few, many = options.inner_steps
    return {
        "single": Variant("single process", is_plain=True),
        "sync": Variant("synchronous"),
        "8bit": Variant("synchronous, 8-bit activations", {"compression": "8bit"}),
        "delayed": Variant("delayed", {"delay_steps": 1}),
        "diloco-few": Variant(f"DiLoCo, H={few}", {**local, **outer}, inner_steps=few),
        "diloco-many": Variant(f"DiLoCo, H={many}", {**local, **outer}, inner_steps=many),
        "cocktail-87": Variant("CocktailSGD, 87x", {**cocktail, "cocktail_top": 0.2}),
        "cocktail-117": Variant("CocktailSGD, 117x", {**cocktail, "cocktail_top": 0.09}),
        "powersgd": Variant("PowerSGD, rank 4", {"average_compression": "powersgd", "powersgd_rank": 4}),
    }


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a configuration says of the model: where its first parameters come from."""
    if options.start is not None:
        return fields_of(options.start, {}) | described(options.start)
    return {"model": "llama-tiny", "model_options": {**SIZES[options.size], "initializer_range": 0.02}}


def config_of(variant: Variant, options: argparse.Namespace) -> RunConfig:
    """
    Raises:
        ConfigError: this version does not know the variant's fields, or refuses their combination.
    """
    step_tokens = options.batch * options.sequence * variant.inner_steps
    fields = {
        "name": "convergence",
        **model_of(options),
        "num_stages": NUM_STAGES,
        "sequence_length": options.sequence,
        "micro_batch_size": options.micro_batch,
        "target_batch_size": options.batch * variant.inner_steps,
        "total_steps": options.tokens // step_tokens,
        "learning_rate": options.learning_rate,
        "warmup_steps": round(options.warmup_tokens / step_tokens),
        "precision": "fp32",
        "compression": "none",
        "seed": options.seed,
        "eval_samples": options.eval_samples,
        "eval_every": max(1, round(options.eval_every / step_tokens)),
        "checkpoint_every": 0,
        "checkpoint_copies": 1,
    }
    return parse_config({**fields, **variant.fields}, where=variant.name)


def places(options: argparse.Namespace) -> list[str]:
    """Options of the programs that train: where data and first parameters lie."""
    data = ["--data", options.data] if options.data is not None else []
    return [*data, "--model", options.start] if options.start is not None else data


# ---------------------------------------------------------------------------------------------------- one variant


@dataclass
class Outcome:
    """What one variant came to."""

    variant: Variant
    config: RunConfig
    seconds: float = 0.0
    steps: int = 0
    #: (tokens, validation loss).
    curve: list[tuple[int, float]] = field(default_factory=list)
    #: The last that each stage peer told of itself (stage, step and its counters), by peer.
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str = ""

    @property
    def is_done(self) -> bool:
        return self.steps == self.config.total_steps

    @property
    def step_tokens(self) -> int:
        return self.config.target_batch_size * self.config.sequence_length

    def bytes_per_token(self, counter: str) -> float:
        """Mean over peers, each divided by the tokens of the steps that had committed when it told."""
        each = [peer[counter] / (peer["step"] * self.step_tokens) for peer in self.peers.values() if peer["step"] > 0]
        return sum(each) / len(each) if each else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "validation": self.curve,
            "config": self.config.model_dump(mode="json"),
            "steps": self.steps,
            "seconds": self.seconds,
            "peers": self.peers,
        }

    def resume(self, earlier: Mapping[str, Any]) -> None:
        """Adopt `earlier`, which `to_json` wrote, if it is of the same configuration and came to its end."""
        if (earlier["config"], earlier["steps"]) == (self.config.model_dump(mode="json"), self.config.total_steps):
            self.curve = [(tokens, loss) for tokens, loss in earlier["validation"]]
            self.steps, self.seconds, self.peers = earlier["steps"], earlier["seconds"], dict(earlier["peers"])


async def plain(outcome: Outcome, run: Path, cores: Sequence[int], options: argparse.Namespace) -> None:
    metrics = run.with_name("metrics.jsonl")
    given = {"run": run, "metrics": metrics, "threads": len(cores) or 1, "device": options.device}
    words = ["-m", "benchmarks.plain_loop", *words_of(given), *places(options)]
    try:
        async with child(words, cores, run.parent):
            pass
    finally:
        for line in map(json.loads, metrics.read_text().splitlines() if metrics.exists() else ()):
            outcome.steps = line["step"]
            if "eval_loss" in line:
                outcome.curve.append((line["step"] * outcome.step_tokens, line["eval_loss"]))


async def swarm(outcome: Outcome, run: Path, cores: Sequence[int], options: argparse.Namespace) -> None:
    given = {"run": run, "peers_per_stage": options.peers_per_stage, "trainers": 1, "threads": 1, "device": options.device}
    given |= {"state_dir": run.with_name("state"), "log_format": "json"}
    words = ["-m", "launch.local", *words_of(given), *places(options)]
    asking: asyncio.Task[None] | None = None
    last = asyncio.Event()
    try:
        async with child(words, cores, run.parent) as output:
            async for text in output:
                line = json.loads(text)
                if asking is None and "address" in line:
                    asking = asyncio.create_task(ask_on(parse_address(line["address"]), outcome, last))
                if "tokens_per_s" in line:
                    outcome.steps = line["step"]
                    if outcome.is_done:
                        last.set()
                elif line["message"].startswith("evaluation at"):
                    outcome.curve.append((line["step"] * outcome.step_tokens, line["loss"]))
    finally:
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def ask_on(backbone: Address, outcome: Outcome, last: asyncio.Event) -> None:
    """Keep what every stage peer tells of itself, each second until all have committed the last step."""
    transport = HttpTransport(connect_s=ASK_TIMEOUT_S)
    try:
        while not outcome.peers or any(x["step"] < outcome.config.total_steps for x in outcome.peers.values()):
            if last.is_set():  # a wait that is over would not see that this task is cancelled
                await asyncio.sleep(LAST_ASK_EVERY_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(last.wait(), ASK_EVERY_S)
            with contextlib.suppress(SwarmError):
                first = await ask(transport, backbone, timeout_s=ASK_TIMEOUT_S)
                addresses = [Address(x.host, x.port) for members in first.stages for x in members]
                asked = (ask(transport, address, timeout_s=ASK_TIMEOUT_S) for address in addresses)
                for reply in await asyncio.gather(*asked):
                    outcome.peers[reply.member.peer] = {"stage": reply.stage, "step": reply.step, **reply.detail}
    finally:
        await transport.close()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}  # variants may share cores


@contextlib.asynccontextmanager
async def child(words: Sequence[str], cores: Sequence[int], directory: Path) -> AsyncIterator[asyncio.StreamReader]:
    """A Python process on `cores`, and what it prints; awaits its end, or ends it.

    Raises:
        SwarmError: it failed.
    """
    with (directory / "errors").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=2**20,
            env=environment(),
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
    assert process.stdout is not None
    try:
        yield process.stdout
        await process.communicate()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.communicate()
    if process.returncode:
        lines = (directory / "errors").read_text().strip().splitlines()
        raise SwarmError(f"exit code {process.returncode}: {' | '.join(lines[-3:])}")


# ---------------------------------------------------------------------------------------------------- all variants


async def run_all(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    """At most `--jobs` at once, until all are done or the time is over."""
    available = sorted(os.sched_getaffinity(0))
    slots: asyncio.Queue[list[int]] = asyncio.Queue()
    for job in range(options.jobs):
        slots.put_nowait(available[job * options.cores_per_job : (job + 1) * options.cores_per_job])

    async def one(outcome: Outcome) -> None:
        cores = await slots.get()
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as name:
                run = Path(name) / "run.json"
                run.write_bytes(outcome.config.to_bytes())
                await (plain if outcome.variant.is_plain else swarm)(outcome, run, cores, options)
        except SwarmError as error:
            outcome.failure = str(error)
        finally:
            outcome.seconds = time.monotonic() - began
            slots.put_nowait(cores)
            loss = outcome.curve[-1][1] if outcome.curve else float("nan")
            print(
                f"  {outcome.variant.name}: {outcome.steps} steps, {loss:.4f}, {outcome.seconds:.0f} s {outcome.failure}",
                file=sys.stderr,
                flush=True,
            )

    tasks = [asyncio.create_task(one(outcome)) for outcome in outcomes if not outcome.is_done]
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=options.within_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
