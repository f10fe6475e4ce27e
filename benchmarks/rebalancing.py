"""What moving peers between stages gains: under a trace of preemptions, and in live swarms.

`--trace` is the paper's experiment (arXiv 2301.11913, section 4.4) in a simulation that runs the product's own policies;
`rebalancing_trace.py` describes the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from rebalancing_trace import Outcome, Pipeline, Trace
from report import machine, publish

#: seconds between decisions -> what the paper reports: overall, first hour, last hour.
PAPER = {0.0: (0.827, 0.990, 0.454), 300.0: (0.958, 0.994, 0.889), 60.0: (0.976, 0.998, 0.917)}


def trace(num_seeds: int) -> None:
    settings = Trace()
    outcomes = {period: [Pipeline(settings, period, seed).run() for seed in range(num_seeds)] for period in PAPER}
    last = settings.hours - 1
    rows = []
    for period, runs in outcomes.items():
        parts = [run.part() for run in runs]
        rows.append({
            "rebalancing": f"every {period:g} s" if period else "none", "overall": statistics.fmean(parts),
            "min": min(parts), "max": max(parts),
            "first hour": statistics.fmean(run.part(0, 1) for run in runs),
            "last hour": statistics.fmean(run.part(last) for run in runs),
            "moves": statistics.fmean(run.num_moves for run in runs),
            "paper overall": PAPER[period][0], "paper first": PAPER[period][1], "paper last": PAPER[period][2],
        })  # fmt: skip
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
        )  # fmt: skip
    above.set_ylabel("part of the optimum")
    above.legend()
    first = outcomes[0.0][0]
    below.plot([hour for hour, _, _ in first.curve], [peers for _, peers, _ in first.curve])
    below.set_ylabel("peers")
    below.set_xlabel("hour")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="32 stages under preemption, simulated")
    parser.add_argument("--seeds", type=int, default=10, help="traces that are averaged over")
    options = parser.parse_args()
    if options.trace:
        trace(options.seeds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
