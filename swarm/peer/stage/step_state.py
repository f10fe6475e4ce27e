"""What a stage peer knows of the steps that have not committed. Owns the accumulators; ballots and ledgers' rules are elsewhere.

`stage_member` answers for the ledgers, `rounds` and `tied_sums` average; each change of a step's state is a method here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from swarm.averaging.all_reduce import Round, StageSum
from swarm.averaging.local_updates import LocalAccumulator, OwnCopy
from swarm.averaging.reduction import RoundFailed
from swarm.base.errors import LinkError
from swarm.base.ids import MemberKey
from swarm.net.transport import Progress
from swarm.peer.stage.stage_context import StageContext
from swarm.stage.accumulator import Accumulator
from swarm.stage.optimizers.choice import inner_optimizer_of
from swarm.wire import messages as m

#: Makes the accumulator of a step, with the arguments of `Accumulator`.
MakeAccumulator = Callable[..., Accumulator]


class Turns:
    """Limits the requests to one auxiliary that send their bytes at once. Once one has failed, those that wait fail too."""

    def __init__(self, num: int) -> None:
        self._free = asyncio.Semaphore(num)
        self._failure: LinkError | None = None

    async def take(self) -> None:
        """Wait for a turn.

        Raises:
            LinkError: that of a request before.
        """
        await self._free.acquire()
        if self._failure is not None:
            self._free.release()
            raise self._failure

    def give_back(self) -> None:
        """Let the next request begin."""
        self._free.release()

    def fail(self, error: LinkError) -> None:
        """Have those that wait for a turn raise `error`, with which a request failed."""
        self._failure = error


class StepState:
    """What a member knows of one step that has not committed."""

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator
        #: Who collected last; None before anybody did.
        self.leader: m.Member | None = None
        self.round: Round | None = None
        self.average: StageSum | None = None
        #: Set when a round begins or ends; cleared by who waits for that.
        self.changed = asyncio.Event()
        #: Counts the bytes of slices that this member sends and gets back.
        self.exchanged = Progress()
        #: How answers advance of those that wait for no heartbeat of this stage: members of other stages, and auxiliaries.
        self.from_others = Progress()
        #: Of the requests to each auxiliary in the round.
        self.turns: dict[MemberKey, Turns] = {}
        #: What was sealed, on its device; taken by the round of the same attempt.
        self._contribution: torch.Tensor | None = None
        #: The last average that a newer attempt replaced: a record that was decided on it may yet arrive.
        self._overtaken: StageSum | None = None
        #: This stage's sums of parameters of which other stages hold copies, by name of the tie, and their attempt.
        self._own_sums: tuple[m.Attempt, dict[str, torch.Tensor]] | None = None

    def collect(self, attempt: m.Attempt, *, freeze: bool) -> None:
        """Move the ledger to `attempt`; a job of the compute thread.

        What is frozen is taken now: when the round begins, this thread may have a long job of the next step.
        """
        if freeze:
            self.accumulator.freeze(attempt)
            self._contribution = self.accumulator.contribution()
        else:
            self.accumulator.complete_sum()
            self.accumulator.ledger.collect(attempt, freeze=False)
            self._contribution = None

    def collected(self, attempt: m.Attempt, leader: m.Member) -> None:
        """Note that `leader` has this member's seal of `attempt`: what belongs to the attempt before is over."""
        self.leader = leader
        if self.round is not None and self.round.attempt.order != attempt.order:
            self.round.fail(RoundFailed("a newer attempt began"))
            self.round = None
        if self.average is not None:
            self.average, self._overtaken = None, self.average
        self._own_sums = None
        self.changed.set()

    def take_contribution(self) -> torch.Tensor | None:
        """Return what was sealed, as a flat vector on its device; None if that is nothing. It is not kept here any longer."""
        contribution, self._contribution = self._contribution, None
        return contribution

    def begin_round(self, round_: Round) -> Round:
        """Note that `round_` is that of the sealed attempt, and return it."""
        self.round = round_
        self.turns.clear()
        self.changed.set()
        return round_

    def leave_round(self, attempt: m.Attempt) -> None:
        """Leave the round of `attempt`, which failed here, or took too long."""
        self.accumulator.ledger.transition_in(attempt, "fail")
        if self.round is not None and self.round.attempt.order == attempt.order:
            self.round.fail(RoundFailed("this member left the round"))
        self.changed.set()

    def hold(self, average: StageSum) -> bool:
        """Keep the average of an attempt for its commit; False if a newer attempt began."""
        if not self.accumulator.ledger.transition_in(average.attempt, "hold"):
            return False
        self.average = average
        return True

    def follow(self, progress: Progress, round_: Round) -> None:
        """Have `progress` advance with slices, sums and bytes, not with heartbeats: members would keep each other waiting."""
        progress.follow(lambda: self.movement(round_))

    def movement(self, round_: Round) -> int:
        """Chunks received and bytes exchanged: what advances while `round_` does, however long it takes."""
        return round_.num_received + self.exchanged.num_bytes

    def held_sum(self, digest: str) -> StageSum | None:
        """Return the average with this digest, if this member holds it."""
        return next((x for x in (self.average, self._overtaken) if x is not None and x.digest == digest), None)

    def keep_own_sums(self, attempt: m.Attempt, sums: dict[str, torch.Tensor]) -> None:
        """Keep this stage's sums of tied parameters, by name of the tie, for members of other stages."""
        self._own_sums = attempt, sums
        self.changed.set()

    def own_sums(self, attempt: m.Attempt) -> dict[str, torch.Tensor] | None:
        """Return this stage's sums of tied parameters in `attempt`; None until they are made."""
        if self._own_sums is None or self._own_sums[0].order != attempt.order:
            return None
        return self._own_sums[1]


class OpenSteps(dict[int, StepState]):
    """The state of each step that has not committed, by number.

    Args:
        context: of the peer at its stage.
        make_accumulator: makes those of a synchronous run.
    """

    def __init__(self, context: StageContext, make_accumulator: MakeAccumulator = Accumulator) -> None:
        super().__init__()
        self._context = context
        self._make_accumulator = make_accumulator
        config, compute = context.config, context.compute
        #: Of a local run.
        self.own = OwnCopy(inner_optimizer_of(config, context.optimizer), compute.dtype, context.compressor)

    def opened(self, step: int) -> StepState:
        """Return the state of `step`, which is new if nobody asked before."""
        if step not in self:
            self[step] = StepState(self._accumulator(step))
        return self[step]

    def _accumulator(self, step: int) -> Accumulator:
        compute = self._context.compute
        if self._context.config.mode == "local":
            return LocalAccumulator(step, self.own, dtype=compute.master_dtype, device=compute.device)
        return self._make_accumulator(step, compute.layout, dtype=compute.master_dtype, device=compute.device)

    def close(self, step: int) -> None:
        """Forget `step`, which has committed, and those before it."""
        for old in [x for x in self if x <= step]:
            del self[old]
