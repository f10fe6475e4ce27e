"""Who the next record lists at each stage: the holders of the average, joiners, nobody who leaves, moves or was excluded.

A joiner counts once it has answered at the address that it announces: one that asks but cannot be asked costs nobody anything.
Owns what stage peers have asked for since the last record, which a new coordinator hears again. Must not end steps: the
coordinator asks, and writes the record.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from swarm.base.ids import MemberKey
from swarm.lifecycle.commit_record import Members
from swarm.peer.coordinator.chosen_leaders import ChosenLeaders, StageLost
from swarm.peer.coordinator.run_leadership import RunLeadership
from swarm.peer.link import Refuse, Tasks
from swarm.policy.liveness import FIRST_LOOK_S
from swarm.wire import messages as m

#: Peers that wait to be listed; more are sent away.
MAX_JOINERS = 1024


@dataclass
class _Joiner:
    """A stage peer that wants to be listed in the next record."""

    stage: int
    member: m.Member
    version_id: str | None
    seen: float
    #: It answered at its address.
    is_met: bool = False
    #: When it is looked at next, if it did not answer, and after how long again.
    meet_at: float = 0.0
    meet_after_s: float = FIRST_LOOK_S


class NextMembers:
    """One coordinator's view of who comes and who goes."""

    def __init__(self, leadership: RunLeadership, chosen_leaders: ChosenLeaders, tasks: Tasks) -> None:
        self._leadership = leadership
        self._tasks = tasks
        self._chosen_leaders = chosen_leaders
        self._joiners: dict[MemberKey, _Joiner] = {}
        #: Members that go, with the first step whose record does not list them: until then it takes their gradients.
        self._leaving: dict[MemberKey, int] = {}
        self._last_join = 0.0
        #: Since when nobody of some stage holds the newest version; infinite while somebody of each does.
        self._without_state_since = math.inf
        #: Incarnations whose place another one of the same peer took, the latest last.
        self._replaced: dict[MemberKey, None] = {}

    # ------------------------------------------------------------------------------------------------ what is asked for

    def join(self, stage: int, member: m.Member, version_id: str | None) -> str:
        """Note that `member`, which holds the state of `version_id`, asks to be listed, or asks again.

        Returns:
            What keeps it from that, if anything does but the run.

        Raises:
            Refuse: too many others ask.
        """
        now = self._leadership.now
        if member.key in self._replaced:  # both live: a peer that is started again does not know its earlier incarnation
            return (
                f"this peer to end: another one with its identity {member.peer[:8]} has joined since; if its state directory was "
                "copied from there, start it with an empty one"
            )
        known = self._joiners.get(member.key)
        if known is None:
            self._forget_silent()
            if len(self._joiners) >= MAX_JOINERS:
                raise Refuse("busy", f"{MAX_JOINERS} peers want to join already")
            for key in [k for k in self._joiners if k[0] == member.peer]:
                del self._joiners[key]  # an earlier incarnation
                self._replaced[key] = None
                if len(self._replaced) > MAX_JOINERS:
                    del self._replaced[next(iter(self._replaced))]
            known = self._joiners[member.key] = _Joiner(stage, member, version_id, now)
        known.is_met = known.is_met and (known.member.host, known.member.port) == (member.host, member.port)
        known.stage, known.member, known.version_id, known.seen = stage, member, version_id, now
        if known.is_met:
            return ""
        if known.meet_at <= now:
            known.meet_at = math.inf
            self._tasks.start(self._meet(known), f"look at joiner {member.peer[:8]}")
        why = self._leadership.link.presence.liveness.why(member.key)
        return f"this peer to answer at {member.host}:{member.port}, which it announces: {why}" if why else ""

    async def _meet(self, joiner: _Joiner) -> None:
        """Find out whether it can be asked, as whoever trains with it must."""
        joiner.is_met = await self._leadership.link.presence.look(joiner.member)
        joiner.meet_at = self._leadership.now + joiner.meet_after_s
        joiner.meet_after_s = min(2 * joiner.meet_after_s, self._leadership.timing.record_ttl_s)
        if joiner.is_met:
            self._last_join = self._leadership.now
            await self._leadership.notify()

    def leave(self, stage: int, member: m.Member) -> None:
        """Note that `member` goes once the step that is open has committed."""
        record = self._leadership.record
        if record is not None and any(x.key == member.key for x in record.members[stage]):
            self._leaving.setdefault(member.key, record.step + 1 + self._leadership.config.delay_steps)
        self._joiners.pop(member.key, None)

    @property
    def joining(self) -> Set[MemberKey]:
        """Peers that wait to be listed."""
        return self._joiners.keys()

    @property
    def leaving(self) -> Set[MemberKey]:
        """Members that go."""
        return self._leaving.keys()

    @property
    def coming(self) -> list[tuple[int, m.Member]]:
        """Joiners that answer, and the stages that they will serve."""
        return [(joiner.stage, joiner.member) for joiner in self._joiners.values() if joiner.is_met]

    def _forget_silent(self) -> None:
        for key in [k for k, j in self._joiners.items() if self._leadership.now - j.seen > self._leadership.timing.record_ttl_s]:
            del self._joiners[key]

    def require_state(self) -> None:
        """Look for stages whose members live and are listed as ready, but have another version: they would never serve.

        Raises:
            StageLost: a stage has had none but such for `stage_lost_s`.
        """
        now, lost_s = self._leadership.now, self._leadership.timing.stage_lost_s
        stages = self._stages_without_state()
        self._without_state_since = min(self._without_state_since, now) if stages else math.inf
        if now - self._without_state_since > lost_s:
            self._without_state_since = math.inf
            step = self._leadership.newest.step + 1
            raise StageLost(f"no member of stages {stages} has held the state of step {step} for {lost_s:g} s")

    def _stages_without_state(self) -> list[int]:
        """Find stages whose ready members all are gone, or ask to join because they lack the newest version.

        One that is gone asks for nothing, and must not keep the others waiting for what it held.
        """
        record, since = self._leadership.newest, self._leadership.now - self._leadership.timing.request_s

        def lacks_state(member: m.Member) -> bool:
            joiner = self._joiners.get(member.key)
            return joiner is not None and joiner.seen >= since and joiner.version_id != record.version_id

        silent = self._leadership.link.presence.liveness.silent(x.key for members in record.members for x in members)
        ready = [
            [x for x in members if x.ready and x.key not in silent and not self._chosen_leaders.is_excluded(stage, x.key)]
            for stage, members in enumerate(record.members)
        ]
        return [stage for stage, members in enumerate(ready) if members and all(map(lacks_state, members))]

    # ------------------------------------------------------------------------------------------------ the first record

    @property
    def quiet_s(self) -> float:
        """Seconds in which nobody new has come that answers."""
        return self._leadership.now - self._last_join

    def could_begin(self) -> list[list[m.Member]]:
        """Return who could begin the run, by stage."""
        self._forget_silent()
        met = [j for j in self._joiners.values() if j.is_met]
        return [[j.member for j in met if j.stage == k] for k in range(self._leadership.config.num_stages)]

    def began(self, record: m.CommitRecord) -> None:
        """Forget who is listed in the first record: they need not be listed again."""
        for key in [x.key for members in record.members for x in members]:
            self._joiners.pop(key, None)

    # ------------------------------------------------------------------------------------------------ the next record

    def committed(self, record: m.CommitRecord) -> None:
        """Forget those who left and are not listed any more."""
        listed = {x.key for xs in record.members for x in xs}
        self._leaving = {key: last for key, last in self._leaving.items() if key in listed}

    def next_members(self, results: list[m.StageResult]) -> Members:
        """Choose who is listed next, leaders first: holders of the average and joiners, but not who leaves or moves."""
        staying = [self._staying(stage, result) for stage, result in enumerate(results)]
        for move in self._leadership.newest.moves:
            held = any(x.key == move.member.key for x in results[move.source].holders)
            if held and all(x.key != move.member.key for x in staying[move.source]):
                member = move.member.model_copy(update={"ready": False, "role": "both"})
                self._joiners[member.key] = _Joiner(move.target, member, None, self._leadership.now, is_met=True)
        return tuple(self._with_joiners(stage, members) for stage, members in enumerate(staying))

    def _staying(self, stage: int, result: m.StageResult) -> list[m.Member]:
        listed = {x.key: x for x in self._leadership.newest.members[stage]}
        moving = {x.member.key for x in self._leadership.newest.moves if x.source == stage}
        holders = [listed[x.key] for x in result.holders if x.key in listed]
        step = self._leadership.newest.step + 1
        gone = {key for key, last in self._leaving.items() if last <= step}
        staying: list[m.Member] = []
        for going in (gone | moving, gone, set()):  # never empty a stage: who moves stays first
            if not any(x.ready for x in staying):
                staying = [x for x in holders if x.key not in going]
        leader = self._chosen_leaders.leader(stage)
        staying.sort(key=lambda x: leader is None or x.key != leader.key)
        return staying

    def _with_joiners(self, stage: int, staying: list[m.Member]) -> tuple[m.Member, ...]:
        record, now = self._leadership.newest, self._leadership.now
        present = {x.key for x in staying}
        for key, joiner in list(self._joiners.items()):
            if joiner.stage != stage or key in self._leaving:
                continue
            if now - joiner.seen > self._leadership.timing.record_ttl_s or key in present:
                del self._joiners[key]
            elif joiner.is_met and not self._chosen_leaders.is_excluded(stage, key):
                # A joiner is listed at once, and copies averages; it is ready, and waited for, once it holds the newest version.
                ready = joiner.member.ready and joiner.version_id == record.version_id
                staying.append(joiner.member.model_copy(update={"ready": ready}))
                if ready:
                    del self._joiners[key]
        return tuple(staying)
