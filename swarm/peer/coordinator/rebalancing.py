"""The coordinator's part in who serves which stage: places newcomers, and decides once in a period who moves.

The shell around `policy/placement.py` and `policy/rebalance.py`: hears what members have done. Soft state: a new
coordinator measures for a period before it decides. Which moves are under way is in the newest record alone
(`lifecycle/PROTOCOL.md`, "Moves").
"""

from __future__ import annotations

import logging
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable

from swarm.base.choices import optimizer_facts
from swarm.base.ids import MemberKey, PeerId
from swarm.lifecycle.commit_record import Members
from swarm.peer.coordinator.member_roles import MemberRoles
from swarm.peer.coordinator.run_leadership import RunLeadership
from swarm.policy.placement import best_stage
from swarm.policy.rebalance import RebalancePlan, plan_moves
from swarm.policy.throughput import StageWork, Swarm, Worker, held_per_state
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: What was measured in the period before counts by this much in the next.
MEMORY = 0.5
#: Peers whose pace is remembered, over moves and restarts.
MAX_REMEMBERED = 4096
#: A newcomer that was placed and has not asked to be listed after so many seconds does not come.
PLACED_S = 60.0

#: Decides who moves, with the arguments of `plan_moves`.
Planner = Callable[..., RebalancePlan]


class Rebalancing:
    """One coordinator's view of what everyone does.

    Args:
        leadership: of the coordinator.
        plan: the policy, which is pure; a test may want certain moves.
    """

    def __init__(self, leadership: RunLeadership, plan: Planner = plan_moves) -> None:
        self._leadership = leadership
        self._plan = plan
        self._every_s = leadership.timing.rebalance_every_s
        #: Of each member its newest report, and the one at the beginning of the period.
        self._loads: dict[tuple[int, MemberKey], m.Load] = {}
        self._before: dict[tuple[int, MemberKey], m.Load] = {}
        #: Seconds of compute and tickets, by stage, as of the last decision; old ones fade.
        self._measured: OrderedDict[PeerId, dict[int, tuple[float, float]]] = OrderedDict()
        #: Newcomers that were placed: stage, member, when, and the seconds per ticket that are expected of it.
        self._placed: dict[MemberKey, tuple[int, m.Member, float, float | None]] = {}
        self._decided_at = leadership.now
        self.roles = MemberRoles(leadership, lambda stage, member: self._worker(stage, member).seconds.get(stage))
        #: Why the last decision was what it was.
        self.reason = "nothing was decided yet"

    def hear(self, stage: int, loads: tuple[m.Load, ...]) -> None:
        """Note what the members of a stage have done so far, as their leader handed it on."""
        self.roles.hear(stage, loads)
        for load in loads:
            place = (stage, load.member.key)
            self._loads[place] = load
            before = self._before.get(place)
            if before is not None and load.elapsed_s < before.elapsed_s:  # it was away: it counts from nothing again
                del self._before[place]

    def _since(self, place: tuple[int, MemberKey]) -> m.Load | None:
        """Return what a member did in this period."""
        load, before = self._loads.get(place), self._before.get(place)
        if load is None or before is None:
            return load
        return load.model_copy(
            update={
                name: getattr(load, name) - getattr(before, name)
                for name in ("elapsed_s", "num_tickets", "busy_s", "queue_s", "num_bytes")
            }
        )

    def _remember(self) -> None:
        """Keep what was measured in this period, for the next, and for peers that move or come back."""
        for stage, key in self._loads:
            done = self._since((stage, key))
            if done is None or not done.num_tickets:
                continue
            known = self._measured.setdefault(key[0], {})
            busy_s, num_tickets = known.get(stage, (0.0, 0.0))
            known[stage] = (MEMORY * busy_s + done.busy_s, MEMORY * num_tickets + done.num_tickets)
            self._measured.move_to_end(key[0])
        while len(self._measured) > MAX_REMEMBERED:
            self._measured.popitem(last=False)

    def swarm(self, members: Members) -> Swarm:
        """Return what the policies look at; who only aggregates computes nowhere, and so does not move."""
        return Swarm(
            [self._work(stage, xs) for stage, xs in enumerate(members)],
            [self._worker(stage, x) for stage, xs in enumerate(members) for x in xs if x.role != "aggregate"],
        )

    def _work(self, stage: int, members: tuple[m.Member, ...]) -> StageWork:
        loads = [self._loads[stage, x.key] for x in members if (stage, x.key) in self._loads]
        sizes = [load.num_bytes / load.num_tickets for load in loads if load.num_tickets]
        return StageWork(
            ticket_bytes=statistics.median(sizes) if sizes else 0.0,
            state_bytes=max((load.state_bytes for load in loads), default=0),
            held_per_state=held_per_state(optimizer_facts(self._leadership.config.optimizer).kept_per_master),
        )

    def _worker(self, stage: int, member: m.Member) -> Worker:
        measured = self._measured.get(member.peer, {})
        seconds = {k: busy_s / num_tickets for k, (busy_s, num_tickets) in measured.items() if busy_s > 0}
        num_tickets = measured.get(stage, (0.0, 0.0))[1]
        done = self._since((stage, member.key))
        if done is None:
            return Worker(key=member.key, stage=stage, seconds=seconds, num_tickets=num_tickets, ready=member.ready)
        return Worker(
            key=member.key,
            stage=stage,
            seconds=seconds,
            num_tickets=num_tickets,
            ready=member.ready,
            bandwidth=done.bandwidth or None,
            room_bytes=done.room_bytes if done.room_bytes >= 0 else None,
            load=done.busy_s / done.elapsed_s + done.queue_s / done.busy_s if done.elapsed_s > 0 and done.busy_s > 0 else 0.0,
        )

    def place(self, message: m.Place, members: Members, coming: Iterable[tuple[int, m.Member]]) -> m.Placed:
        """Choose the best stage for a newcomer, with everyone who was placed before it and is not there yet.

        Args:
            message: what the newcomer says of itself.
            members: of the newest record.
            coming: who has asked to be listed, and where.
        """
        now = self._leadership.now
        self._placed = {key: entry for key, entry in self._placed.items() if now - entry[2] < PLACED_S}
        known = self.swarm(members)
        there = {worker.key: worker for worker in known.workers}
        for joins_at, member in coming:
            there.setdefault(member.key, self._worker(joins_at, member))
            self._placed.pop(member.key, None)
        for placed_at, member, _, placed_s in self._placed.values():
            seconds = {placed_at: placed_s} if placed_s else {}
            there.setdefault(member.key, Worker(key=member.key, stage=placed_at, seconds=seconds))
        others = {key: worker for key, worker in there.items() if key[0] != message.member.peer}  # not its own earlier life
        expected_s = self._expected_s(message, others.values())
        newcomer = Worker(
            key=message.member.key,
            stage=0,
            seconds=self._worker(0, message.member).seconds or ({0: expected_s} if expected_s else {}),
            bandwidth=message.bandwidth or None,
            room_bytes=message.room_bytes if message.room_bytes >= 0 else None,
        )
        stage, reason = best_stage(Swarm(known.stages, others.values()), newcomer)
        if stage is not None and len(self._placed) < MAX_REMEMBERED:
            self._placed[message.member.key] = (stage, message.member, now, expected_s)
        logger.info("%s is placed: %s", message.member.peer[:8], reason)
        return m.Placed(stage=stage, reason=reason)

    def _expected_s(self, message: m.Place, workers: Iterable[Worker]) -> float | None:
        """Guess the seconds per ticket of a device that has computed none: those of the others, scaled by the benchmarks."""
        work = []
        for worker in workers:
            load = self._loads.get((worker.stage, worker.key))
            if load is not None and load.flops_per_s and worker.stage in worker.seconds:
                work.append(worker.seconds[worker.stage] * load.flops_per_s)
        return statistics.median(work) / message.flops_per_s if work and message.flops_per_s else None

    def decide(self, members: Members, leaving: set[MemberKey]) -> tuple[m.Move, ...]:
        """Decide the moves of the record that lists `members`; none but once in a period, and none while others are under way."""
        now = self._leadership.now
        if not self._every_s or now - self._decided_at < self._every_s or self._leadership.newest.moves:
            return ()
        self._remember()
        staying = tuple(tuple(x for x in xs if x.key not in leaving) for xs in members)
        plan = self._plan(self.swarm(staying), period_s=self._every_s, min_peers=self._leadership.config.min_peers_per_stage)
        if plan.reason != self.reason:
            logger.info("moves: %s", plan.reason)
        self.reason = plan.reason
        self._decided_at = now
        listed = {(stage, x.key): x for stage, xs in enumerate(members) for x in xs}
        self._loads = {place: load for place, load in self._loads.items() if place in listed}
        self._before = dict(self._loads)
        moves = (x for x in plan.moves if x.source != x.target)  # to stay is no move: nothing is handed over or reloaded
        return tuple(m.Move(member=listed[x.source, x.key], source=x.source, target=x.target) for x in moves)
