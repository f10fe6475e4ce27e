"""The coordinator's tickets: each in exactly one of free, leased and done, against a twin that is one plain list."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.lifecycle.tickets import TicketPool

NUM = 6
TRAINERS = [("trainer", str(number)) for number in range(3)]
LEASE_S = 10.0
INDEXES = st.integers(0, NUM - 1)


class PoolAgainstTwin(RuleBasedStateMachine):
    """`state[i]` is "free", "done", or (trainer, until)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = TicketPool(7, NUM)
        self.state: list[object] = ["free"] * NUM
        self.now = 0.0

    @rule(trainer=st.sampled_from(TRAINERS), want=st.integers(0, NUM + 2))
    def lease(self, trainer: tuple[str, str], want: int) -> None:
        expected = [i for i in range(NUM) if self.state[i] == "free"][:want]
        assert self.pool.lease(trainer, want, now=self.now, lease_s=LEASE_S) == expected
        for index in expected:
            self.state[index] = (trainer, self.now + LEASE_S)

    @rule(trainer=st.sampled_from(TRAINERS), holding=st.lists(st.integers(-2, NUM + 2), max_size=4))
    def renew(self, trainer: tuple[str, str], holding: list[int]) -> None:
        """A trainer may name anything, also what is another's, done, or no ticket at all."""
        self.pool.renew(trainer, holding, now=self.now, lease_s=LEASE_S)
        for index in set(holding):
            if 0 <= index < NUM:
                now = self.state[index]
                if now == "free" or (isinstance(now, tuple) and now[0] == trainer):
                    self.state[index] = (trainer, self.now + LEASE_S)

    @rule(index=st.integers(-2, NUM + 2))
    def done(self, index: int) -> None:
        self.pool.done(index)
        if 0 <= index < NUM:
            self.state[index] = "done"

    @rule(indexes=st.lists(INDEXES, max_size=4))
    def free(self, indexes: list[int]) -> None:
        self.pool.free(indexes)
        for index in indexes:
            self.state[index] = "free"

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [i for i in range(NUM) if isinstance(self.state[i], tuple) and self.state[i][1] <= self.now]
        assert self.pool.expire(self.now) == late
        for index in late:
            self.state[index] = "free"

    @rule(trainer=st.sampled_from(TRAINERS))
    def drop_trainer(self, trainer: tuple[str, str]) -> None:
        self.pool.drop_trainer(trainer)
        self.state = ["free" if isinstance(s, tuple) and s[0] == trainer else s for s in self.state]

    @invariant()
    def each_ticket_is_in_exactly_one_place(self) -> None:
        assert self.pool.num_free == sum(s == "free" for s in self.state)
        assert self.pool.complete is all(s == "done" for s in self.state)


PoolAgainstTwin.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolAgainstTwin = PoolAgainstTwin.TestCase


def test_a_step_is_complete_only_when_every_ticket_is_done() -> None:
    pool = TicketPool(0, 3)
    pool.lease(TRAINERS[0], 3, now=0.0, lease_s=LEASE_S)
    pool.done(0)
    pool.done(0)
    pool.done(2)
    assert not pool.complete
    pool.done(1)
    assert pool.complete
    pool.free([1])
    assert not pool.complete


def test_a_silent_trainer_loses_its_tickets_and_a_lively_one_keeps_them() -> None:
    pool = TicketPool(0, 4)
    quiet = pool.lease(TRAINERS[0], 2, now=0.0, lease_s=LEASE_S)
    lively = pool.lease(TRAINERS[1], 2, now=0.0, lease_s=LEASE_S)
    pool.renew(TRAINERS[1], lively, now=8.0, lease_s=LEASE_S)
    assert pool.expire(9.9) == []
    assert pool.expire(10.0) == quiet
    assert pool.lease(TRAINERS[2], 4, now=10.0, lease_s=LEASE_S) == quiet


def test_a_trainer_cannot_renew_anothers_lease() -> None:
    pool = TicketPool(0, 1)
    pool.lease(TRAINERS[0], 1, now=0.0, lease_s=LEASE_S)
    pool.renew(TRAINERS[1], [0], now=9.0, lease_s=LEASE_S)
    assert pool.expire(10.0) == [0]


def test_a_new_coordinator_learns_leases_from_the_trainers() -> None:
    pool = TicketPool(0, 4)
    pool.renew(TRAINERS[0], [1, 3], now=0.0, lease_s=LEASE_S)
    assert pool.lease(TRAINERS[1], 4, now=0.0, lease_s=LEASE_S) == [0, 2]


def test_a_ticket_that_was_leased_before_is_known_as_such() -> None:
    pool = TicketPool(0, 4)
    assert pool.num_again(pool.lease(TRAINERS[0], 3, now=0.0, lease_s=LEASE_S)) == 0
    pool.done(0)
    pool.free([0, 3])  # a seal did not cover them; nobody had the last
    pool.drop_trainer(TRAINERS[0])
    taken = pool.lease(TRAINERS[1], 4, now=1.0, lease_s=LEASE_S)
    assert taken == [0, 1, 2, 3]
    assert pool.num_again(taken) == 3
