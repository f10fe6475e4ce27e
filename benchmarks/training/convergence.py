"""What a way to synchronise costs in validation loss, and what it saves in bytes: each beside one plain process.

A causal language model of `--size` parameters learns the built-in English text, or Python's own sources
(`--corpus stdlib`, of which none is seen twice), one byte a token; every variant sees the same tokens in the same batches,
and is evaluated on the same held-out samples. `single` is `plain_loop.py`: one process, the same configuration. Each other
variant is a swarm of real processes (`launch_local`, 2 stages). Bytes are those that stage peers counted when the last step
had committed: of averages, per peer and token, and of everything.

With `--start-tokens N` one process trains the model on N tokens of other text first, and every variant, `single` too,
begins with those parameters and an optimizer of its own: what synchronises seldom or late is meant for a model whose first
steps are over (DiLoCo's paper begins so, and `swarm/averaging/MODES.md` says what it costs to begin at once).

In the local variants the peers of a stage take an inner step on as many samples together as the synchronous batch has, and
H of them make an outer step; schedule and warm-up follow outer steps. Variants are commands independent of each other:
`--jobs` of them run at once, each on `--cores-per-job` cores of its own, or all at once where `--cores-per-job 0` lets
them share. Losses do not depend on that. A run that is long may be made in parts: `--resume` keeps what earlier ones of
the same name have finished.

8-bit activations against none, 300 steps of 10 million parameters, with results of their own:

    python -m benchmarks.training.convergence --size 10m --tokens 614400 --batch 16 \
        --variants single sync 8bit --name convergence_10m
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, load, machine, publish, redraw
from benchmarks.training.corpus import write_parts
from launch.run.models import described, fields_of
from launch.status import ask
from swarm.base.config import RunConfig, parse_config
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.ids import Address, parse_address
from swarm.feed.feed import open_feed
from swarm.net.http.transport import HttpTransport
from swarm.testing.launched import words_of

NUM_STAGES = 2
TITLE = "Validation loss and bytes"
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
    mean = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    cocktail = {**local, **mean, "average_compression": "cocktail", "fragments": 10}
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


def prepare(options: argparse.Namespace, directory: Path) -> None:
    """Write the corpus and train what every variant begins with; `options.data` and `.start` say where they are."""
    options.data = options.start = start_data = None
    if options.corpus == "stdlib":
        start_data, options.data = map(str, write_parts(directory, 2))
    if not options.start_tokens:
        return
    first = argparse.Namespace(
        **{
            **vars(options),
            "tokens": options.start_tokens,
            "eval_every": options.start_tokens,
            "learning_rate": options.start_learning_rate,
        }
    )
    run, model = directory / "start.json", directory / "start"
    run.write_bytes(config_of(variants_of(first)["single"], first).to_bytes())
    given = {"run": run, "metrics": directory / "start.jsonl", "threads": len(os.sched_getaffinity(0)), "device": options.device}
    given |= {"export": model, "data": start_data or None}
    words = [sys.executable, "-m", "benchmarks.plain_loop", *words_of(given)]
    subprocess.run(words, check=True, cwd=ROOT, env=environment())
    options.start = str(model)


def row_of(outcome: Outcome, single: Outcome | None, sync: Outcome | None) -> dict[str, Any]:
    loss = outcome.curve[-1][1]
    average = outcome.bytes_per_token("average_bytes_sent")
    reference = sync.bytes_per_token("average_bytes_sent") if sync else 0.0
    is_like_single = single is not None and single.curve and single.curve[-1][0] == outcome.curve[-1][0]
    return {
        "variant": outcome.variant.name,
        "steps": f"{outcome.steps} x {outcome.variant.inner_steps}",
        "tokens": outcome.curve[-1][0],
        "validation loss": loss,
        "% from single": 100 * (loss / single.curve[-1][1] - 1) if single and is_like_single else "-",
        "B/token of averages": average if outcome.peers else "-",
        "x fewer": reference / average if average and reference else "-",
        "B/token in all": outcome.bytes_per_token("bytes_sent") if outcome.peers else "-",
        "s": outcome.seconds,
    }


def facts_of(outcomes: Sequence[Outcome], skipped: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    feed = open_feed(outcomes[0].config, options.data, None, None)
    text = "built-in English text" if options.corpus == "builtin" else "sources of Python's standard library"
    begun = ""
    if options.start is not None:
        begun = f"; begun with {options.start_tokens} tokens of other text, learning rate {options.start_learning_rate:g}"
    distinct = feed.num_samples * options.sequence
    sizes = {peer["stage"]: peer["parameters"] for outcome in outcomes for peer in outcome.peers.values()}
    facts = {
        "model": f"llama, {sum(sizes.values()) / 1e6:.1f} million parameters in {NUM_STAGES} stages" if sizes else options.size,
        "data": f"{text}, one byte a token: {options.tokens} tokens are {options.tokens / distinct:.2f} epochs "
        f"of {distinct}; validation on {options.eval_samples} samples of {options.sequence} held-out tokens{begun}",
        "swarm": f"{options.peers_per_stage} peers per stage, on {options.device}",
        "batch": f"{options.batch} samples of {options.sequence} tokens, {options.micro_batch} in a micro-batch",
        "optimizer": f"AdamW, learning rate {options.learning_rate:g} after {options.warmup_tokens} tokens, cosine; DiLoCo's "
        f"outer {options.outer_learning_rate:g} with Nesterov momentum {options.outer_momentum:g}",
        "bytes": "sent per stage peer and token, mean over the peers",
    }
    if skipped:
        facts["skipped"] = "; ".join(skipped)
    unfinished = [f"{x.variant.name}: {x.failure or 'the time was over'}" for x in outcomes if not x.is_done or x.failure]
    if unfinished:
        facts["unfinished"] = "; ".join(unfinished)
    return facts


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    curves, costs = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, row in enumerate(result["tables"][TITLE]):
        name, colour = row["variant"], f"C{index % 10}"
        curves.plot(*zip(*result["details"][name]["validation"], strict=True), ".-", color=colour, label=name, lw=1)
        if "-" not in (row["B/token of averages"], row["% from single"]):
            costs.plot(row["B/token of averages"], row["% from single"], "o", color=colour, label=name)
    curves.set(xlabel="tokens", ylabel="validation loss, nats per token")
    curves.legend(fontsize=7)
    costs.set(xlabel="bytes of averages per peer and token", ylabel="% from the single process's loss", xscale="log")
    costs.axhline(0, color="0.6", lw=1)


QUICK = {
    "size": "tiny",
    "tokens": 8 * 64 * 24,
    "sequence": 64,
    "inner_steps": [2, 6],
    "eval_samples": 16,
    "eval_every": 8 * 64 * 6,
    "warmup_tokens": 8 * 64 * 2,
    "cores_per_job": 1,
    "within_s": 170,
    "name": "convergence_quick",
}


def parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="of the table (default: all that this version knows)")
    parser.add_argument("--size", choices=sorted(SIZES), default="3m", help="of the model (default: 3m)")
    for name, default, text in (
        ("tokens", 1_024_000, "tokens that every variant sees"),
        ("sequence", 128, "tokens per sample"),
        ("batch", 8, "samples per step of the synchronous run, and per inner step of all peers together"),
        ("micro-batch", 2, "samples per micro-batch"),
        ("peers-per-stage", 2, "peers of each stage"),
        ("eval-every", 102_400, "tokens between evaluations"),
        ("eval-samples", 128, "held-out samples per evaluation"),
        ("warmup-tokens", 25_600, "tokens of linear warm-up"),
        ("start-tokens", 0, "tokens that one process trains what all begin with; 0 begins with random values"),
        ("seed", 0, "of initial values and data order"),
        ("jobs", 0, "variants at once; 0 is as many as have cores of their own"),
        ("cores-per-job", 2, "cores that a variant is pinned to; 0 pins nothing"),
        ("within-s", 540, "seconds after which what still runs is ended and reported as far as it came"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    for name, number, text in (
        ("learning-rate", 1e-3, "of AdamW, at its peak"),
        ("start-learning-rate", 1e-3, "the same, in the training that all begin with"),
        ("outer-learning-rate", 0.7, "of DiLoCo"),
        ("outer-momentum", 0.9, "of DiLoCo"),
    ):
        parser.add_argument(f"--{name}", type=float, default=number, metavar="X", help=f"{text} (default: {number})")
    parser.add_argument("--inner-steps", type=int, nargs=2, default=[20, 100], metavar="H", help="of DiLoCo (default: 20 100)")
    parser.add_argument(
        "--corpus",
        choices=("builtin", "stdlib"),
        default="builtin",
        help="460 KB of English, or 12 MB of Python, half of it for the start (default: builtin)",
    )
    parser.add_argument("--device", default="cpu", help="of stages and of the single process (default: cpu)")
    parser.add_argument("--resume", action="store_true", help="run only what the results of --name do not hold finished")
    parser.add_argument("--quick", action="store_true", help="only shows that everything works")
    parser.add_argument("--redraw", action="store_true", help="only draw the plot again, from the JSON")
    parser.add_argument("--name", default="convergence", help="of the result files (default: convergence)")
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    known = variants_of(options)
    options.variants = options.variants or list(known)
    if unknown := set(options.variants) - set(known):
        parser.error(f"--variants: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if options.batch % (options.peers_per_stage * options.micro_batch):
        parser.error("--batch is a multiple of --peers-per-stage times --micro-batch")
    for steps in (1, *options.inner_steps):
        if options.tokens % (options.batch * options.sequence * steps):
            parser.error(f"--tokens is no multiple of {options.batch * options.sequence * steps}, the tokens of {steps} steps")
    options.jobs = options.jobs or (max(1, cores // options.cores_per_job) if options.cores_per_job else len(options.variants))
    if options.jobs * options.cores_per_job > cores:
        parser.error(f"--jobs {options.jobs} times --cores-per-job {options.cores_per_job} is more than {cores} cores")
    return options


def main() -> int:
    options = parse()
    if options.redraw:
        redraw(options.name, draw)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    with tempfile.TemporaryDirectory() as directory:
        prepare(options, Path(directory))
        return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Train every variant and publish what they came to; 1 if one did not end."""
    known, outcomes, skipped = variants_of(options), [], []
    facts = machine()
    for name in options.variants:
        try:
            outcomes.append(Outcome(known[name], config_of(known[name], options)))
        except ConfigError as error:
            skipped.append(str(error))
            print(f"  skipped: {error}", file=sys.stderr, flush=True)
    if options.resume:
        earlier = load(options.name)["details"] if (RESULTS / f"{options.name}.json").exists() else {}
        for outcome in outcomes:
            if outcome.variant.name in earlier:
                outcome.resume(earlier[outcome.variant.name])
        facts["finished before"] = ", ".join(x.variant.name for x in outcomes if x.is_done) or "nothing"
    asyncio.run(run_all(outcomes, options))
    shown = [outcome for outcome in outcomes if outcome.curve]
    if not shown:
        raise SystemExit("; ".join(f"{x.variant.name}: {x.failure or 'no evaluation in time'}" for x in outcomes))
    references = [next((x for x in shown if x.variant == known[name]), None) for name in ("single", "sync")]
    rows = [row_of(outcome, *references) for outcome in shown]
    details = {outcome.variant.name: outcome.to_json() for outcome in outcomes}
    facts |= facts_of(outcomes, skipped, options)
    tables = {TITLE: rows}
    publish(
        options.name,
        facts=facts,
        tables=tables,
        details=details,
        draw=lambda figure: draw(figure, {"tables": tables, "details": details}),
    )
    return 0 if all(x.is_done and not x.failure for x in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
