"""Who of the peers that one calls is there: what failed calls teach, and whom to look at next. Pure: time is an argument.

A *look* is one cheap question of its own. A peer is *suspected* from a call that failed until it was looked at, and *silent*
from a connection or look that failed until it answers. Deaths come in numbers (a rack, a preempted zone): one that fails
makes its whole group suspect, and a second one everybody, so that all who died are found in one look's time.
Must not know what peers are asked for; who works slowly or wrongly is the business of `routing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.base.ids import MemberKey
from swarm.wire.messages import Member

#: Seconds after which a silent one is looked at again; each time it takes twice as long.
FIRST_LOOK_S = 1.0
#: Seconds for which one that was heard is not suspected because of others.
FRESH_S = 1.0
#: So many failures within so many seconds make every group suspect.
SPREADING = 2
SPREADING_S = 10.0
#: One that belongs to no group is remembered for so many of the longest times between looks.
REMEMBERED = 6
MAX_KNOWN = 4096


@dataclass(slots=True)
class _Suspicion:
    member: Member
    reason: str
    since: float
    look_at: float
    is_silent: bool
    #: It has made others suspect.
    has_spread: bool = False
    num_looks: int = 0


class Stillness:
    """Says when what should move has stood still for long, and again only after twice as long each time."""

    def __init__(self, first_s: float, now: float) -> None:
        self._first_s = first_s
        self._seen: object = None
        self._since = now
        self._after_s = first_s

    def observe(self, seen: object, *, now: float) -> bool:
        """Note `seen`, which is what moves, as it is now; return whether it has stood still for `first_s`."""
        if seen != self._seen:
            self._seen, self._since, self._after_s = seen, now, self._first_s
        return now - self._since >= self._first_s

    def take_due(self, seen: object, *, now: float) -> bool:
        """Note `seen`, and return whether to say so: as `observe`, but after it was said, only once twice as long has passed."""
        is_due = self.observe(seen, now=now) and now - self._since >= self._after_s
        if is_due:
            self._after_s *= 2
        return is_due


class Liveness:
    """The knowledge of one peer whether others are there. Holds at most `MAX_KNOWN` suspicions, the newest."""

    def __init__(self, *, max_look_s: float) -> None:
        """Know nothing of anybody; `max_look_s` is the longest time between two looks at one that is silent."""
        self._max_look_s = max_look_s
        self._groups: Sequence[Mapping[MemberKey, Member]] = ()
        self._heard: dict[MemberKey, float] = {}
        self._suspicions: dict[MemberKey, _Suspicion] = {}
        #: When the last ones failed.
        self._failed: list[float] = []

    def set_groups(self, groups: Sequence[Mapping[MemberKey, Member]]) -> None:
        """Take over who is called from here on; what is known of others is forgotten."""
        self._groups = groups
        wanted = {key for group in groups for key in group}
        self._heard = {key: at for key, at in self._heard.items() if key in wanted}
        self._suspicions = {key: suspicion for key, suspicion in self._suspicions.items() if key in wanted}

    def is_silent(self, key: MemberKey) -> bool:
        """Whether it could not be reached, and has not answered since."""
        suspicion = self._suspicions.get(key)
        return suspicion is not None and suspicion.is_silent

    def is_suspected(self, key: MemberKey) -> bool:
        """Whether it may be gone: something spoke against it, and it has not answered since."""
        return key in self._suspicions

    def why(self, key: MemberKey) -> str:
        """Say what speaks against it; "" if nothing does."""
        suspicion = self._suspicions.get(key)
        return suspicion.reason if suspicion is not None else ""

    def silent(self, keys: Iterable[MemberKey]) -> set[MemberKey]:
        """The silent ones of `keys`."""
        return {key for key in keys if self.is_silent(key)} if self._suspicions else set()

    def suspected(self, keys: Iterable[MemberKey]) -> set[MemberKey]:
        """The suspected ones of `keys`; silent ones are suspected too."""
        return {key for key in keys if key in self._suspicions} if self._suspicions else set()

    # ------------------------------------------------------------------------------------------------ what happens

    def answered(self, key: MemberKey, *, now: float) -> None:
        """Note that it is there: nothing speaks against it."""
        self._suspicions.pop(key, None)
        if any(key in group for group in self._groups):
            self._heard[key] = now

    def suspect(self, member: Member, reason: str, *, now: float, has_spread: bool = False) -> None:
        """Note that somebody else could not use it: it is to be looked at now."""
        if member.key not in self._suspicions:
            self._note(member, _Suspicion(member, reason, now, now, is_silent=False, has_spread=has_spread))

    def failed(self, member: Member, reason: str, *, now: float) -> None:
        """Note that a call failed after it was delivered: its peer is to be looked at now, and others with it."""
        self.suspect(member, reason, now=now)
        self._spread(self._suspicions[member.key], now)

    def fell_silent(self, member: Member, reason: str, *, now: float) -> None:
        """Note that no connection could be made to it, or that it did not answer a look."""
        known = self._suspicions.get(member.key)
        suspicion = known or _Suspicion(member, reason, now, now, is_silent=True)
        suspicion.is_silent, suspicion.reason = True, reason
        self._note(member, suspicion)
        longest = FIRST_LOOK_S if self._has_nobody(member.key) else self._max_look_s
        suspicion.look_at = now + min(longest, FIRST_LOOK_S * 2**suspicion.num_looks)
        suspicion.num_looks = min(suspicion.num_looks + 1, 16)
        self._spread(suspicion, now)

    def _note(self, member: Member, suspicion: _Suspicion) -> None:
        self._suspicions.pop(member.key, None)
        self._suspicions[member.key] = suspicion
        if len(self._suspicions) > MAX_KNOWN:
            del self._suspicions[next(iter(self._suspicions))]

    def _has_nobody(self, key: MemberKey) -> bool:
        """All of its group are silent: whoever comes back is needed at once."""
        return any(key in group and len(self.silent(group)) == len(group) for group in self._groups)

    def _spread(self, suspicion: _Suspicion, now: float) -> None:
        if suspicion.has_spread:
            return
        suspicion.has_spread = True
        self._failed = [*[at for at in self._failed if now - at < SPREADING_S][-SPREADING:], now]
        is_spreading = len(self._failed) >= SPREADING
        for group in self._groups:
            if suspicion.member.key in group or is_spreading:
                for other, member in group.items():
                    if now - self._heard.get(other, -FRESH_S) >= FRESH_S:
                        self.suspect(member, "others failed", now=now, has_spread=is_spreading)

    # ------------------------------------------------------------------------------------------------ whom to look at

    def due(self, *, now: float, limit: int, timeout_s: float) -> list[Member]:
        """Choose whom to look at now, `limit` at most; each is due again `timeout_s` later if nobody tells what became of it."""
        groups = {key for group in self._groups for key in group}
        for key in [k for k, x in self._suspicions.items() if now - x.since > REMEMBERED * self._max_look_s and k not in groups]:
            del self._suspicions[key]
        waiting = sorted((x for x in self._suspicions.values() if x.look_at <= now), key=lambda x: (x.is_silent, x.look_at))
        for suspicion in waiting[:limit]:
            suspicion.look_at = now + timeout_s
        return [suspicion.member for suspicion in waiting[:limit]]

    @property
    def next_look_at(self) -> float:
        """The time at which somebody is due next; infinite if nobody is."""
        return min((suspicion.look_at for suspicion in self._suspicions.values()), default=math.inf)
