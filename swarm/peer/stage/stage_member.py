"""A stage peer's part in steps that have not committed: ledgers, seals, ballots. Owns accumulators and promises.

Must not route micro-batches and must not lead: `stage_leader` and `micro_batches` use what is here. The rules are those
of docs/design.md, "The life of a step"; the tables are in `lifecycle/step.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from swarm.averaging.all_reduce import StageSum
from swarm.averaging.local_updates import LocalAccumulator
from swarm.averaging.reduction import RoundFailed
from swarm.base.ids import ZERO_BALLOT, Ballot, Ticket
from swarm.lifecycle.coverage import stage_result
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse, Tasks
from swarm.peer.link_meters import LinkMeters
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.step_state import StepState
from swarm.stage.accumulator import Accumulator
from swarm.stage.compute import StageCompute
from swarm.stage.executor import Priority, Threads
from swarm.stage.moments import Moments
from swarm.wire import messages as m
from swarm.wire.framing import Frame

T = TypeVar("T")


class StageMember(CommittedState):
    """The step protocol at one peer of one stage."""

    def __init__(self, link: Link, stage: int, compute: StageCompute, moments: Moments, threads: Threads, tasks: Tasks) -> None:
        super().__init__(link, stage, compute, moments, threads, tasks)
        self.promised: Ballot = ZERO_BALLOT
        self.coordinator: m.Member | None = None
        #: What this peer's link carries, measured by `rounds.py`.
        self.carries = LinkMeters(link.context.transport)
        #: Of slices, reduced slices and copies of averages, as coded, since the start; counted by `rounds.py`.
        self.average_bytes_sent = 0
        #: Numbers of commits of the checkpoints that this peer has written in this era and still has; see `checkpoints.py`.
        self.saved: tuple[int, ...] = ()
        #: What this peer has done so far; see `load.py`.
        self.load: Callable[[], m.Load | None] = lambda: None
        for kind, handler in ((m.Collect, self._on_collect), (m.Revoke, self._on_revoke), (m.Elect, self._on_elect)):
            link.register(kind, handler)

    def succeed(self, before: StageMember) -> None:
        """What the same peer knew, promised and counted at another stage holds here."""
        self.record, self.coordinator, self.promised = before.record, before.coordinator, before.promised
        self.discarded_steps = before.discarded_steps
        self.average_bytes_sent = before.average_bytes_sent
        self.state_bytes_sent, self.state_bytes_received = before.state_bytes_sent, before.state_bytes_received

    def members_for(self, step: int) -> tuple[m.Member, ...]:
        """Members of this stage for `step`: those of the record that its version came from, or nobody if that is gone.

        Two peers never differ here, so at the zero attempt there is one leader.
        """
        version = self.versions.at(self.config.base_step(step))
        return version.record.members[self.stage] if version is not None else ()

    def leader_of(self, step: int) -> m.Member | None:
        """Who grants claims for `step`: the last to collect, else the record's first ready member."""
        state = self.steps.get(step)
        if state is not None and state.leader is not None:
            return state.leader
        return next((x for x in self.members_for(step) if x.ready), None)

    def leads(self) -> bool:
        """This peer leads its stage in a step that is open."""
        last = min(self.num_commits + self.config.delay_steps, self.config.total_steps - 1)
        leaders = [self.leader_of(step) for step in range(self.num_commits, last + 1)]
        return any(leader is not None and leader.key == self.me.key for leader in leaders)

    def held_tickets(self) -> list[Ticket]:
        """Tickets of open steps whose gradient only this peer holds."""
        open_steps = {step: state for step, state in self.steps.items() if step >= self.num_commits}
        entries = {step: tuple(state.accumulator.ledger.entries) for step, state in open_steps.items()}  # at once: jobs add some
        return [Ticket(step, index) for step, indexes in entries.items() for index in indexes]

    def step_state(self, step: int) -> StepState:
        """The open state of `step`.

        Raises:
            Refuse: `stale` if the step has committed, `behind` if it is too far ahead.
        """
        if step < self.num_commits:
            raise Refuse("stale", f"step {step} has committed", record=self.record)
        if step > self.num_commits + self.config.delay_steps:
            raise Refuse("behind", f"step {step} is ahead of this peer at {self.num_commits}", record=self.record)
        state = self.steps.get(step)
        if state is None:
            state = self.steps[step] = StepState(self.make_accumulator(step))
        return state

    async def caught_up(self, step: int, *, num_commits: int | None = None) -> None:
        """Until this peer holds the version that `step` builds on, or `step` is over; for a while at most.

        `num_commits` asks for another version than that.
        """
        wanted = self.config.base_step(step) if num_commits is None else num_commits
        while True:
            try:
                async with asyncio.timeout(self.config.timing.request_s / 2), self.committed:
                    await self.committed.wait_for(lambda: step < self.num_commits or self.versions.at(wanted) is not None)
            except TimeoutError:
                if self.is_applying:  # behind a long job perhaps
                    continue
            return

    def make_accumulator(self, step: int) -> Accumulator:
        dtype, device = self.compute.master_dtype, self.compute.device
        if self.config.mode == "local":
            return LocalAccumulator(step, self.own, dtype=dtype, device=device)
        return Accumulator(step, self.compute.layout, dtype=dtype, device=device)

    def accept_ballot(self, ballot: Ballot) -> None:
        """Members refuse lower ballots than they promised."""
        if ballot < self.promised:
            accepted = f"ballot {self.promised.counter} was accepted"
            raise Refuse("lower_ballot", accepted, record=self.record, ballot=self.promised)
        self.promised = ballot

    # ------------------------------------------------------------------------------------------------ ledger

    async def _on_collect(self, message: m.Collect, frame: Frame, progress: Progress) -> m.Collected:
        self.require_stage(message.stage)
        self.accept_ballot(message.attempt.ballot)
        state = self.step_state(message.step)
        ledger = state.accumulator.ledger

        def job() -> m.Seal:
            if message.attempt.order < ledger.attempt.order:
                raise Refuse("wrong_state", f"attempt {message.attempt.order} is below {ledger.attempt.order}")
            # What is frozen is taken now: when the round begins, this thread may have a long job of the next step.
            if message.freeze:
                state.accumulator.freeze(message.attempt)
                state.contribution = state.accumulator.contribution()
            else:
                state.accumulator.settle()
                ledger.collect(message.attempt, freeze=False)
                state.contribution = None
            version_id = self.versions.newest.version_id
            return ledger.seal(self.me, version_id, self._digest_at(version_id), self.saved)

        seal = await self._run(job, progress, "seal")
        state.leader = message.leader
        if state.round is not None and state.round.attempt.order != message.attempt.order:
            state.round.fail(RoundFailed("a newer attempt began"))
            state.round = None
        if state.average is not None:
            state.average, state.overtaken = None, state.average
        state.own_sums = None
        state.changed.set()
        return m.Collected(seal=seal, upload=self.carries.upload.rate, download=self.carries.download.rate, load=self.load())

    async def _on_revoke(self, message: m.Revoke, frame: Frame, progress: Progress) -> m.Revoked:
        self.require_stage(message.stage)
        ledger = self.step_state(message.step).accumulator.ledger
        return m.Revoked(held=await self._run(lambda: ledger.revoke(message.index), progress))

    async def _run(self, job: Callable[[], T], progress: Progress, kind: str | None = None) -> T:
        """`job` in the compute thread, whose jobs before it may be long: the caller follows them.

        Raises:
            Refuse: one of them hangs, so the caller need not find that out.
        """
        self.at_work.follow(progress, waits_s=0.0)
        running = asyncio.ensure_future(self.executor.run(job, Priority.CONTROL, kind))
        try:
            while not running.done():
                if why := self.at_work.overdue():
                    raise Refuse("busy", why)
                await asyncio.wait({running}, timeout=self.config.timing.heartbeat_s)
        finally:
            running.cancel()
        return running.result().value

    def require_stage(self, stage: int) -> None:
        if stage != self.stage:
            raise Refuse("wrong_stage", f"this peer serves stage {self.stage}")

    # ------------------------------------------------------------------------------------------------ coordinator

    async def _on_elect(self, message: m.Elect, frame: Frame, progress: Progress) -> m.Elected:
        self.accept_ballot(message.ballot)
        self.coordinator = message.coordinator
        prepared = [
            (step, self._prepared_result(state.average))
            for step, state in sorted(self.steps.items())
            if state.average is not None and state.accumulator.ledger.state == "prepared"
        ]
        highest = max((s.accumulator.ledger.attempt for s in self.steps.values()), key=lambda t: t.order, default=m.Attempt())
        return m.Elected(stage=self.stage, member=self.me, record=self.record, attempt=highest, prepared=tuple(prepared))

    def _prepared_result(self, average: StageSum) -> m.StageResult:
        return stage_result(average.attempt, average.seals, average.digest, average.sum_squares, (self.me,), tied=average.tied)
