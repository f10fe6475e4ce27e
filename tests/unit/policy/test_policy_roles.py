"""DeDLOC's linear program: METHODS' oracles, and every choice of roles as the slow twin of the search."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.policy.roles import MAX_ENUMERATED, Candidate, Work, plan_roles, solve


def candidate(samples_per_s: float, bandwidth: float, **rest: object) -> Candidate:
    fields = {"upload": bandwidth, "download": bandwidth, **rest}
    return Candidate(samples_per_s=samples_per_s, **fields)  # type: ignore[arg-type]


def work(*, tickets: float = 1, average: float = 1) -> Work:
    """As the paper has it: averages overlap with what is computed."""
    return Work(tickets=tickets, average_bytes=average, overlaps=True)


FAST = 1e9
FOUR = [candidate(FAST, 100)] * 4
SLOW_LAST = [candidate(5, 100)] * 3 + [candidate(0.1, 10, download=100)]


@pytest.mark.parametrize(
    ("candidates", "rate"),
    [
        (FOUR, 200 / 3),
        ([*FOUR, candidate(0, 1000, holds_replica=False)], 100.0),
        ([*FOUR, candidate(0, 200, holds_replica=False)], 250 / 3),
        ([*FOUR[:3], candidate(FAST, 100, reachable=False)], 60.0),
    ],
    ids=["all-reduce", "parameter server", "hybrid", "no inbound"],
)
def test_the_averaging_rates_of_the_paper(candidates: list[Candidate], rate: float) -> None:
    assert solve(candidates, [c.samples_per_s > 0 for c in candidates])[0] == pytest.approx(rate)
    plan, _ = plan_roles(candidates, work(), whole=True)
    assert plan.steps_per_s >= rate * (1 - 1e-9)  # a planner may also leave somebody out


def test_computing_is_the_bottleneck() -> None:
    plan, reason = plan_roles([candidate(1, 100)] * 4, work(tickets=8), whole=True)
    assert plan.steps_per_s == pytest.approx(0.5)
    assert plan.computes == (True,) * 4
    assert reason == "computing is the bottleneck; everybody computes"


def test_a_slow_uploader_only_aggregates() -> None:
    plan, reason = plan_roles(SLOW_LAST, work(average=10), whole=True)
    assert plan.steps_per_s == pytest.approx(6.778, rel=1e-3)
    assert sum(plan.computes[:3]) == 2
    assert not plan.computes[3]
    assert reason.startswith("averaging is the bottleneck; members [")


@pytest.mark.parametrize(("computes", "rate"), [((1, 1, 1, 0), 6.133), ((1, 1, 1, 1), 1.0)])
def test_the_rates_of_other_roles(computes: tuple[int, ...], rate: float) -> None:
    assert solve(SLOW_LAST, [bool(c) for c in computes])[0] / 10 == pytest.approx(rate, rel=1e-3)


def test_if_only_computing_peers_had_to_receive() -> None:
    """The paper's own form of the last oracle: who does not compute holds no replica here."""
    replicas = [*SLOW_LAST[:3], candidate(0.1, 10, download=100, holds_replica=False)]
    pair = [*replicas[:2], candidate(5, 100, holds_replica=False), replicas[3]]
    assert solve(pair, [True, True, False, False])[0] / 10 == pytest.approx(10.0)


def test_a_slow_link_between_two_members_is_gone_round() -> None:
    """Links between 0 and 1 carry little: 2 aggregates for them."""
    links = [[1000.0] * 3 for _ in range(3)]
    links[0][1] = links[1][0] = 1.0
    candidates = [candidate(FAST, 100)] * 3
    free, _ = solve(candidates, [True] * 3)
    limited, weights = solve(candidates, [True] * 3, links)
    assert free == pytest.approx(75.0)
    assert 45.0 < limited < 55.0
    assert weights[2] > 0.9
    plan, _ = plan_roles(candidates, work(), links=links)
    assert plan.steps_per_s >= limited


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        samples_per_s=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
        upload=st.floats(1, 100),
        download=st.floats(1, 100),
        holds_replica=st.just(True),
        reachable=st.booleans(),
    ),
    min_size=2,
    max_size=3,
).filter(lambda cs: any(c.reachable for c in cs) and any(c.samples_per_s for c in cs))


@settings(deadline=None, max_examples=15)
@given(CANDIDATES, st.floats(0.1, 20.0))
def test_the_plan_is_the_best_of_all_roles(candidates: list[Candidate], parameters: float) -> None:
    best = 0.0
    for computes in itertools.product([False, True], repeat=len(candidates)):
        computing = sum(c.samples_per_s for c, x in zip(candidates, computes, strict=True) if x)
        if computing and not any(x and not c.samples_per_s for c, x in zip(candidates, computes, strict=True)):
            best = max(best, min(computing, solve(candidates, computes)[0] / parameters))
    plan, _ = plan_roles(candidates, work(average=parameters), whole=True)
    assert plan.steps_per_s == pytest.approx(best, rel=1e-5)


def test_large_groups_are_searched_greedily_and_never_worse_than_everybody() -> None:
    rng = random.Random(1)
    candidates = [candidate(rng.uniform(1, 9), rng.uniform(1, 100)) for _ in range(MAX_ENUMERATED + 8)]
    everybody = [True] * len(candidates)
    all_rate = min(sum(c.samples_per_s for c in candidates) / 10, solve(candidates, everybody)[0] / 50)
    plan, _ = plan_roles(candidates, work(tickets=10, average=50))
    assert plan.steps_per_s >= all_rate * (1 - 1e-9)


def test_nobody_can_compute() -> None:
    with pytest.raises(ValueError, match="nobody can compute"):
        plan_roles([candidate(0, 10)], work())
