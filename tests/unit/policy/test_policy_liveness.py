"""Who is there: what failed calls teach, who is looked at next, and that the looks are bounded."""

from __future__ import annotations

import itertools

from swarm.policy.liveness import FIRST_LOOK_S, FRESH_S, MAX_KNOWN, REMEMBERED, Liveness, Stillness
from swarm.wire.messages import Member

MAX_LOOK_S = 10.0


def member(stage: int, number: int) -> Member:
    return Member(peer=f"{stage:02x}{number:06x}" * 5, incarnation=f"{number:016x}", host="192.0.2.1", port=1000 + number)


def groups(num: int, size: int) -> list[dict[tuple[str, str], Member]]:
    made = [[member(stage, i) for i in range(size)] for stage in range(num)]
    return [{x.key: x for x in xs} for xs in made]


def stages(num: int = 2, size: int = 32) -> tuple[Liveness, list[list[Member]]]:
    liveness, made = Liveness(max_look_s=MAX_LOOK_S), groups(num, size)
    liveness.set_groups(made)
    return liveness, [list(group.values()) for group in made]


def due(liveness: Liveness, now: float) -> list[Member]:
    return liveness.due(now=now, limit=1000, timeout_s=8.0)


def test_one_that_fails_casts_doubt_on_its_stage_and_a_second_on_everybody():
    liveness, (first, second) = stages()
    liveness.failed(first[0], "Stalled", now=5.0)
    assert due(liveness, 5.0) == first, "all of its stage are looked at at once"
    assert not liveness.suspected(x.key for x in second)
    liveness.fell_silent(first[1], "refused", now=5.1)
    assert due(liveness, 5.1) == second, "a second one: everybody else, and nobody twice"


def test_who_was_heard_a_moment_ago_is_not_doubted_because_of_others():
    liveness, (first, _) = stages()
    liveness.answered(first[3].key, now=5.0)
    liveness.failed(first[0], "LinkBroken", now=5.0 + FRESH_S / 2)
    assert not liveness.is_suspected(first[3].key)
    liveness.answered(first[3].key, now=6.0)
    liveness.failed(first[3], "LinkBroken", now=6.0)
    assert liveness.is_suspected(first[3].key), "its own failure counts"


def test_silent_until_it_answers_and_looked_at_ever_more_rarely():
    liveness, (first,) = stages(1, 2)
    gone, there = first
    liveness.fell_silent(gone, "refused", now=0.0)
    liveness.answered(there.key, now=0.0)
    times, now = [], 0.0
    while now < 60.0:
        now = liveness.next_look_at
        assert due(liveness, now) == [gone]
        assert liveness.is_silent(gone.key)
        times.append(now)
        liveness.fell_silent(gone, "refused", now=now)
    waits = [round(b - a, 3) for a, b in itertools.pairwise(times)]
    assert waits[:3] == [2.0, 4.0, 8.0]
    assert set(waits[3:]) == {MAX_LOOK_S}
    liveness.answered(gone.key, now=now)
    assert not liveness.is_suspected(gone.key)
    assert due(liveness, now + 100) == []


def test_while_nobody_of_a_stage_answers_all_are_looked_at_often():
    liveness, (first,) = stages(1, 2)
    for now in range(20):
        for x in first:
            liveness.fell_silent(x, "refused", now=float(now))
    assert liveness.next_look_at <= 19.0 + FIRST_LOOK_S, "who comes back is needed at once"


def test_another_incarnation_is_another_peer():
    liveness, (first,) = stages(1, 2)
    liveness.fell_silent(first[0], "refused", now=0.0)
    again = first[0].model_copy(update={"incarnation": "f" * 16})
    liveness.set_groups([{x.key: x for x in (again, first[1])}])
    assert not liveness.is_suspected(again.key)
    assert not liveness.is_suspected(first[0].key)


def test_what_is_remembered_is_bounded_in_number_and_time():
    liveness = Liveness(max_look_s=MAX_LOOK_S)
    for number in range(MAX_KNOWN + 10):
        liveness.fell_silent(member(0, number), "refused", now=0.0)
    assert len(due(liveness, FIRST_LOOK_S)) == 1000
    assert not liveness.is_silent(member(0, 0).key)
    assert liveness.is_silent(member(0, MAX_KNOWN).key)
    due(liveness, REMEMBERED * MAX_LOOK_S + 1)
    assert not liveness.is_silent(member(0, MAX_KNOWN).key), "nobody calls it any more"


def test_standing_still_is_told_at_ever_longer_times_and_anew_after_a_move():
    still = Stillness(2.0, 0.0)
    assert [now for now in range(40) if still.take_due(7, now=float(now))] == [2, 4, 8, 16, 32]
    assert not still.take_due(8, now=40.0)
    assert not still.observe(8, now=41.0)
    assert still.observe(8, now=42.0)
    assert still.take_due(8, now=42.0)
