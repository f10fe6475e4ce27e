"""How long a ticket occupies a peer, as its tickets show, and who gets no ticket because the step would wait for it."""

from __future__ import annotations

import pytest

from swarm.base.ids import MemberKey
from swarm.policy.occupancy import FORGOTTEN_S, NUM_NEWEST, PROBE_PART, Occupancy, Trip

FIRST, FAST, SLOW = ((name, "0") for name in ("first", "fast", "slow"))
COMPUTE_S, NUM_BYTES, LATENCY_S = 0.03, 66_000, 0.01


def trips(key: MemberKey, moving_s: float, *, latency_s: float = LATENCY_S, compute_s: float = COMPUTE_S) -> list[Trip]:
    """One ticket through `FIRST`, which takes no time, and `key`, to which its bytes move for so long there and back together."""
    return [Trip(FIRST, 0.0, 0.001, 0, 0.0, 0.0), Trip(key, 0.0, compute_s, NUM_BYTES, latency_s + moving_s, moving_s)]


def serve(
    seen: Occupancy, key: MemberKey, moving_s: float, *, now: float = 0.0, num: int = 1, latency_s: float = LATENCY_S
) -> None:
    """So many tickets, one after the other."""
    for _ in range(num):
        seen.began((FIRST, key), now=now)
        done = trips(key, moving_s, latency_s=latency_s)
        seen.observe(done, sum(x.compute_s + x.transfer_s for x in done), now=now)
        seen.ended((FIRST, key))


def known(*, slow_s: float = 0.66, fast_s: float = 0.0001) -> Occupancy:
    """What is known after a ticket each; `slow_s` is how long a ticket's bytes move to the slow one and back."""
    seen = Occupancy(2, request_s=4.0)
    seen.set_members([[FIRST], [FAST, SLOW]])
    serve(seen, FAST, fast_s)
    serve(seen, SLOW, slow_s)
    return seen


def occupied_s(seen: Occupancy, key: MemberKey) -> float:
    rate = seen.rate(1, key)
    assert rate is not None
    return 1 / rate.tickets_per_s


def test_a_ticket_occupies_a_peer_for_the_longer_of_compute_and_one_direction_of_its_line() -> None:
    seen = known()
    assert occupied_s(seen, FAST) == pytest.approx(COMPUTE_S)
    assert occupied_s(seen, SLOW) == pytest.approx(0.33), "33 kB at 100 kB/s, up and down at once"
    rate = seen.rate(1, SLOW)
    assert rate is not None
    assert rate.bound == "network"
    assert seen.bytes_per_s(1, SLOW) == pytest.approx(100e3)


def test_latency_occupies_nobody() -> None:
    seen = known()
    serve(seen, SLOW, 0.0001, latency_s=2.0, now=FORGOTTEN_S + 1)
    assert occupied_s(seen, SLOW) == pytest.approx(COMPUTE_S)


def test_who_waits_for_a_slow_line_is_not_taken_for_slow() -> None:
    """The first stage sends to both; its own line is as good as that to the fast one showed."""
    seen = known()
    serve(seen, SLOW, 0.66, num=10)
    first = seen.rate(0, FIRST)
    assert first is not None
    assert first.tickets_per_s > 1 / COMPUTE_S


def test_tickets_that_share_a_line_do_not_make_it_look_slower() -> None:
    """Four at once: each one's bytes move for four times as long, and one is served in a fourth of a trip."""
    seen = known()
    for _ in range(NUM_NEWEST):
        for _ in range(4):
            seen.began((FIRST, SLOW), now=100.0)
        seen.observe(trips(SLOW, 4 * 0.66), 4 * 0.33, now=100.0)
        for _ in range(4):
            seen.ended((FIRST, SLOW))
    assert occupied_s(seen, SLOW) == pytest.approx(0.33, rel=0.05)


def left_out(seen: Occupancy, num_left: int | None, *, now: float = 1.0) -> dict[MemberKey, str]:
    return seen.left_out(1, [FAST, SLOW], num_left=num_left, now=now)


def test_a_ticket_that_the_step_would_wait_for_goes_elsewhere_and_the_reason_is_told() -> None:
    seen = known()
    assert seen.take_reasons(1) == {}, "both got a ticket"
    assert left_out(seen, 63) == {}, "two seconds are left"
    assert left_out(seen, 5)[SLOW].startswith("a ticket takes 0.7")
    assert "the rest of the step 0.1" in left_out(seen, 5)[SLOW]
    assert FAST not in left_out(seen, 0), "somebody takes the last one"
    assert seen.take_reasons(1)[SLOW].startswith("a ticket takes 0.7")
    assert seen.take_reasons(1) == {}


def test_who_fits_in_no_step_is_asked_now_and_then_for_a_hundredth_of_the_time() -> None:
    seen = known(slow_s=6.6)
    trip_s = 6.6 + COMPUTE_S + LATENCY_S
    assert SLOW in left_out(seen, 63, now=0.9 * trip_s / PROBE_PART)
    later = 1.1 * trip_s / PROBE_PART
    assert left_out(seen, 63, now=later) == {}
    seen.began((FIRST, SLOW), now=later)
    assert SLOW in left_out(seen, 63, now=later + 1), "one ticket is enough"
    seen.observe(trips(SLOW, 0.0066), 0.1, now=later + 2)
    seen.ended((FIRST, SLOW))
    assert left_out(seen, 63, now=later + 3) == {}, "its line is better"
    assert occupied_s(seen, SLOW) == pytest.approx(COMPUTE_S)


def test_a_queue_that_others_do_not_have_is_not_made_longer() -> None:
    seen = known()
    for _ in range(4):
        seen.began((FIRST, SLOW), now=1.0)
        assert SLOW not in left_out(seen, 1000)
    seen.began((FIRST, SLOW), now=1.0)
    assert "5 tickets are there" in left_out(seen, 1000)[SLOW]
    for _ in range(80):
        seen.began((FIRST, FAST), now=1.0)
    assert SLOW in left_out(seen, 1000), "its trips are long already"
    assert FAST not in left_out(seen, 1000), "somebody takes it"


def test_small_requests_get_through_beside_tickets() -> None:
    seen = known(slow_s=6.6)
    assert left_out(seen, 10_000) == {}
    seen.began((FIRST, SLOW), now=1.0)
    assert left_out(seen, 10_000)[SLOW] == "the bytes of its 1 tickets take 3.3 s each"


def test_a_peer_that_nobody_knows_gets_one_ticket() -> None:
    seen = known()
    seen.set_members([[FIRST], [FAST, SLOW, ("new", "0")]])
    among = [FAST, ("new", "0")]
    assert seen.left_out(1, among, num_left=100, now=1.0) == {}
    seen.began((FIRST, ("new", "0")), now=1.0)
    assert seen.left_out(1, among, num_left=100, now=1.0) == {("new", "0"): "it is at its first ticket"}


def test_before_anyone_is_known_each_gets_one_ticket() -> None:
    seen = Occupancy(2, request_s=4.0)
    seen.set_members([[FIRST], [FAST, SLOW]])
    for key in (FAST, SLOW):
        assert not seen.must_wait()
        seen.began((FIRST, key), now=0.0)
    assert seen.must_wait()
    seen.observe(trips(FAST, 0.001), 0.1, now=0.1)
    assert not seen.must_wait()


def test_what_a_peer_says_of_its_line_counts_until_it_has_served_a_ticket() -> None:
    new = ("new", "0")
    seen = known()
    seen.set_members([[FIRST], [FAST, new]])
    seen.expect(1, new, 1e3, now=1.0)
    assert "a ticket takes" in seen.left_out(1, [FAST, new], num_left=63, now=2.0)[new]
    serve(seen, new, 0.001, now=5.0)
    assert seen.left_out(1, [FAST, new], num_left=63, now=6.0) == {}


def test_all_together_are_as_fast_as_the_slowest_stage() -> None:
    assert known().tickets_per_s() == pytest.approx(1 / COMPUTE_S + 1 / 0.33)
    assert Occupancy(2, request_s=4.0).tickets_per_s() is None
