"""How long a job may take: what such jobs took lately, here or at another peer of the stage."""

from __future__ import annotations

import math

import pytest

from swarm.policy.job_times import ALLOWED, RECENT, JobTimes


def test_a_job_may_take_a_few_times_the_longest_of_the_last_ones() -> None:
    times = JobTimes()
    assert times.allowed_s("backward") == math.inf, "the first one would be given up halfway"
    for seconds in (90.0, *[60.0] * (RECENT - 1)):
        times.note("backward", seconds)
    assert times.allowed_s("backward") == ALLOWED * 90.0
    times.note("backward", 50.0)
    assert times.allowed_s("backward") == ALLOWED * 60.0, "the longest was long ago"
    assert times.allowed_s("forward") == math.inf, "that is another kind"


def test_a_kind_that_never_ran_is_told_from_those_that_it_consists_of() -> None:
    times = JobTimes()
    times.note("forward", 20.0)
    assert times.longest_s("evaluation") == 20.0
    assert times.longest_s("recomputation") is None, "a part of it is not known"
    times.note("backward", 40.0)
    assert times.longest_s("recomputation") == 60.0
    times.note("recomputation", 70.0)
    assert times.longest_s("recomputation") == 70.0


def test_another_peers_times_hold_until_there_are_own_ones() -> None:
    other, times = JobTimes(), JobTimes()
    other.note("forward", 20.0)
    other.note("optimizer", 3.0)
    times.hear({"stage": 1, "busy_s": 99.0, **other.told()})
    assert (times.longest_s("forward"), times.longest_s("optimizer"), times.longest_s("backward")) == (20.0, 3.0, None)
    assert times.told() == {}, "hearsay is not handed on"
    times.note("forward", 50.0)
    times.hear(other.told())
    assert times.longest_s("forward") == 50.0


@pytest.mark.parametrize("told", ["20", -1.0, math.inf, math.nan, None, True])
def test_what_is_no_time_is_not_heard(told: object) -> None:
    times = JobTimes()
    times.hear({"forward_s": told})
    assert times.longest_s("forward") in (None, 1.0)
