"""The policies together under a trace of preemptions: the paper's experiment, with one seed and fewer hours."""

from __future__ import annotations

import pytest

from benchmarks.scheduling.rebalancing_trace import Pipeline, Trace

SHORT = Trace(num_stages=8, hours=6.0, sizes=((0.0, 60), (6.0, 30)), churn=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_under_preemption_moving_peers_keeps_most_of_the_optimum(seed: int) -> None:
    none, rare, often = (Pipeline(SHORT, period_s, seed).run() for period_s in (0.0, 300.0, 60.0))
    assert none.part() < rare.part() < often.part(), "the same trace, decided on more often"
    assert often.part() > 0.9
    assert none.num_moves == 0
    assert max(part for _, _, part in often.curve) <= 1.0, "nothing is better than the optimum"
