"""Which head a run goes on from: the newest that some peer of every stage holds, with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.policy.restore import Holding, newest_complete, worth_waiting_for


def holding(step: int, era: int = 0, version_id: str = "") -> Holding:
    return Holding(version_id or f"head-{era}-{step}", era, step)


def test_the_newest_version_that_every_stage_holds_is_chosen() -> None:
    first = {"a": [holding(5), holding(7)], "b": [holding(9)]}
    second = {"c": [holding(7)], "d": [holding(9), holding(5)]}
    best, reason = newest_complete([first, second])
    assert best == holding(9)
    assert "step 10" in reason


def test_a_version_that_one_stage_lost_is_not_chosen() -> None:
    best, _ = newest_complete([{"a": [holding(5), holding(9)]}, {"b": [holding(5), holding(7)]}])
    assert best == holding(5)


def test_a_later_era_wins_over_a_higher_step() -> None:
    """After a restoration the abandoned steps must not come back."""
    both = [holding(50, era=0), holding(20, era=1)]
    best, _ = newest_complete([{"a": both}, {"b": both}])
    assert best == holding(20, era=1)


def test_two_versions_of_one_step_are_never_mixed_and_everyone_chooses_alike() -> None:
    one, other = holding(5, version_id="aaa"), holding(5, version_id="bbb")
    assert newest_complete([{"a": [one]}, {"b": [other]}])[0] is None
    forwards, _ = newest_complete([{"a": [one, other]}, {"b": [other, one]}])
    backwards, _ = newest_complete([{"b": [other, one]}, {"a": [one, other]}])
    assert forwards == backwards
    assert forwards in (one, other)


def test_without_a_complete_version_the_reason_says_why() -> None:
    best, reason = newest_complete([{"a": [holding(5)]}, {"b": []}, {}])
    assert best is None
    assert "stages [1, 2] hold nothing" in reason
    best, reason = newest_complete([{"a": [holding(5)]}, {"b": [holding(6)]}])
    assert best is None
    assert "no version is held by every stage" in reason


def test_a_version_counts_as_of_the_latest_era_that_anyone_knows() -> None:
    """A checkpoint says the era it was written in; the head may have been restored since."""
    first = {"a": [holding(5, era=0, version_id="old"), holding(9, era=1, version_id="later")]}
    second = {"b": [holding(5, era=2, version_id="old"), holding(9, era=1, version_id="later")]}
    assert newest_complete([first, second])[0] == holding(5, era=2, version_id="old")


#: A head belongs to one step; "0a" and "0b" are two lineages of step 0.
HOLDINGS = st.builds(
    lambda step, lineage, era: Holding(f"{step}{lineage}", era, step), st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 1)
)
STAGES = st.lists(st.dictionaries(st.sampled_from("pq"), st.lists(HOLDINGS, max_size=4), max_size=2), min_size=1, max_size=3)


@given(STAGES)
def test_equals_the_slow_twin(stages: list[dict[str, list[Holding]]]) -> None:
    everything = [one for peers in stages for held in peers.values() for one in held]
    complete = []
    for one in everything:
        if all(any(one.version_id == other.version_id for held in peers.values() for other in held) for peers in stages):
            era = max(other.era for other in everything if other.version_id == one.version_id)
            complete.append(Holding(one.version_id, era, one.step))
    best, _ = newest_complete(stages)
    if not complete:
        assert best is None
    else:
        assert best in complete
        assert (best.era, best.step) == max((one.era, one.step) for one in complete)


HERE = {"a": {"new", "old"}, "b": set()}


@pytest.mark.parametrize(
    ("writers", "expected"),
    [
        ([["a", "b"], ["c", "d"]], ("new", ("c", "d"))),  # nobody who wrote stage 1 is here
        ([["a", "b"], ["c", "e"]], ("new", ("e",))),  # c is here and does not hold it; e may
        ([["a", "b"], ["c"]], ("", ())),  # all that wrote it are here, and it was not complete
        ([["a", "b"], []], ("", ())),  # nobody was to write it
    ],
)
def test_a_newer_version_is_waited_for_while_those_who_wrote_it_are_away(writers, expected) -> None:
    present = [HERE, {"c": {"old"}} if writers[1] != ["c", "d"] else {}]
    assert worth_waiting_for(present, ["new"], {"new": writers}) == expected
