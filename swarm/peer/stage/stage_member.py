"""A stage peer's part in steps that have not committed: leaders, seals, ballots. Owns what the peer promised.

Must not route micro-batches (`micro_batches.py`), and must not lead its stage (`stage_leader.py`): both use what is here.
The rules are those of docs/design.md, "The life of a step"; the tables are in `lifecycle/step.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from swarm.averaging.all_reduce import StageSum
from swarm.base.ids import ZERO_BALLOT, Ballot, Ticket
from swarm.lifecycle.coverage import stage_result
from swarm.net.transport import Progress
from swarm.peer.at_work import AtWork
from swarm.peer.link import Refuse
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.load import LoadMeter
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.step_state import OpenSteps, StepState
from swarm.stage.executor import Priority
from swarm.wire import messages as m
from swarm.wire.framing import Frame

T = TypeVar("T")


class StageMember:
    """Keeps the step protocol at one peer of one stage.

    Args:
        context: of the peer at its stage.
        committed: what the open steps build on.
        steps: the open ones.
        meter: tells the leader what this peer has done so far.
        saved: steps of the checkpoints that this peer has written in this era and still has, as counts of commits.
    """

    def __init__(
        self,
        context: StageContext,
        committed: CommittedState,
        steps: OpenSteps,
        meter: LoadMeter,
        saved: Callable[[], tuple[int, ...]],
    ) -> None:
        self._context = context
        self._committed = committed
        self._meter = meter
        self._saved = saved
        self.steps = steps
        #: Tells callers whether the compute thread is at a job that may still end.
        self.at_work = AtWork(context.link, context.tasks, context.executor, committed.mates)
        self.promised: Ballot = ZERO_BALLOT
        #: Who was elected with the promised ballot; None before this peer heard of anybody.
        self.coordinator: m.Member | None = None
        for kind, handler in ((m.Collect, self._on_collect), (m.Revoke, self._on_revoke), (m.Elect, self._on_elect)):
            context.link.register(kind, handler)

    def take_over_from(self, before: StageMember) -> None:
        """Take over what the same peer promised at another stage."""
        self.coordinator, self.promised = before.coordinator, before.promised

    def members_for(self, step: int) -> tuple[m.Member, ...]:
        """Return the members of this stage for `step`: those of the record that made the version on which `step` builds.

        Nobody, if this peer does not hold that version any more. All peers that hold it agree, so at the zero attempt there
        is one leader.
        """
        version = self._committed.versions.at(self._context.config.base_step(step))
        return version.record.members[self._context.stage] if version is not None else ()

    def leader_of(self, step: int) -> m.Member | None:
        """Return who grants claims for `step`: the last to collect, else the first ready of `members_for`."""
        state = self.steps.get(step)
        if state is not None and state.leader is not None:
            return state.leader
        return next((x for x in self.members_for(step) if x.ready), None)

    def leads_stage(self) -> bool:
        """Tell whether this peer leads its stage in a step that is open."""
        last = min(self._committed.num_commits + self._context.config.delay_steps, self._context.config.total_steps - 1)
        leaders = [self.leader_of(step) for step in range(self._committed.num_commits, last + 1)]
        return any(leader is not None and leader.key == self._context.me.key for leader in leaders)

    def held_tickets(self) -> list[Ticket]:
        """Return the tickets of open steps whose gradient only this peer holds."""
        open_steps = {step: state for step, state in self.steps.items() if step >= self._committed.num_commits}
        entries = {step: tuple(state.accumulator.ledger.entries) for step, state in open_steps.items()}  # at once: jobs add some
        return [Ticket(step, index) for step, indexes in entries.items() for index in indexes]

    def step_state(self, step: int) -> StepState:
        """Return the open state of `step`.

        Raises:
            Refuse: `stale` if the step has committed, `behind` if this peer lags too far to know of it.
        """
        if step < self._committed.num_commits:
            raise Refuse("stale", f"step {step} has committed", record=self._committed.record)
        if step > self._committed.num_commits + self._context.config.delay_steps:
            raise Refuse(
                "behind", f"step {step} is ahead of this peer at {self._committed.num_commits}", record=self._committed.record
            )
        return self.steps.opened(step)

    def accept_ballot(self, ballot: Ballot) -> None:
        """Promise `ballot`.

        Raises:
            Refuse: a higher one was promised before.
        """
        if ballot < self.promised:
            accepted = f"ballot {self.promised.counter} was accepted"
            raise Refuse("lower_ballot", accepted, record=self._committed.record, ballot=self.promised)
        self.promised = ballot

    # ------------------------------------------------------------------------------------------------ ledger

    async def _on_collect(self, message: m.Collect, frame: Frame, progress: Progress) -> m.Collected:
        context, committed = self._context, self._committed
        context.require_stage(message.stage)
        self.accept_ballot(message.attempt.ballot)
        state = self.step_state(message.step)
        ledger = state.accumulator.ledger

        def job() -> m.Seal:
            if message.attempt.order < ledger.attempt.order:
                raise Refuse("wrong_state", f"attempt {message.attempt.order} is below {ledger.attempt.order}")
            state.collect(message.attempt, freeze=message.freeze)
            version_id = committed.versions.newest.version_id
            return ledger.seal(context.me, version_id, committed.digest_at(version_id), self._saved())

        seal = await self._run(job, progress, "seal")
        state.collected(message.attempt, message.leader)
        upload, download = context.carries.upload.rate, context.carries.download.rate
        return m.Collected(seal=seal, upload=upload, download=download, load=self._meter.report())

    async def _on_revoke(self, message: m.Revoke, frame: Frame, progress: Progress) -> m.Revoked:
        self._context.require_stage(message.stage)
        ledger = self.step_state(message.step).accumulator.ledger
        return m.Revoked(held=await self._run(lambda: ledger.revoke(message.index), progress))

    async def _run(self, job: Callable[[], T], progress: Progress, kind: str | None = None) -> T:
        """Run `job` in the compute thread. Jobs before it may be long: the caller's `progress` follows them.

        A job that waits when this coroutine ends is cancelled.

        Raises:
            Refuse: `busy` if a job before it hangs.
        """
        self.at_work.follow(progress, waits_s=0.0)
        running = asyncio.ensure_future(self._context.executor.run(job, Priority.CONTROL, kind))
        try:
            while not running.done():
                if why := self.at_work.overdue():
                    raise Refuse("busy", why)
                await asyncio.wait({running}, timeout=self._context.config.timing.heartbeat_s)
        finally:
            running.cancel()
        return running.result().value

    # ------------------------------------------------------------------------------------------------ coordinator

    async def _on_elect(self, message: m.Elect, frame: Frame, progress: Progress) -> m.Elected:
        self.accept_ballot(message.ballot)
        self.coordinator = message.coordinator
        prepared = [
            (step, self._prepared_result(state.average))
            for step, state in sorted(self.steps.items())
            if state.average is not None and state.accumulator.ledger.state == "prepared"
        ]
        highest = max(
            (s.accumulator.ledger.attempt for s in self.steps.values()), key=lambda attempt: attempt.order, default=m.Attempt()
        )
        return m.Elected(
            stage=self._context.stage,
            member=self._context.me,
            record=self._committed.record,
            attempt=highest,
            prepared=tuple(prepared),
        )

    def _prepared_result(self, average: StageSum) -> m.StageResult:
        return stage_result(
            average.attempt, average.seals, average.digest, average.sum_squares, (self._context.me,), tied=average.tied
        )
