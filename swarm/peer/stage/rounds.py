"""A stage peer's part in the all-reduce of its stage: runs rounds, serves slices, hands averages to those that lack them.

The round itself is `averaging/all_reduce.py`; what is averaged and what becomes of it belongs to `stage_member`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swarm.averaging.all_reduce import Round
from swarm.averaging.compressors.interface import Contribution
from swarm.averaging.compressors.plain import Plain
from swarm.averaging.reduction import AUXILIARY_WINDOW, CodedChunk, RoundFailed
from swarm.base.errors import LinkError, RemoteError
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.step_state import StepState, Turns
from swarm.peer.stage.tied_sums import CHUNK_ELEMENTS, TiedSums, part_of
from swarm.stage.device import on_host
from swarm.stage.digest import digest_of
from swarm.stage.executor import Priority
from swarm.stage.flat import empty_flat
from swarm.stage.module import Tie
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor, encode_tensor
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
    """Serves `Reduce`, `Slice` and `FetchSum`."""

    def __init__(self, link: Link, member: StageMember, ties: Sequence[Tie] = ()) -> None:
        self._link = link
        self._member = member
        self._tied = TiedSums(link, member, ties)
        member.copy_sum = self.copy_sum
        link.register(m.Reduce, self._on_reduce)
        link.register(m.Slice, self._on_slice)
        link.register(m.FetchSum, self._on_fetch_average)

    async def _on_reduce(self, message: m.Reduce, frame: Frame, progress: Progress) -> m.Reduced:
        self._member.require_stage(message.stage)
        self._member.accept_ballot(message.attempt.ballot)
        if len(message.auxiliaries) > self._member.config.auxiliaries:
            raise Refuse("bad_request", f"the run allows a stage {self._member.config.auxiliaries} auxiliaries")
        state = self._member.step_state(message.step)
        ledger = state.accumulator.ledger
        if ledger.attempt.order != message.attempt.order or ledger.state not in ("frozen", "averaging"):
            raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.attempt.order}")
        try:
            round_ = await self._round(state, message)
            self._follow(progress, state, round_)
            progress.follow(lambda: state.from_others.count)
            async with asyncio.timeout(self._member.config.timing.average_s), self._member.carries.measured():
                average = await round_.run(
                    lambda phase, j, number, part: (
                        self._exchange(message, round_.members[j], phase, number, part, state.exchanged)
                        if j < len(message.seals)
                        else self._exchange_with_auxiliary(message, round_.members[j], phase, number, part, state)
                    ),
                    (lambda flat: self._tied.add(message, state, flat)) if self._tied else None,
                )
        except RoundFailed as failure:
            for fault in state.round.blamed.values() if state.round is not None else ():
                logger.error("step %d: %s", message.step, fault)
            self._leave_round(state, message.attempt)
            return m.Reduced(suspects=failure.suspects, reason=str(failure)[:2000])
        except TimeoutError:
            self._leave_round(state, message.attempt)
            return m.Reduced(reason=f"no average within {self._member.config.timing.average_s:g} s")
        if not ledger.move_in(message.attempt, "hold"):
            return m.Reduced(reason="a newer attempt began")
        # Invariant: the average is held before the leader hears of it.
        state.average = average
        return m.Reduced(sum_digest=average.digest, sum_squares=average.sum_squares, tied=average.tied)

    def _follow(self, progress: Progress, state: StepState, round_: Round) -> None:
        state.follow(progress, round_)
        progress.follow(lambda: self._member.background.finished)

    def _leave_round(self, state: StepState, attempt: m.Attempt) -> None:
        ledger = state.accumulator.ledger
        ledger.move_in(attempt, "fail")
        if state.round is not None and state.round.attempt.order == attempt.order:
            state.round.fail(RoundFailed("this member left the round"))
        state.changed.set()

    async def _round(self, state: StepState, message: m.Reduce) -> Round:
        """The round of this attempt; made once, from a copy of the sealed accumulator."""
        ledger = state.accumulator.ledger
        if not ledger.move_in(message.attempt, "reduce"):
            raise Refuse("wrong_state", "this round has been started already, or is over")
        if not isinstance(self._member.compressor, Plain):  # what it kept back of the last step is part of this one
            await self._member.caught_up(message.step, num_commits=message.step)
        contribution, state.contribution = state.contribution, None
        if contribution is not None and contribution.is_cuda:
            sealed = contribution
            contribution = await self._in_background(lambda: on_host(sealed))
        if ledger.attempt.order != message.attempt.order or ledger.state != "averaging":
            raise RoundFailed("a newer attempt began")
        me = next(i for i, seal in enumerate(message.seals) if seal.member.key == self._member.me.key)
        tokens = tuple(seal.tokens for seal in message.seals)
        compression = self._member.compressor.compress(Contribution(contribution, tokens, me, message.step))
        try:
            state.round = Round(
                message.attempt,
                message.seals,
                self._member.me.key,
                compression,
                dtype=self._member.compute.master_dtype,
                shares=message.shares,
                auxiliaries=message.auxiliaries,
                max_group=self._member.config.max_group,
                num_chunks=message.num_chunks,
                run_job=self._in_background,
            )
        except ValueError as error:
            raise RoundFailed(str(error)) from None
        state.turns.clear()
        state.changed.set()
        return state.round

    async def _in_background(self, job: Callable[[], Any]) -> Any:
        return (await self._member.background.run(job, Priority.CONTROL)).value

    async def _exchange(
        self, message: m.Reduce, target: m.Member, phase: int, number: int, part: CodedChunk | None, exchanged: Progress
    ) -> CodedChunk:
        specs, buffers = buffers_of([part] if part is not None else [])
        request = m.Slice(
            run=message.run,
            stage=self._member.stage,
            step=message.step,
            attempt=message.attempt,
            member=self._member.me,
            phase=phase,
            number=number,
            tensors=specs,
        )
        timing = self._member.config.timing
        self._member.average_bytes_sent += sum(spec.num_bytes for spec in specs)
        _, frame = await self._link.ask(
            target, request, m.ReducedSlice, buffers=buffers, stall_s=timing.stall_s, progress=exchanged
        )
        return frame.only_tensor()

    async def _exchange_with_auxiliary(
        self, message: m.Reduce, target: m.Member, phase: int, number: int, part: CodedChunk | None, state: StepState
    ) -> CodedChunk:
        """Half of the window's parts leave at once: the first sums come back while the others leave.

        Nothing else moves on this member's line where an auxiliary reduces everything: if the whole window left at once, it
        would arrive at once, and the line would carry in one direction at a time.
        """
        turns = state.turns.setdefault(target.key, Turns(AUXILIARY_WINDOW // 2))
        await turns.take()
        sending = _Sending(turns, 0 if part is None else part[0].num_bytes, state.from_others)
        try:
            return await self._exchange(message, target, phase, number, part, sending)
        except LinkError as error:
            turns.failure = error
            raise
        finally:
            sending.sent()

    async def _on_slice(self, message: m.Slice, frame: Frame, progress: Progress) -> Frame:
        self._member.require_stage(message.stage)
        state = self._member.step_state(message.step)
        ledger = state.accumulator.ledger
        while state.round is None or state.round.attempt.order != message.attempt.order:
            # The sender was told to start a moment before this member; a frozen ledger of the attempt vouches for it.
            if ledger.attempt.order != message.attempt.order or ledger.state not in ("frozen", "averaging"):
                raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.attempt.order}")
            state.changed.clear()
            try:
                async with asyncio.timeout(self._member.config.timing.request_s):
                    await state.changed.wait()
            except TimeoutError:
                raise Refuse("wrong_state", "this member was not told to start the round") from None
        round_ = state.round
        if round_.index_of(message.member) is None:
            raise Refuse("not_member", "the sender is not sealed in this attempt")
        part = (message.tensors[0], frame.buffers[0]) if message.tensors else None
        self._follow(progress, state, round_)
        try:
            spec, buffer = await round_.reduce(message.member, message.phase, message.number, part)
        except RoundFailed as failure:
            raise Refuse("failed", str(failure)) from None
        except ValueError as error:
            raise Refuse("bad_request", str(error)) from None
        self._member.average_bytes_sent += spec.num_bytes
        return Frame(m.ReducedSlice(tensors=(spec,)), (buffer,))

    async def _on_fetch_average(self, message: m.FetchSum, frame: Frame, progress: Progress) -> Frame:
        self._member.require_stage(message.stage)
        state = self._member.steps.get(message.step)
        average = state.held_sum(message.digest) if state is not None else None
        for step, kept in self._member.last_sums:
            if step == message.step and kept.digest == message.digest:
                average = kept
        if average is not None:
            spec, buffer = encode_tensor("average", part_of(average.flat, message.offset, message.length), "raw", "state")
            self._member.average_bytes_sent += spec.num_bytes
            return Frame(m.SumCopy(total=average.flat.numel(), tensors=(spec,)), (buffer,))
        raise Refuse("unknown", f"no such average of step {message.step} is held")

    async def copy_sum(self, holder: m.Member, step: int, digest: str) -> torch.Tensor:
        total = self._member.compute.layout.num_elements
        flat = empty_flat(total, dtype=self._member.compute.master_dtype)
        for offset in range(0, total, CHUNK_ELEMENTS):
            request = m.FetchSum(
                run=self._link.context.run,
                stage=self._member.stage,
                step=step,
                digest=digest,
                offset=offset,
                length=CHUNK_ELEMENTS,
            )
            _, frame = await self._link.ask(holder, request, m.SumCopy)
            target = flat[offset : offset + CHUNK_ELEMENTS]
            part = decode_tensor(*frame.only_tensor())
            if part.shape != target.shape:
                raise RemoteError("a part of the average came back with the wrong length")
            target.copy_(part)
        if (await self._member.background.run(lambda: digest_of([flat]), Priority.CONTROL)).value != digest:
            raise RemoteError(f"the average from {holder.peer[:8]} has another digest")
        return flat
