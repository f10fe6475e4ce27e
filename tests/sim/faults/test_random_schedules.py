"""Promises 1 to 4 and the invariants under random faults: the first 16 seeds; `benchmarks/faults/chaos.py` runs thousands."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm.testing.simulation.schedules import KINDS, Result, Schedule, run_schedule, run_seeds

#: 21 is the first with a partition.
SEEDS = (*range(16), 21)
TWICE = 5


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Of each schedule, in a process of their own; and of one again."""
    return list(run_seeds([*SEEDS, TWICE], workers=1))


def test_promises_hold_under_random_faults(results):
    """A violation prints the schedule; `run_schedule(Schedule.draw(seed))` replays it."""
    faults: Counter[str] = sum((result.faults for result in results), Counter())
    cpu_s = sum(result.cpu_s for result in results)
    print(f"{len(results)} schedules, {cpu_s:.0f} s of CPU")
    print("faults injected: " + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
    violations = [result.violation for result in results if result.violation]
    assert not violations, f"{len(violations)} of {len(results)} schedules failed; the first:\n{violations[0]}"
    assert not {"move", "role", *(kind for kind, _ in KINDS)} - set(faults), "some kind of fault never happened"


def test_every_schedule_has_the_size_that_was_promised():
    for seed in range(1000):
        schedule = Schedule.draw(seed)
        config = schedule.config()
        assert schedule.num_stages >= 3, schedule
        assert schedule.peers_per_stage >= 2, schedule
        assert schedule.trainers >= 2, schedule
        assert config.total_steps >= 4, schedule
        assert config.tickets_per_step >= 8, schedule
        assert len(schedule.faults) >= 5, schedule


def test_the_same_seed_is_the_same_run(results):
    """Twice in one process, after other schedules, and once in another."""
    first, second = (result.faults for result in results if result.seed == TWICE)
    assert first == second
    assert first == run_schedule(Schedule.draw(TWICE))


def test_a_restarted_leader_at_the_same_address_does_not_lead_for_its_former_self():
    """Seed 3299: it collected as leader, excluded the only live member over a cut link, and kept it excluded for ever."""
    run_schedule(Schedule.draw(3299))
