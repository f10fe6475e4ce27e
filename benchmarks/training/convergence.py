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
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, load, machine, publish, redraw
from benchmarks.training.convergence_runs import NUM_STAGES, SIZES, Outcome, config_of, environment, run_all, variants_of
from benchmarks.training.corpus import write_parts
from swarm.base.errors import ConfigError
from swarm.feed.feed import open_feed
from swarm.testing.launched import words_of

TITLE = "Validation loss and bytes"


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
