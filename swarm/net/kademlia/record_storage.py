"""The records that one DHT node holds: newest of each peer under a key, counted down on this node's own clock, bounded.

Both DHTs keep their records here, so both refuse the same things. Owns acceptance, expiry and eviction; must not know
sockets, contacts or asyncio. Reading never renews a record, and neither does storing the same one again.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kademlia.storage import IStorage

from swarm.base.ids import PeerId
from swarm.wire.peer_records import PeerRecord, RecordRefused, SignedRecord, verify_record

#: Every word that `RecordStorage.put` may answer besides "" (held).
REFUSALS = frozenset({"oversize", "forged", "malformed", "expired", "old_sequence", "full"})


#: Records that are looked through for the first to expire.
_VERY_MANY = 1024
#: Not the name of any record.
_NOBODY = ("", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageLimits:
    """Bounds in records; a record has at most `wire.peer_records.MAX_RECORD_BYTES` bytes."""

    #: Peers under one key.
    per_key: int = 1024
    #: Keys that one peer may write.
    per_writer: int = 64
    #: Records altogether.
    total: int = 16384
    #: Sequence numbers of expired records that are remembered.
    expired: int = 16384


class RecordVerifier:
    """`verify_record` with a bounded memory of good records, which come back from many nodes."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._good: OrderedDict[tuple[str, SignedRecord], PeerRecord] = OrderedDict()

    def verify(self, key: str, signed: SignedRecord) -> PeerRecord:
        """See `verify_record`.

        Raises:
            RecordRefused: if the record is no good.
        """
        known = self._good.get((key, signed))
        if known is not None:
            self._good.move_to_end((key, signed))
            return known
        record = verify_record(key, signed)
        self._good[key, signed] = record
        if len(self._good) > self._capacity:
            self._good.popitem(last=False)
        return record


@dataclass(slots=True)
class StoredRecord:
    """One record as this node holds it; times are this node's."""

    signed: SignedRecord
    record: PeerRecord
    expires_at: float
    #: When some node last stored this very record here; holders hand on what nobody has renewed.
    touched_at: float
    #: Who stored it here ("" is this node): crowds from one source give way first.
    source: str = ""


@dataclass(slots=True)
class _Key:
    """The records under one key; `peers` is sorted and has exactly the keys of `held`."""

    held: dict[PeerId, StoredRecord] = field(default_factory=dict)
    peers: list[PeerId] = field(default_factory=list)


class RecordStorage(IStorage):
    """Newest record of each peer under each key.

    Args:
        now: this node's monotonic clock in seconds.
        verifier: shared with whoever else reads records.
        limits: bounds; over one of them the source with most records gives way, else the record that expires first,
            the new one included.
        counters: `refused_<reason>` and `evicted_records` are counted here.
    """

    def __init__(
        self, *, now: Callable[[], float], verifier: RecordVerifier, limits: StorageLimits, counters: Counter[str]
    ) -> None:
        self._now = now
        self._verifier = verifier
        self._limits = limits
        self._counters = counters
        self._keys: dict[str, _Key] = {}
        self._keys_of: dict[PeerId, set[str]] = {}
        self._num_records = 0
        #: What each source stored, longest held first; has exactly the records of `_keys`.
        self._from: dict[str, dict[tuple[str, PeerId], None]] = {}
        #: (expires_at, key, peer); an entry whose time is not the held record's is out of date and skipped.
        self._expiries: list[tuple[float, str, PeerId]] = []
        #: Sequence numbers that expired here, until nobody honest can still hand them on.
        self._expired: OrderedDict[tuple[str, PeerId], tuple[int, float]] = OrderedDict()

    @property
    def num_records(self) -> int:
        """Records held now. (No `__len__`: kademlia takes an empty, hence false, storage for none.)"""
        self.expire()
        return self._num_records

    @property
    def num_keys(self) -> int:
        """Keys under which records are held."""
        self.expire()
        return len(self._keys)

    def put(self, key: str, signed: SignedRecord, remaining_s: float, source: str = "") -> str:
        """Hold `signed` for at most `remaining_s`, and never longer than the record itself allows.

        Args:
            source: who brought it: "" is this node itself, else what an attacker has few of, such as an address.

        Returns:
            "" if this very record is held now, else the reason in `REFUSALS`.
        """
        reason = self._put(key, signed, remaining_s, source)
        if reason:
            self._counters[f"refused_{reason}"] += 1
        return reason

    def _put(self, key: str, signed: SignedRecord, remaining_s: float, source: str) -> str:
        self.expire()
        now = self._now()
        try:
            record = self._verifier.verify(key, signed)
        except RecordRefused as error:
            return error.reason
        life_s = min(remaining_s, record.ttl_s)
        if not life_s > 0:
            return "expired"
        sequence, forget_at = self._expired.get((key, record.peer), (-1, now))
        if now < forget_at and record.sequence <= sequence:
            return "old_sequence"
        old = self._find(key, record.peer)
        if old is not None and old.signed == signed:
            old.touched_at = now
            if now + life_s < old.expires_at:
                old.expires_at = now + life_s
                self._note_expiry(key, record.peer, old)
            return ""
        if old is not None and record.sequence <= old.record.sequence:
            return "old_sequence"
        new = StoredRecord(signed, record, now + life_s, now, source)
        if old is None and not self._make_room(key, new):
            return "full"
        self._insert(key, new)
        return ""

    def _find(self, key: str, peer: PeerId) -> StoredRecord | None:
        records = self._keys.get(key)
        return records.held.get(peer) if records is not None else None

    def _insert(self, key: str, new: StoredRecord) -> None:
        peer = new.record.peer
        records = self._keys.setdefault(key, _Key())
        if peer not in records.held:
            bisect.insort(records.peers, peer)
            self._keys_of.setdefault(peer, set()).add(key)
            self._num_records += 1
        else:
            self._leave_source(key, records.held[peer])
        records.held[peer] = new
        self._from.setdefault(new.source, {})[key, peer] = None
        self._note_expiry(key, peer, new)

    def _remove(self, key: str, peer: PeerId) -> StoredRecord:
        records = self._keys[key]
        held = records.held.pop(peer)
        self._leave_source(key, held)
        del records.peers[bisect.bisect_left(records.peers, peer)]
        if not records.held:
            del self._keys[key]
        self._keys_of[peer].discard(key)
        if not self._keys_of[peer]:
            del self._keys_of[peer]
        self._num_records -= 1
        return held

    def _note_expiry(self, key: str, peer: PeerId, held: StoredRecord) -> None:
        heapq.heappush(self._expiries, (held.expires_at, key, peer))
        if len(self._expiries) > 2 * self._num_records + 64:
            self._expiries = [
                (held.expires_at, key, peer) for key, records in self._keys.items() for peer, held in records.held.items()
            ]
            heapq.heapify(self._expiries)

    def _leave_source(self, key: str, held: StoredRecord) -> None:
        brought = self._from[held.source]
        del brought[key, held.record.peer]
        if not brought:
            del self._from[held.source]

    def _make_room(self, key: str, new: StoredRecord) -> bool:
        """Evict until `new` fits; False if it has to stay out itself."""
        victims: list[tuple[str, PeerId]] = []
        records, peer = self._keys.get(key), new.record.peer
        if records is not None and len(records.held) >= self._limits.per_key:
            by_source: dict[str, list[tuple[str, PeerId]]] = {}
            for other, held in records.held.items():
                by_source.setdefault(held.source, []).append((key, other))
            victims.append(self._who_gives_way(new, by_source))
        if len(written := self._keys_of.get(peer, ())) >= self._limits.per_writer:
            victims.append(self._who_gives_way(new, {new.source: [(other, peer) for other in written]}))
        if not victims and self._num_records >= self._limits.total:
            victims.append(self._who_gives_way(new, self._from))
        if _NOBODY in victims:
            return False
        for victim in victims:
            self._remove(*victim)
            self._counters["evicted_records"] += 1
        return True

    def _who_gives_way(self, new: StoredRecord, by_source: Mapping[str, Collection[tuple[str, PeerId]]]) -> tuple[str, PeerId]:
        """The record to evict for `new`, or `_NOBODY`.

        A source that has at least two more than the new one's always gives way, whatever lives it signs: one attacker
        with many keys crowds out only itself. Otherwise the first to expire does, of the same source if it has any.
        """
        own = by_source.get(new.source, ())
        crowd = max((len(group), source) for source, group in by_source.items())[1]
        if len(own) + 1 < len(by_source[crowd]):
            return self._soonest(by_source[crowd])[1:]
        if not own or len(by_source) == 1:
            candidates: Collection[tuple[str, PeerId]] = [one for group in by_source.values() for one in group]
        else:
            candidates = own
        if len(candidates) == self._num_records:
            expires_at, *victim = self._first_to_expire()
        else:
            expires_at, *victim = self._soonest(candidates)
        return (victim[0], victim[1]) if new.expires_at > expires_at else _NOBODY

    def _soonest(self, candidates: Collection[tuple[str, PeerId]]) -> tuple[float, str, PeerId]:
        """The first to expire of `candidates`; of very many, of those held for longest."""
        return min((self._keys[key].held[peer].expires_at, key, peer) for key, peer in itertools.islice(candidates, _VERY_MANY))

    def _first_to_expire(self) -> tuple[float, str, PeerId]:
        while True:
            expires_at, key, peer = self._expiries[0]
            held = self._find(key, peer)
            if held is not None and held.expires_at == expires_at:
                return self._expiries[0]
            heapq.heappop(self._expiries)

    def expire(self) -> None:
        """Drop what has outlived its time and remember its sequence number for as long again."""
        now = self._now()
        while self._num_records and (first := self._first_to_expire())[0] <= now:
            expires_at, key, peer = first
            record = self._remove(key, peer).record
            sequence, forget_at = self._expired.pop((key, peer), (-1, expires_at))
            if forget_at <= expires_at:
                sequence, forget_at = -1, expires_at
            self._expired[key, peer] = (max(sequence, record.sequence), max(forget_at, expires_at + record.ttl_s))
        while self._expired and (len(self._expired) > self._limits.expired or next(iter(self._expired.values()))[1] <= now):
            self._expired.popitem(last=False)

    def find(self, key: str, peer: PeerId) -> StoredRecord | None:
        """The record of `peer` under `key`, if one is held."""
        self.expire()
        return self._find(key, peer)

    def remaining_s(self, held: StoredRecord) -> float:
        """What is left of its life: all that may be handed on."""
        return held.expires_at - self._now()

    def page(self, key: str, after: PeerId, max_bytes: int, overhead_bytes: int) -> tuple[list[StoredRecord], bool]:
        """Records of peers above `after`, in order, while they fit `max_bytes`; and whether there are more."""
        self.expire()
        records = self._keys.get(key)
        if records is None:
            return [], False
        start = bisect.bisect_right(records.peers, after)
        chosen: list[StoredRecord] = []
        for peer in records.peers[start:]:
            held = records.held[peer]
            max_bytes -= held.signed.num_bytes + overhead_bytes
            if max_bytes < 0:
                return chosen, True
            chosen.append(held)
        return chosen, False

    # The interface of kademlia's storages, with a key's text in the place of its digest: a signature covers the text.

    def __setitem__(self, key: str, value: tuple[SignedRecord, float]) -> None:
        self.put(key, *value)

    def __getitem__(self, key: str) -> list[StoredRecord]:
        self.expire()
        return list(self._keys[key].held.values())

    def get(self, key: str, default: Any = None) -> Any:
        """The unexpired records under `key`, or `default` if there are none."""
        self.expire()  # only once: a record may expire between two looks at the clock
        records = self._keys.get(key)
        return default if records is None else list(records.held.values())

    def iter_older_than(self, seconds_old: float) -> list[tuple[str, StoredRecord]]:
        """Pairs (key, record) that nobody stored here in the last `seconds_old` seconds."""
        touched_before = self._now() - seconds_old
        return [(key, held) for key, held in self if held.touched_at <= touched_before]

    def __iter__(self) -> Iterator[tuple[str, StoredRecord]]:
        self.expire()
        return iter([(key, held) for key, records in self._keys.items() for held in records.held.values()])
