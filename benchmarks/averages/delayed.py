"""Delayed updates on links with real limits: is a step as long as the longer of compute and averaging, not their sum?

Real launchers: a backbone, peers of one stage, each in a network namespace whose link has `--rate` in each direction
(`shaped_namespaces`; needs root, ip and tc), and a trainer. Compute is timed occupation of the compute thread
(`big_stage`), averages are real. For each ratio of the two the step is timed with next to nothing to average (compute
alone), with nothing to compute (averaging alone), one after the other (`delay_steps = 0`) and overlapped (1).
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.averages.big_stage import DATA, MODEL, WIDTH
from benchmarks.report import machine, publish
from swarm.base.config import RunConfig
from swarm.testing.launched import Launched
from swarm.testing.shaped_namespaces import DRIVER, Place, namespaces

FORWARD_PART = 1 / 3
START_TIMEOUT_S = 120.0
#: Micro-batches under way for each peer: one that it computes, others on a link that an average fills.
IN_FLIGHT = 3
#: So few weights that their average takes no time.
FEW = 128 * WIDTH


def config_of(num_elements: int, compute_s: float, delay_steps: int, options: argparse.Namespace) -> RunConfig:
    """`compute_s` is what each peer computes in a step if all get as many micro-batches."""
    micro_batch_s = compute_s / options.tickets
    return RunConfig(
        name="delayed",
        model=MODEL,
        num_stages=1,
        micro_batch_size=1,
        target_batch_size=options.tickets * options.peers,
        model_options={
            "num_elements": num_elements,
            "forward_s": micro_batch_s * FORWARD_PART,
            "backward_s": micro_batch_s * (1 - FORWARD_PART),
        },
        total_steps=10**6,
        eval_samples=0,
        checkpoint_every=0,
        precision="fp32",
        compression="none",
        delay_steps=delay_steps,
        min_peers_per_stage=options.peers,
    )


@contextmanager
def started(config: RunConfig, places: Sequence[Place], directory: Path) -> Iterator[Launched]:
    """The whole swarm; yields its trainer. Afterwards no process is left."""
    run, logs = directory / "run.json", itertools.count()
    run.write_bytes(config.to_bytes())

    def start(role: str, place: Place, **options: object) -> Launched:
        log = directory / f"{role}-{next(logs)}"
        return swarm.enter_context(Launched(f"launch.{role}", log, prefix=place.prefix, host=place.host, **options))

    with ExitStack() as swarm:
        outside = Place(DRIVER, ())
        join = start("backbone", outside, run=run, log_format="json").address()
        stage = {"stage": 0, "device": "cpu", "threads": 1, "memory_limit": "1GiB", "allow_import": MODEL, "no_restart": True}
        for place in places:
            start("stage", place, join=join, **stage)
        metrics, in_flight = directory / "metrics.jsonl", IN_FLIGHT * len(places)
        yield start("trainer", outside, join=join, data=DATA, in_flight=in_flight, metrics=metrics)


def seconds_of(config: RunConfig, places: Sequence[Place], options: argparse.Namespace) -> list[float]:
    """Of each step after the warm-up."""
    count = options.warmup + options.steps
    with tempfile.TemporaryDirectory() as name, started(config, places, Path(name)) as trainer:
        lines = trainer.steps(count, START_TIMEOUT_S * count)
    return [line["seconds"] for line in lines[options.warmup :]]


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    rows: list[dict[str, Any]] = []
    details: dict[str, list[float]] = {}

    def timed(what: str, num_elements: int, compute_s: float, delay_steps: int) -> float:
        details[what] = seconds_of(config_of(num_elements, compute_s, delay_steps, options), places, options)
        print(f"  {what}: {json.dumps([round(s, 3) for s in details[what]])}", file=sys.stderr, flush=True)
        return statistics.median(details[what])

    with namespaces([options.rate * 1e6] * options.peers) as places:
        averaging = timed("averaging alone", options.elements, 0.0, 0)
        for ratio in options.ratios:
            case = f"compute {ratio:g} x averaging"
            compute_s = ratio * averaging
            compute = timed(f"{case}, compute alone", FEW, compute_s, 0)
            after = timed(f"{case}, delay 0", options.elements, compute_s, 0)
            beside = timed(f"{case}, delay 1", options.elements, compute_s, 1)
            rows.append(
                {
                    "case": case,
                    "compute alone s": compute,
                    "averaging alone s": averaging,
                    "delay 0 s": after,
                    "of the sum": after / (compute + averaging),
                    "delay 1 s": beside,
                    "of the longer": beside / max(compute, averaging),
                }
            )
    return rows, details


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        shown = ("compute alone s", "averaging alone s", "delay 0 s", "delay 1 s")
        for i, key in enumerate(shown):
            places = [x + 0.2 * (i - 1.5) for x in range(len(rows))]
            axes.bar(places, [row[key] for row in rows], 0.2, label=key.removesuffix(" s"), color=("0.8", "0.6", "C1", "C0")[i])
        axes.set_xticks(range(len(rows)), [row["case"] for row in rows])
        axes.set_ylabel("seconds per step")
        axes.legend()

    return on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("peers", 4, "peers of the stage"),
        ("elements", 3_000_000, "fp32 weights"),
        ("tickets", 16, "micro-batches per peer and step"),
        ("steps", 4, "steps that are timed"),
        ("warmup", 2, "steps before them"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--rate", type=float, default=50.0, metavar="MBIT", help="of each link, in Mb/s (default: 50)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[2.0, 1.0, 0.5], metavar="X", help="of compute to averaging (default: 2 1 0.5)"
    )
    parser.add_argument("--name", default="delayed", help="of the result files (default: delayed)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    facts = machine()
    rows, details = measure(options)
    bound = 2 * (options.peers - 1) / options.peers * options.elements * 32 / (options.rate * 1e6)
    facts |= {
        "links": f"{options.peers} peers, {options.rate:g} Mb/s each way, one network namespace with tbf each",
        "averages": f"{options.elements} fp32 values; 2(n-1)/n of their bytes take {bound:.2f} s on such a link",
        "compute": f"occupation of the compute thread, {options.tickets} micro-batches per peer and step",
        "timed": f"median of {options.steps} steps after {options.warmup}",
    }
    publish(options.name, facts=facts, tables={"Seconds per step": rows}, details=details, draw=draw(rows))


if __name__ == "__main__":
    main()
