"""What moving peers between stages gains: under a trace of preemptions, and in live swarms.

`--trace` is the paper's experiment (arXiv 2301.11913, section 4.4) in a simulation that runs the product's own policies;
`rebalancing_trace.py` describes the model. `--live equal` and `--live unequal` run swarms of real processes whose compute
is timed occupation of the compute thread (`timed_model.py`), so that two cores carry ten peers; all else is real. Their
references: swarms that were started with the best assignment, and the sum of what the peers can do alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import machine, publish
from benchmarks.scheduling.rebalancing_trace import Outcome, Pipeline, Trace

#: seconds between decisions -> what the paper reports: overall, first hour, last hour.
PAPER = {0.0: (0.827, 0.990, 0.454), 300.0: (0.958, 0.994, 0.889), 60.0: (0.976, 0.998, 0.917)}


def trace(num_seeds: int) -> None:
    settings = Trace()
    outcomes = {period: [Pipeline(settings, period, seed).run() for seed in range(num_seeds)] for period in PAPER}
    last = settings.hours - 1
    rows = []
    for period, runs in outcomes.items():
        parts = [run.part() for run in runs]
        rows.append(
            {
                "rebalancing": f"every {period:g} s" if period else "none",
                "overall": statistics.fmean(parts),
                "min": min(parts),
                "max": max(parts),
                "first hour": statistics.fmean(run.part(0, 1) for run in runs),
                "last hour": statistics.fmean(run.part(last) for run in runs),
                "moves": statistics.fmean(run.num_moves for run in runs),
                "paper overall": PAPER[period][0],
                "paper first": PAPER[period][1],
                "paper last": PAPER[period][2],
            }
        )
    publish(
        "rebalancing_trace",
        facts={**machine(), "settings": dataclasses.asdict(settings), "seeds": num_seeds},
        tables={"throughput as a part of the optimum": rows},
        details={str(period): [run.part() for run in runs] for period, runs in outcomes.items()},
        draw=lambda figure: _draw_trace(figure, outcomes),
    )


def _draw_trace(figure: Any, outcomes: dict[float, list[Outcome]]) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for period, runs in outcomes.items():
        points = list(zip(*(run.curve for run in runs), strict=False))
        smooth = [points[i : i + 10] for i in range(0, len(points), 10)]
        above.plot(
            [window[0][0][0] for window in smooth],
            [statistics.fmean(part for at in window for _, _, part in at) for window in smooth],
            label=f"every {period:g} s" if period else "no rebalancing",
        )
    above.set_ylabel("part of the optimum")
    above.legend()
    first = outcomes[0.0][0]
    below.plot([hour for hour, _, _ in first.curve], [peers for _, peers, _ in first.curve])
    below.set_ylabel("peers")
    below.set_xlabel("hour")


def live_equal(num_steps: int) -> None:
    """3 stages, peers 6/2/2; later all but one peer of a stage are killed. The references run beside it."""
    from benchmarks.scheduling.rebalancing_live import Settings, Swarm, measure, spread

    settings, still = Settings(), Settings(rebalance=False)
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}

    def compare(what: str, swarm: Swarm, periods: float, reference: Swarm) -> None:
        best, moved = measure([reference, swarm], num_steps, skip=3)
        for name, one, phase, waited in (("started best", reference, best, 0.0), (what, swarm, moved, periods)):
            rows.append(
                {
                    "swarm": name,
                    "peers": "/".join(str(len(found)) for found in one.stages().values()),
                    "periods": waited,
                    "tickets/s": phase.tickets_per_s,
                    "of the reference": phase.tickets_per_s / best.tickets_per_s,
                }
            )
            print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as directory, Swarm(Path(directory) / "moved", spread([6, 2, 2]), settings) as swarm:
        with Swarm(Path(directory) / "best", spread([4, 3, 3]), still) as reference:
            swarm.wait("a step", lambda found: found, 300.0)
            periods = swarm.periods_until_best(lambda: _is_best(swarm.stages(), 10))
            compare("6/2/2, moved", swarm, periods, reference)
        with Swarm(Path(directory) / "best_of_8", spread([3, 3, 2]), still) as reference:
            stage = next(k for k, found in swarm.stages().items() if len(found) == 3)
            killed = swarm.kill_all_but_one(stage)
            periods = swarm.periods_until_best(lambda: _is_best(swarm.stages(), 8))
            reference.wait("a step", lambda found: found, 300.0)
            compare(f"stage {stage} lost {len(killed)}", swarm, periods, reference)
        details["seconds of all steps"] = [line["seconds"] for line in swarm.lines()]
        details["peers at all steps"] = [line["peers"] for line in swarm.lines()]
        details["retries"] = sum(line["retries"] for line in swarm.lines())
    publish(
        "rebalancing_equal",
        facts={**machine(), "settings": dataclasses.asdict(settings), "steps": num_steps},
        tables={"equal peers, 3 stages": rows},
        details=details,
        draw=lambda figure: _draw_live(figure, details),
    )


def _is_best(stages: dict[int, list[int]], num_peers: int) -> bool:
    """So many equal peers are all there, and no assignment of them is faster."""
    counts = [len(found) for found in stages.values()]
    return sum(counts) == num_peers and min(counts) == num_peers // len(counts)


def live_unequal(num_steps: int) -> None:
    """Two fast and four slow peers, a quarter of the speed, placed badly."""
    from benchmarks.scheduling.rebalancing_live import Peer, Settings, Swarm, best_rate, measure

    settings = Settings(seconds=0.5, tickets_per_step=32, period_s=20.0, delay_steps=1, in_flight=24)
    peers = [Peer(0), Peer(0, 4.0), Peer(1), Peer(1, 4.0), Peer(2, 4.0), Peer(2, 4.0)]
    alone = best_rate(peers, settings.seconds)
    details: dict[str, Any] = {}

    def speeds(swarm: Swarm) -> list[float]:
        return [sum(1 / peers[index].slowness for index in found) for found in swarm.stages().values()]

    with tempfile.TemporaryDirectory() as directory, Swarm(Path(directory) / "unequal", peers, settings) as swarm:
        before = swarm.wait("a step", lambda found: found, 300.0)[-1]
        periods = swarm.periods_until_best(lambda: min(speeds(swarm)) >= 1.0)
        (phase,) = measure([swarm], num_steps, skip=4)
        details["seconds of all steps"] = [line["seconds"] for line in swarm.lines()]
        details["peers at all steps"] = [line["peers"] for line in swarm.lines()]
        rows = [
            {"swarm": "as placed", "periods": 0.0, "tickets/s": before["tickets"][0] / before["seconds"]},
            {"swarm": "moved", "periods": periods, "tickets/s": phase.tickets_per_s},
            {"swarm": "sum of what each can do alone", "periods": 0.0, "tickets/s": alone},
        ]
    for row in rows:
        row["of the sum"] = row["tickets/s"] / alone
    publish(
        "rebalancing_unequal",
        facts={**machine(), "settings": dataclasses.asdict(settings), "steps": num_steps},
        tables={"two fast and four slow peers (a quarter of the speed), 3 stages": rows},
        details=details,
        draw=lambda figure: _draw_live(figure, details),
    )


def _draw_live(figure: Any, details: dict[str, Any]) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    ends = [sum(details["seconds of all steps"][: i + 1]) for i in range(len(details["seconds of all steps"]))]
    above.step(ends, details["seconds of all steps"], where="pre")
    above.set_ylabel("seconds per step")
    for stage, counts in enumerate(zip(*details["peers at all steps"], strict=True)):
        below.step(ends, counts, where="post", label=f"stage {stage}")
    below.set_ylabel("peers listed")
    below.set_xlabel("seconds")
    below.legend()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="32 stages under preemption, simulated")
    parser.add_argument("--seeds", type=int, default=10, help="traces that are averaged over")
    parser.add_argument("--live", choices=["equal", "unequal"], help="real processes with timed compute")
    parser.add_argument("--steps", type=int, default=6, help="steps that each live figure is measured over")
    options = parser.parse_args()
    if not options.trace and not options.live:
        parser.error("--trace, --live equal or --live unequal")
    if options.trace:
        trace(options.seeds)
    if options.live:
        (live_equal if options.live == "equal" else live_unequal)(options.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
