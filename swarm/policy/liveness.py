"""Who of the peers that one calls is there: what failed calls teach, and whom to look at next. Pure: time is an argument.

A *look* is one cheap question of its own. A peer is *in doubt* from a call that failed until it was looked at, and *silent*
from a connection or look that failed until it answers. Deaths come in numbers (a rack, a preempted zone): one that fails
casts doubt on its whole group, and a second one on everybody, so that all who died are found in one look's time.
Must not know what peers are asked for; who works slowly or wrongly is the business of `routing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.wire.messages import Member

Key = tuple[str, str]

#: Who is silent is looked at again after so long, in seconds, and each time after twice as long.
FIRST_LOOK_S = 1.0
#: Who was heard within so long, in seconds, is not doubted because of others.
FRESH_S = 1.0
#: So many that fail within so long, in seconds, cast doubt on every group.
SPREADING = 2
SPREADING_S = 10.0
#: One that belongs to no group is remembered for so many of the longest times between looks.
REMEMBERED = 6
MAX_KNOWN = 4096


@dataclass(slots=True)
class _Doubt:
    member: Member
    reason: str
    since: float
    look_at: float
    is_silent: bool
    #: It has cast doubt on others.
    has_spread: bool = False
    num_looks: int = 0


class Stillness:
    """Says when what should move has stood still for long, and again only after twice as long each time."""

    def __init__(self, first_s: float, now: float) -> None:
        self._first_s = first_s
        self._seen: object = None
        self._since = now
        self._after_s = first_s

    def lasts(self, seen: object, *, now: float) -> bool:
        """Has it stood still for `first_s`? `seen` is what moves, as it is now."""
        if seen != self._seen:
            self._seen, self._since, self._after_s = seen, now, self._first_s
        return now - self._since >= self._first_s

    def is_due(self, seen: object, *, now: float) -> bool:
        """As `lasts`; but after it said so once, only when twice as long has passed."""
        is_due = self.lasts(seen, now=now) and now - self._since >= self._after_s
        if is_due:
            self._after_s *= 2
        return is_due


class Liveness:
    """What one peer knows of others, by (peer, incarnation). Holds at most `MAX_KNOWN` doubts, the newest."""

    def __init__(self, *, max_look_s: float) -> None:
        """`max_look_s`: the longest time between two looks at one that is silent."""
        self._max_look_s = max_look_s
        self._groups: Sequence[Mapping[Key, Member]] = ()
        self._heard: dict[Key, float] = {}
        self._doubts: dict[Key, _Doubt] = {}
        #: When the last ones failed.
        self._failed: list[float] = []

    def set_groups(self, groups: Sequence[Mapping[Key, Member]]) -> None:
        """Who is called from here on; what is known of others is forgotten."""
        self._groups = groups
        wanted = {key for group in groups for key in group}
        self._heard = {key: at for key, at in self._heard.items() if key in wanted}
        self._doubts = {key: doubt for key, doubt in self._doubts.items() if key in wanted}

    def is_silent(self, key: Key) -> bool:
        doubt = self._doubts.get(key)
        return doubt is not None and doubt.is_silent

    def is_doubted(self, key: Key) -> bool:
        """In doubt, or silent."""
        return key in self._doubts

    def why(self, key: Key) -> str:
        """What speaks against it; "" if nothing does."""
        doubt = self._doubts.get(key)
        return doubt.reason if doubt is not None else ""

    def silent(self, keys: Iterable[Key]) -> set[Key]:
        return {key for key in keys if self.is_silent(key)} if self._doubts else set()

    def doubted(self, keys: Iterable[Key]) -> set[Key]:
        """In doubt, or silent."""
        return {key for key in keys if key in self._doubts} if self._doubts else set()

    # ------------------------------------------------------------------------------------------------ what happens

    def answered(self, key: Key, *, now: float) -> None:
        self._doubts.pop(key, None)
        if any(key in group for group in self._groups):
            self._heard[key] = now

    def doubt(self, member: Member, reason: str, *, now: float, has_spread: bool = False) -> None:
        """Somebody else could not use it: it is to be looked at now."""
        if member.key not in self._doubts:
            self._note(member, _Doubt(member, reason, now, now, is_silent=False, has_spread=has_spread))

    def failed(self, member: Member, reason: str, *, now: float) -> None:
        """A call to it failed after it was delivered: it is to be looked at now, and others with it."""
        self.doubt(member, reason, now=now)
        self._spread(self._doubts[member.key], now)

    def fell_silent(self, member: Member, reason: str, *, now: float) -> None:
        """No connection could be made to it, or it did not answer a look."""
        known = self._doubts.get(member.key)
        doubt = known or _Doubt(member, reason, now, now, is_silent=True)
        doubt.is_silent, doubt.reason = True, reason
        self._note(member, doubt)
        longest = FIRST_LOOK_S if self._has_nobody(member.key) else self._max_look_s
        doubt.look_at = now + min(longest, FIRST_LOOK_S * 2**doubt.num_looks)
        doubt.num_looks = min(doubt.num_looks + 1, 16)
        self._spread(doubt, now)

    def _note(self, member: Member, doubt: _Doubt) -> None:
        self._doubts.pop(member.key, None)
        self._doubts[member.key] = doubt
        if len(self._doubts) > MAX_KNOWN:
            del self._doubts[next(iter(self._doubts))]

    def _has_nobody(self, key: Key) -> bool:
        """All of its group are silent: whoever comes back is needed at once."""
        return any(key in group and len(self.silent(group)) == len(group) for group in self._groups)

    def _spread(self, doubt: _Doubt, now: float) -> None:
        if doubt.has_spread:
            return
        doubt.has_spread = True
        self._failed = [*[at for at in self._failed if now - at < SPREADING_S][-SPREADING:], now]
        is_spreading = len(self._failed) >= SPREADING
        for group in self._groups:
            if doubt.member.key in group or is_spreading:
                for other, member in group.items():
                    if now - self._heard.get(other, -FRESH_S) >= FRESH_S:
                        self.doubt(member, "others failed", now=now, has_spread=is_spreading)

    # ------------------------------------------------------------------------------------------------ whom to look at

    def due(self, *, now: float, limit: int, timeout_s: float) -> list[Member]:
        """Whom to look at now, `limit` at most; each is due again `timeout_s` later if nobody tells what became of it."""
        groups = {key for group in self._groups for key in group}
        for key in [k for k, x in self._doubts.items() if now - x.since > REMEMBERED * self._max_look_s and k not in groups]:
            del self._doubts[key]
        waiting = sorted((x for x in self._doubts.values() if x.look_at <= now), key=lambda x: (x.is_silent, x.look_at))
        for doubt in waiting[:limit]:
            doubt.look_at = now + timeout_s
        return [doubt.member for doubt in waiting[:limit]]

    @property
    def next_look_at(self) -> float:
        """When somebody is due next; infinite if nobody is."""
        return min((doubt.look_at for doubt in self._doubts.values()), default=math.inf)
