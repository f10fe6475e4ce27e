"""A stage peer's part in the all-reduce of its stage: runs rounds and serves slices.

The round itself is `averaging/all_reduce.py`; what is averaged belongs to `step_state`, and what becomes of the average to
`committed_state`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from swarm.averaging.all_reduce import Round
from swarm.averaging.compressors.interface import Contribution
from swarm.averaging.reduction import AUXILIARY_WINDOW, CodedChunk, RoundFailed
from swarm.base.errors import LinkError
from swarm.net.exchange import Moving
from swarm.net.transport import Progress
from swarm.peer.link import Refuse
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.step_state import StepState, Turns
from swarm.peer.stage.tied_sums import TiedSums
from swarm.stage.devices import on_host
from swarm.stage.executor import Priority
from swarm.stage.module import Tie
from swarm.wire import messages as m
from swarm.wire.framing import Frame, buffers_of

logger = logging.getLogger(__name__)


class _Sending(Progress):
    """One request to an auxiliary; lets the next one begin once its bytes have left."""

    def __init__(self, turns: Turns, num_bytes: int, counted: Progress) -> None:
        super().__init__(among=counted)
        self._turns: Turns | None = turns
        self._size = num_bytes
        self._counted = counted

    def advance(self, amount: int = 1) -> None:
        super().advance(amount)
        self._counted.advance(amount)

    def moved(self, num_bytes: int) -> None:
        super().moved(num_bytes)
        if self.num_bytes >= self._size:
            self.sent()

    def sent(self) -> None:
        if self._turns is not None:
            self._turns.give_back()
        self._turns = None


class Rounds:
    """Serves `Reduce` and `Slice`."""

    def __init__(self, context: StageContext, committed: CommittedState, member: StageMember, ties: Sequence[Tie] = ()) -> None:
        self._context = context
        self._committed = committed
        self._member = member
        self._tied = TiedSums(context, committed, member, ties)
        context.link.register(m.Reduce, self._on_reduce)
        context.link.register(m.Slice, self._on_slice)

    async def _on_reduce(self, message: m.Reduce, frame: Frame, progress: Progress) -> m.Reduced:
        self._context.require_stage(message.stage)
        self._member.accept_ballot(message.attempt.ballot)
        if len(message.auxiliaries) > self._context.config.auxiliaries:
            raise Refuse("bad_request", f"the run allows a stage {self._context.config.auxiliaries} auxiliaries")
        state = self._member.step_state(message.step)
        ledger = state.accumulator.ledger
        if ledger.attempt.order != message.attempt.order or ledger.state not in ("frozen", "averaging"):
            raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.attempt.order}")
        try:
            round_ = await self._round(state, message)
            self._follow(progress, state, round_)
            progress.follow(lambda: state.from_others.count)
            timing = self._context.config.timing
            async with Moving(lambda: self._movement(state, round_), timing.average_s), self._context.carries.measured():
                average = await round_.run(
                    lambda phase, j, number, chunk: (
                        self._exchange(message, round_.members[j], phase, number, chunk, state.exchanged)
                        if j < len(message.seals)
                        else self._exchange_with_auxiliary(message, round_.members[j], phase, number, chunk, state)
                    ),
                    (lambda flat: self._tied.add(message, state, flat)) if self._tied else None,
                )
        except RoundFailed as failure:
            for fault in state.round.blamed.values() if state.round is not None else ():
                logger.error("step %d: %s", message.step, fault)
            state.leave_round(message.attempt)
            return m.Reduced(suspects=failure.suspects, reason=str(failure)[:2000])
        except TimeoutError:
            state.leave_round(message.attempt)
            return m.Reduced(reason=f"nothing of the average moved for {self._context.config.timing.average_s:g} s")
        # Invariant: the average is held before the leader hears of it.
        if not state.hold(average):
            return m.Reduced(reason="a newer attempt began")
        return m.Reduced(sum_digest=average.digest, sum_squares=average.sum_squares, tied=average.tied)

    def _follow(self, progress: Progress, state: StepState, round_: Round) -> None:
        state.follow(progress, round_)
        progress.follow(lambda: self._context.background.finished)

    def _movement(self, state: StepState, round_: Round) -> tuple[int, ...]:
        """What advances while a round does, however large the model and slow the lines."""
        return state.movement(round_), state.from_others.count, self._context.background.finished

    async def _round(self, state: StepState, message: m.Reduce) -> Round:
        """Make the round of this attempt, once, from a copy of the sealed accumulator."""
        ledger = state.accumulator.ledger
        if not ledger.transition_in(message.attempt, "reduce"):
            raise Refuse("wrong_state", "this round has been started already, or is over")
        if self._context.compressor.keeps_back:  # what it kept back of the last step is part of this one
            await self._committed.caught_up(message.step, num_commits=message.step)
        contribution = state.take_contribution()
        if contribution is not None and contribution.is_cuda:
            sealed = contribution
            contribution = await self._in_background(lambda: on_host(sealed))
        if ledger.attempt.order != message.attempt.order or ledger.state != "averaging":
            raise RoundFailed("a newer attempt began")
        me = next(i for i, seal in enumerate(message.seals) if seal.member.key == self._context.me.key)
        tokens = tuple(seal.tokens for seal in message.seals)
        compression = self._context.compressor.compress(Contribution(contribution, tokens, me, message.step))
        try:
            round_ = Round(
                message.attempt,
                message.seals,
                self._context.me.key,
                compression,
                dtype=self._context.compute.master_dtype,
                slice_sizes=message.shares,
                auxiliaries=message.auxiliaries,
                uncounted=self._context.compute.layout.uncounted,
                max_group=self._context.config.max_group,
                num_chunks=message.num_chunks,
                run_job=self._in_background,
            )
        except ValueError as error:
            raise RoundFailed(str(error)) from None
        return state.begin_round(round_)

    async def _in_background(self, job: Callable[[], Any]) -> Any:
        return (await self._context.background.run(job, Priority.CONTROL)).value

    async def _exchange(
        self, message: m.Reduce, target: m.Member, phase: int, number: int, chunk: CodedChunk | None, exchanged: Progress
    ) -> CodedChunk:
        specs, buffers = buffers_of([chunk] if chunk is not None else [])
        request = m.Slice(
            run=message.run,
            stage=self._context.stage,
            step=message.step,
            attempt=message.attempt,
            member=self._context.me,
            phase=phase,
            number=number,
            tensors=specs,
        )
        timing = self._context.config.timing
        self._context.bytes_moved.sent_average(sum(spec.num_bytes for spec in specs))
        _, frame = await self._context.link.ask(
            target, request, m.ReducedSlice, buffers=buffers, stall_s=timing.stall_s, progress=exchanged
        )
        return frame.only_tensor()

    async def _exchange_with_auxiliary(
        self, message: m.Reduce, target: m.Member, phase: int, number: int, chunk: CodedChunk | None, state: StepState
    ) -> CodedChunk:
        """Send half of the window's chunks at once: the first sums come back while the others leave.

        Nothing else moves on this member's line where an auxiliary reduces everything: if the whole window left at once, it
        would arrive at once, and the line would carry in one direction at a time.
        """
        turns = state.turns.setdefault(target.key, Turns(AUXILIARY_WINDOW // 2))
        await turns.take()
        sending = _Sending(turns, 0 if chunk is None else chunk[0].num_bytes, state.from_others)
        try:
            return await self._exchange(message, target, phase, number, chunk, sending)
        except LinkError as error:
            turns.fail(error)
            raise
        finally:
            sending.sent()

    async def _on_slice(self, message: m.Slice, frame: Frame, progress: Progress) -> Frame:
        self._context.require_stage(message.stage)
        state = self._member.step_state(message.step)
        ledger = state.accumulator.ledger
        while state.round is None or state.round.attempt.order != message.attempt.order:
            # The sender was told to start a moment before this member; a frozen ledger of the attempt vouches for it.
            if ledger.attempt.order != message.attempt.order or ledger.state not in ("frozen", "averaging"):
                raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.attempt.order}")
            state.changed.clear()
            try:
                async with asyncio.timeout(self._context.config.timing.request_s):
                    await state.changed.wait()
            except TimeoutError:
                if ledger.state == "frozen":  # else it was told, and copies what it sealed, which takes as long as that is large
                    raise Refuse("wrong_state", "this member was not told to start the round") from None
        round_ = state.round
        if round_.index_of(message.member) is None:
            raise Refuse("not_member", "the sender is not sealed in this attempt")
        chunk = (message.tensors[0], frame.buffers[0]) if message.tensors else None
        self._follow(progress, state, round_)
        try:
            spec, buffer = await round_.reduce(message.member, message.phase, message.number, chunk)
        except RoundFailed as failure:
            raise Refuse("failed", str(failure)) from None
        except ValueError as error:
            raise Refuse("bad_request", str(error)) from None
        self._context.bytes_moved.sent_average(spec.num_bytes)
        return Frame(m.ReducedSlice(tensors=(spec,)), (buffer,))
