"""The coordinator's part in who computes and who only aggregates: once in a period it revises the roles of each stage.

The shell around `policy/role_changes.py`. Which roles hold is in the newest record alone, with its members: a new coordinator
goes on with them, and measures for a period before it revises any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from swarm.base.ids import MemberKey
from swarm.lifecycle.commit_record import Members, computing
from swarm.peer.coordinator.run_leadership import RunLeadership
from swarm.policy.role_changes import Colleague, Decision, revise_roles
from swarm.policy.roles import Work
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: What a line carried at its best in the periods before counts by this much in the next.
MEMORY = 0.9

#: Seconds of compute per ticket of a member at a stage; None if it was not measured.
Seconds = Callable[[int, m.Member], float | None]


class MemberRoles:
    """One coordinator's view of what members could do, and what they are told to.

    Args:
        leadership: of the coordinator.
        seconds: tells how fast members compute.
    """

    def __init__(self, leadership: RunLeadership, seconds: Seconds) -> None:
        self._leadership = leadership
        self._seconds = seconds
        self._every_s = leadership.timing.rebalance_every_s
        #: What each member told of its line; what it does not know any more is as it was last known.
        self._loads: dict[tuple[int, MemberKey], m.Load] = {}
        #: Who only aggregates, and who of these has shown something in this period.
        self._aggregating: set[tuple[int, MemberKey]] = set()
        self._shown: set[tuple[int, MemberKey]] = set()
        #: The most that each line has carried out and in; what was long ago fades.
        self._best: dict[tuple[int, MemberKey], tuple[float, float]] = {}
        self.decided_at = leadership.now
        #: The policy, which is pure; a test may want certain roles.
        self.revise: Callable[[Sequence[Colleague], Work], Decision] = revise_roles
        #: Why the roles of each stage are what they are.
        self.reasons: dict[int, str] = {}

    def hear(self, stage: int, loads: tuple[m.Load, ...]) -> None:
        """Note what the lines of a stage's members carry."""
        for load in loads:
            place = (stage, load.member.key)
            known = self._loads.get(place, load).upload
            if place in self._aggregating:  # the round in which it was tried counts
                upload = max(known, load.upload) if place in self._shown else load.upload or known
                self._shown.update({place} if load.upload else ())
            else:
                upload = (known + load.upload) / 2 if known and load.upload else load.upload or known
            self._loads[place] = load.model_copy(update={"upload": upload})
            up, down = self._best.get(place, (0.0, 0.0))
            self._best[place] = (max(up, load.upload), max(down, load.download))

    def of(self, members: Members) -> Members:
        """Return `members` with the roles that they have in the next record."""
        config, now = self._leadership.config, self._leadership.now
        if self._every_s and config.mode == "sync" and now - self.decided_at >= self._every_s:
            self.decided_at = now
            listed = {(stage, x.key) for stage, xs in enumerate(members) for x in xs}
            self._loads = {place: load for place, load in self._loads.items() if place in listed}
            best = {place: self._best[place] for place in self._loads}
            self._best = {place: (MEMORY * up, MEMORY * down) for place, (up, down) in best.items()}
            members = tuple(self._revised(stage, members) for stage in range(len(members)))
            self._shown = set()
            self._shown = set()
        # Whoever was to compute may be gone.
        members = tuple(xs if computing(xs) else tuple(_with_role(x, "both") for x in xs) for xs in members)
        self._aggregating = {(k, x.key) for k, xs in enumerate(members) for x in xs if x.role == "aggregate"}
        return members

    def _compute_s(self, stage: int, members: Members) -> float:
        """Seconds in which those of a stage that compute do so in a step; 0 if they were not measured."""
        known = [seconds for x in computing(members[stage]) if (seconds := self._seconds(stage, x))]
        return self._leadership.config.tickets_per_step / sum(1.0 / seconds for seconds in known) if known else 0.0

    def _revised(self, stage: int, members: Members) -> tuple[m.Member, ...]:
        config = self._leadership.config
        ready = [x for x in members[stage] if x.ready]
        loads = [self._loads.get((stage, x.key), m.Load(member=x)) for x in ready]
        best = [self._best.get((stage, x.key), (0.0, 0.0)) for x in ready]
        colleagues = [
            Colleague(
                name=x.peer[:8],
                role=x.role,
                tickets_per_s=1.0 / seconds if (seconds := self._seconds(stage, x)) else None,
                upload=load.upload or None,
                best_upload=up or None,
                best_download=down or None,
            )
            for x, load, (up, down) in zip(ready, loads, best, strict=True)
        ]
        others = [self._compute_s(k, members) for k in range(len(members)) if k != stage]
        work = Work(
            tickets=config.tickets_per_step,
            average_bytes=max((load.average_bytes for load in loads), default=0) if len(ready) <= config.max_group else 0,
            overlaps=config.delay_steps > 0,
            others_s=max(others, default=0.0),
        )
        roles, reason = self.revise(colleagues, work)
        if roles != tuple(x.role for x in ready):
            logger.info("stage %d: roles: %s", stage, reason)
        self.reasons[stage] = reason
        of = {x.key: role for x, role in zip(ready, roles, strict=True)}
        return tuple(_with_role(x, of.get(x.key, x.role)) for x in members[stage])


def _with_role(member: m.Member, role: str) -> m.Member:
    return member if member.role == role else member.model_copy(update={"role": role})
