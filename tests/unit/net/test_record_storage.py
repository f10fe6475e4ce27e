"""The storage of records against a slow, obvious twin, and its promises one by one; time is a number here."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.net.identity import Identity
from swarm.net.kademlia.record_storage import REFUSALS, RecordStorage, RecordVerifier, StorageLimits
from swarm.wire.peer_records import PeerRecord, SignedRecord, verify_record

WRITERS = [Identity.ephemeral(random.Random(seed)) for seed in range(5)]
KEYS = ["a", "b", "c", "d"]
VERIFIER = RecordVerifier()


@functools.cache
def signed(writer: int = 0, key: str = "a", sequence: int = 1, ttl_s: float = 10.0, port: int = 1) -> SignedRecord:
    identity = WRITERS[writer]
    return identity.sign_record(
        key,
        PeerRecord(
            peer=identity.peer_id, incarnation="0" * 16, role="stage", host="h", port=port, ttl_s=ttl_s, sequence=sequence
        ),
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def storage(clock: Clock, **limits: int) -> tuple[RecordStorage, Counter[str]]:
    counters: Counter[str] = Counter()
    return RecordStorage(now=clock, verifier=VERIFIER, limits=StorageLimits(**limits), counters=counters), counters


def test_a_record_that_expires_while_it_is_asked_for_is_none():
    """Each look at the clock is later than the one before, as it is outside tests."""

    class Running(Clock):
        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    clock = Running()
    store, _ = storage(clock)
    store.put("a", signed(ttl_s=10.0), 10.0)
    while found := store.get("a", ()):
        assert [held.record.peer for held in found] == [WRITERS[0].peer_id]
    assert clock.now > 110.0
    assert store.num_records == 0


@dataclass
class _Row:
    key: str
    signed: SignedRecord
    record: PeerRecord
    expires_at: float
    source: str


class SlowStorage:
    """The same promises as one list that is searched from end to end each time."""

    def __init__(self, clock: Clock, limits: StorageLimits) -> None:
        self.clock, self.limits = clock, limits
        self.rows: list[_Row] = []
        self.dead: list[_Row] = []

    def live(self, key: str | None = None) -> list[_Row]:
        now = self.clock()
        self.dead += [row for row in self.rows if row.expires_at <= now]
        self.rows = [row for row in self.rows if row.expires_at > now]
        return [row for row in self.rows if key in (None, row.key)]

    def gives_way(self, new: _Row, group: list[_Row]) -> _Row | None:
        """Of the largest source, if the new one's is smaller by two; else the first to expire, of its own if it has any."""
        own = [row for row in group if row.source == new.source]
        sizes = {source: sum(row.source == source for row in group) for source in {row.source for row in group}}
        largest = max(sizes, key=lambda source: (sizes[source], source))
        order = lambda row: (row.expires_at, row.key, row.record.peer)  # noqa: E731
        if len(own) + 1 < sizes[largest]:
            return min((row for row in group if row.source == largest), key=order)
        victim = min(own or group, key=order)
        return victim if new.expires_at > victim.expires_at else None

    def put(self, key: str, signed: SignedRecord, remaining_s: float, source: str) -> str:
        now, record = self.clock(), verify_record(key, signed)
        rows = self.live()
        new = _Row(key, signed, record, now + min(remaining_s, record.ttl_s), source)
        same = [row for row in rows if (row.key, row.record.peer) == (key, record.peer)]
        if new.expires_at <= now:
            return "expired"
        remembered, forget_at = -1, 0.0
        for row in sorted(self.dead, key=lambda row: row.expires_at):
            if (row.key, row.record.peer) == (key, record.peer):
                remembered = max(row.record.sequence, remembered if forget_at > row.expires_at else -1)
                forget_at = max(forget_at, row.expires_at + row.record.ttl_s)
        if now < forget_at and record.sequence <= remembered:
            return "old_sequence"
        if same and same[0].signed == signed:
            same[0].expires_at = min(same[0].expires_at, new.expires_at)
            return ""
        if same and same[0].record.sequence >= record.sequence:
            return "old_sequence"
        if not same:
            victims: list[_Row | None] = []
            on_key = [row for row in rows if row.key == key]
            written = [row for row in rows if row.record.peer == record.peer]
            if len(on_key) >= self.limits.per_key:
                victims.append(self.gives_way(new, on_key))
            if len(written) >= self.limits.per_writer:  # its own, whoever brought them
                first = min(written, key=lambda row: (row.expires_at, row.key))
                victims.append(first if new.expires_at > first.expires_at else None)
            if not victims and len(rows) >= self.limits.total:
                victims.append(self.gives_way(new, rows))
            if None in victims:
                return "full"
            same += victims
        self.rows = [row for row in self.rows if row not in same] + [new]
        return ""


puts = st.tuples(
    st.integers(0, len(WRITERS) - 1),
    st.sampled_from(KEYS),
    st.integers(0, 3),
    st.sampled_from([2.0, 5.0, 9.0]),
    st.integers(1, 2),
    st.sampled_from([-1.0, 0.0, 1.5, 4.0, 100.0]),
    st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]),
    st.sampled_from(["", "10.0.0.1", "10.0.0.1", "10.0.0.2"]),
)


@settings(max_examples=200, deadline=None)
@example(  # a short-lived newer record must not shorten the memory of a long-lived older one
    [(0, "a", 1, 9.0, 1, 1.5, 0.0, ""), (0, "a", 2, 2.0, 1, 4.0, 3.0, ""), (0, "a", 1, 9.0, 1, 4.0, 3.0, "")] * 2, (8, 8, 99)
)
@given(st.lists(puts, max_size=40), st.sampled_from([(8, 8, 99), (2, 8, 99), (8, 2, 99), (8, 8, 4), (8, 8, 7), (3, 3, 5)]))
def test_behaves_like_its_slow_twin(steps, bounds):
    clock = Clock()
    limits = StorageLimits(per_key=bounds[0], per_writer=bounds[1], total=bounds[2])
    fast = RecordStorage(now=clock, verifier=VERIFIER, limits=limits, counters=Counter())
    slow = SlowStorage(clock, limits)
    for writer, key, sequence, ttl_s, port, remaining_s, pause_s, source in steps:
        clock.now += pause_s
        record = signed(writer, key, sequence, ttl_s, port)
        assert fast.put(key, record, remaining_s, source) == slow.put(key, record, remaining_s, source)
        assert fast.num_records == len(slow.live())
        for key in KEYS:
            held = {(held.signed.signature, fast.remaining_s(held)) for held in fast.get(key, ())}
            assert held == {(row.signed.signature, row.expires_at - clock()) for row in slow.live(key)}
            assert [held.record.peer for held in fast.page(key, "", 10**6, 0)[0]] == sorted(
                row.record.peer for row in slow.live(key)
            )


def test_the_same_record_again_renews_nothing_and_may_shorten():
    clock = Clock()
    store, _ = storage(clock)
    assert store.put("a", signed(), 10.0) == ""
    clock.now += 6
    assert store.put("a", signed(), 10.0) == ""
    [held] = store["a"]
    assert store.remaining_s(held) == pytest.approx(4)
    assert store.put("a", signed(), 1.0) == ""
    assert store.remaining_s(held) == pytest.approx(1)
    clock.now += 1
    assert store.get("a") is None


def test_what_expired_here_cannot_be_handed_back():
    clock = Clock()
    store, counters = storage(clock)
    store.put("a", signed(sequence=3), 10.0)
    clock.now += 10
    for pause_s in (0.0, 5.0, 4.9):
        clock.now += pause_s
        assert store.put("a", signed(sequence=3), 10.0) == "old_sequence"
        assert store.put("a", signed(sequence=2), 10.0) == "old_sequence"
    assert store.put("a", signed(sequence=4), 10.0) == "", "its writer is alive after all"
    assert counters["refused_old_sequence"] == 6


def test_every_refusal_is_counted_by_reason():
    clock = Clock()
    store, counters = storage(clock, per_key=1)
    good = signed()
    assert store.put("a", good, 10.0) == ""
    cases = {
        "forged": ("b", good, 10.0),
        "malformed": ("a", SignedRecord(b"", b"", b""), 10.0),
        "oversize": ("a", SignedRecord(good.public_key, bytes(2000), good.signature), 10.0),
        "expired": ("a", signed(sequence=2), 0.0),
        "old_sequence": ("a", signed(sequence=0), 10.0),
        "full": ("a", signed(writer=1), 10.0),
    }
    assert set(cases) == REFUSALS
    for reason, case in cases.items():
        assert store.put(*case) == reason
        assert counters[f"refused_{reason}"] == 1
    assert store.put("a", signed(sequence=2), float("nan")) == "expired"


def test_the_record_that_expires_first_gives_way():
    clock = Clock()
    store, counters = storage(clock, total=3)
    for writer, life_s in enumerate((5.0, 3.0, 7.0)):
        store.put("a", signed(writer), life_s)
    assert store.put("b", signed(3, "b"), 2.0) == "full", "a flood of short lives pushes nobody out"
    assert store.put("b", signed(3, "b"), 9.0) == ""
    assert {held.record.peer for held in store["a"]} == {WRITERS[0].peer_id, WRITERS[2].peer_id}
    assert counters["evicted_records"] == 1


def test_memory_stays_bounded_under_constant_renewal():
    clock = Clock()
    store, _ = storage(clock, total=4, expired=4)
    for sequence in range(300):
        clock.now += 0.001
        assert store.put("a", signed(sequence=sequence, ttl_s=3600.0), 3600.0) == ""
    assert store.num_records == 1
    assert len(store._expiries) < 100
    for writer in range(5):
        for key in KEYS:
            store.put(key, signed(writer, key, 1000, 2.0), 2.0)
            clock.now += 2
    store.expire()
    assert len(store._expired) <= 4


def test_pages_are_cut_at_the_budget_and_continue_where_they_ended():
    store, _ = storage(Clock())
    for writer in range(5):
        store.put("a", signed(writer), 10.0)
    size = signed().num_bytes
    seen: list[str] = []
    more, after = True, ""
    while more:
        page, more = store.page("a", after, 2 * (size + 16), 16)
        assert 1 <= len(page) <= 2
        seen += [held.record.peer for held in page]
        after = seen[-1]
    assert seen == sorted(identity.peer_id for identity in WRITERS)
    assert store.page("a", "", size, 16) == ([], True)
    assert store.page("nothing", "", size, 16) == ([], False)


def test_what_nobody_stored_lately_is_found_for_handing_on():
    clock = Clock()
    store, _ = storage(clock)
    store.put("a", signed(0), 10.0)
    store.put("b", signed(1, "b"), 10.0)
    clock.now += 3
    store.put("b", signed(1, "b"), 10.0)
    assert [key for key, _ in store.iter_older_than(3.0)] == ["a"]


def test_the_verifier_remembers_only_so_many_and_only_good_ones():
    verifier = RecordVerifier(capacity=2)
    for writer in range(4):
        verifier.verify("a", signed(writer))
    assert len(verifier._good) == 2
    with pytest.raises(Exception, match="not valid for its key"):
        verifier.verify("b", signed(0))
    assert len(verifier._good) == 2
