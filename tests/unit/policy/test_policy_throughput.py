"""Predicted throughput and placement: the slowest stage is the pace, and a newcomer goes where it raises it most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.policy.placement import best_stage
from swarm.policy.throughput import ASSUMED_BANDWIDTH, StageWork, Swarm, Worker


def worker(name: str, stage: int, seconds: float | None = 1.0, **more: object) -> Worker:
    measured = {} if seconds is None else {stage: seconds}
    return Worker(key=(name, ""), stage=stage, seconds=measured, **more)  # type: ignore[arg-type]


def swarm_of(counts: list[int], **work: float) -> Swarm:
    """Equal peers, one ticket per second each."""
    workers = [worker(f"{stage}.{i}", stage) for stage, count in enumerate(counts) for i in range(count)]
    return Swarm([StageWork(**work)] * len(counts), workers)  # type: ignore[arg-type]


def test_the_slowest_stage_is_the_pace() -> None:
    swarm = swarm_of([6, 2, 3])
    assert swarm.stage_rates({}) == [6.0, 2.0, 3.0]
    assert swarm.throughput({}) == 2.0
    assert swarm.throughput({("0.0", ""): 1}) == 3.0
    assert swarm.throughput({("1.0", ""): None}) == 1.0


def test_a_peer_that_was_never_measured_is_typical_and_one_measured_elsewhere_is_as_fast_as_there() -> None:
    swarm = Swarm([StageWork()] * 2, [worker("a", 0, 0.5), worker("b", 0, 0.25), worker("c", 1, 1.0), worker("d", 1, None)])
    assert swarm.rate(swarm.workers[3], 1).tickets_per_s == 2.0
    assert swarm.rate(swarm.workers[1], 1).tickets_per_s == 4.0
    both = Worker(key=("e", ""), stage=0, seconds={0: 0.5, 1: 2.0})
    assert swarm.rate(both, 1).tickets_per_s == 0.5


def test_links_bound_a_rate_only_where_they_were_measured() -> None:
    swarm = swarm_of([1, 1], ticket_bytes=2e6, state_bytes=10**7)
    assert swarm.rate(worker("a", 0, 1.0, bandwidth=1e6), 0) == (0.5, "network")
    assert swarm.rate(worker("a", 0, 1.0, bandwidth=1e7), 0) == (1.0, "compute")
    assert swarm.rate(worker("a", 0, 1.0), 0) == (1.0, "compute")
    assert swarm.transfer_s(worker("a", 0), 1) == pytest.approx(1e7 / ASSUMED_BANDWIDTH)


def test_a_newcomer_goes_to_the_slowest_stage_and_not_to_the_one_with_the_fewest_peers() -> None:
    slow = [worker(f"slow{i}", 0, 4.0) for i in range(3)]
    swarm = Swarm([StageWork()] * 2, [*slow, worker("fast", 1, 1.0)])
    stage, reason = best_stage(swarm, worker("new", 0, 1.0))
    assert stage == 0, reason
    assert "from 0.75 to 1" in reason


def test_a_newcomer_without_room_for_the_slowest_stage_helps_another() -> None:
    swarm = Swarm([StageWork(state_bytes=100), StageWork(state_bytes=10)], [worker("a", 0, 2.0), worker("b", 1, 1.0)])
    assert best_stage(swarm, worker("new", 0, 1.0, room_bytes=50))[0] == 1
    stage, reason = best_stage(swarm, worker("new", 0, 1.0, room_bytes=5))
    assert stage is None
    assert reason == "no stage fits: the smallest needs 35 bytes, 5 are free"


def test_a_newcomer_with_a_slow_link_goes_where_little_is_sent() -> None:
    works = [StageWork(ticket_bytes=8e6), StageWork(ticket_bytes=1e6)]
    swarm = Swarm(works, [worker("a", 0), worker("b", 1)])
    stage, reason = best_stage(swarm, worker("new", 0, 1.0, bandwidth=1e6))
    assert stage == 1, reason


def test_newcomers_before_the_first_measurement_fill_the_stages_in_turn() -> None:
    workers: list[Worker] = []
    chosen = []
    for n in range(7):
        stage, reason = best_stage(Swarm([StageWork()] * 3, workers), worker(f"new{n}", 0, None))
        assert stage is not None, reason
        workers.append(worker(f"new{n}", stage, None))
        chosen.append(stage)
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


@given(
    st.lists(st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), max_size=4), min_size=1, max_size=5), st.sampled_from([0.5, 2.0])
)
def test_placement_equals_trying_every_stage(stages: list[list[float]], seconds: float) -> None:
    workers = [worker(f"{k}.{i}", k, s) for k, peers in enumerate(stages) for i, s in enumerate(peers)]
    newcomer = worker("new", 0, seconds)
    stage, reason = best_stage(Swarm([StageWork()] * len(stages), workers), newcomer)
    tried = []
    for k in range(len(stages)):
        here = Worker(key=newcomer.key, stage=k, seconds={k: seconds})
        tried.append(sorted(Swarm([StageWork()] * len(stages), [*workers, here]).stage_rates({})))
    assert stage is not None, reason
    assert tried[stage] == pytest.approx(max(tried)), reason
