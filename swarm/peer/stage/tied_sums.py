"""A stage peer's part in what several stages sum together: parameters of which each holds a copy.

While the stages average, each member fetches the other stages' sums of its tied parameters from any member there that
holds them, and hands out its own. What is done with them is in `averaging/tied.py`. Nobody waits in a circle: a stage's
own sums need nothing of another stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import torch

from swarm.averaging.all_reduce import Round
from swarm.averaging.reduction import RoundFailed
from swarm.averaging.tied import Tied, TiedRange, TiedRanges
from swarm.base.errors import LinkError, RemoteError
from swarm.net.exchange import Moving
from swarm.net.transport import Progress
from swarm.peer.link import Refuse
from swarm.peer.presence import Candidates
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.ranges import fetch_ranges
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.step_state import StepState
from swarm.peer.stage.sum_copies import CHUNK_ELEMENTS, part_of
from swarm.stage.accumulator import is_finite
from swarm.stage.executor import Priority
from swarm.stage.module import Tie
from swarm.wire import messages as m
from swarm.wire.compression import encode_tensor
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


class TiedSums:
    """Serves `FetchTied`.

    Raises:
        ConfigError: if a tie does not fit the stage.
    """

    def __init__(self, context: StageContext, committed: CommittedState, member: StageMember, ties: Sequence[Tie]) -> None:
        self._context = context
        self._committed = committed
        self._member = member
        self._ranges = TiedRanges(ties, context.stage, context.compute.layout)
        context.link.register(m.FetchTied, self._on_fetch)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    async def add(self, message: m.Reduce, state: StepState, flat: torch.Tensor) -> Tied:
        """Add the other stages' sums to `flat`, in place; this stage's own are kept for those who ask.

        Raises:
            RoundFailed: if another stage's sums could not be had.
        """
        state.keep_own_sums(message.attempt, self._ranges.own(flat))
        wanted = [(r, stage) for r in self._ranges.ranges for stage in r.stages if stage != self._context.stage]
        others = {(r.name, stage): await self._fetch(message, state, r, stage) for r, stage in wanted}
        return (await self._context.background.run(lambda: self._ranges.tie(flat, others), Priority.CONTROL)).value

    async def _fetch(self, message: m.Reduce, state: StepState, wanted: TiedRange, stage: int) -> torch.Tensor:
        """Fetch the sum of one tied parameter at another stage, from whichever of its members gives it."""
        if stage >= len(message.attempts) or self._committed.record is None:
            raise RoundFailed(f"the coordinator did not say what stage {stage} averages: tied parameters need it")
        holders = [x for x in self._committed.record.members[stage] if x.ready]
        mine = self._context.me.key
        holders.sort(key=lambda x: (x.key < mine, x.key))  # members of one stage ask different ones first
        reasons = []
        candidates = Candidates(self._context.link.presence, holders)
        while (holder := await candidates.next()) is not None:
            try:
                return await self._fetch_from(holder, message, state, wanted, stage)
            except (LinkError, RemoteError) as error:
                reasons.append(f"{holder.peer[:8]}: {error}")
        raise RoundFailed(f"no sum of {wanted.name} from stage {stage}: {'; '.join(reasons)}"[:2000])

    async def _fetch_from(
        self, holder: m.Member, message: m.Reduce, state: StepState, wanted: TiedRange, stage: int
    ) -> torch.Tensor:
        total = wanted.end - wanted.start

        async def fetch(offset: int) -> Frame:
            request = m.FetchTied(
                run=message.run,
                stage=stage,
                step=message.step,
                attempt=message.attempts[stage],
                name=wanted.name,
                offset=offset,
                length=CHUNK_ELEMENTS,
            )
            stall_s = self._context.config.timing.stall_s
            reply, frame = await self._context.link.ask(holder, request, m.SumCopy, stall_s=stall_s, progress=state.from_others)
            if reply.total != total:
                raise RemoteError(f"its sum of {wanted.name} has another length")
            return frame

        def require_finite(part: torch.Tensor) -> None:
            if not is_finite(part):
                logger.error("step %d: the sum of %s from %s is not finite", message.step, wanted.name, holder.peer[:8])
                raise RemoteError(f"its sum of {wanted.name} is not finite")

        flat = torch.empty(total, dtype=self._context.compute.master_dtype)
        await fetch_ranges(flat, CHUNK_ELEMENTS, fetch, what=f"its sum of {wanted.name}", check=require_finite)
        return flat

    async def _on_fetch(self, message: m.FetchTied, frame: Frame, progress: Progress) -> Frame:
        self._context.require_stage(message.stage)
        state = self._member.step_state(message.step)
        sums = await self._own_sums(message, state, progress)
        total = sums.get(message.name)
        if total is None:
            raise Refuse("unknown", f"this stage holds no copy of {message.name}")
        spec, buffer = encode_tensor("sum", part_of(total, message.offset, message.length), "raw", "state")
        return Frame(m.SumCopy(total=total.numel(), tensors=(spec,)), (buffer,))

    async def _own_sums(self, message: m.FetchTied, state: StepState, progress: Progress) -> dict[str, torch.Tensor]:
        """Return them once this stage's own all-reduce of the attempt has ended here; the caller waits while that advances."""
        ledger = state.accumulator.ledger
        followed: Round | None = None
        while (sums := state.own_sums(message.attempt)) is None:
            round_ = state.round if state.round is not None and state.round.attempt.order == message.attempt.order else None
            told = ledger.state == "averaging" or (ledger.state == "frozen" and round_ is None)
            if ledger.attempt.order != message.attempt.order or not told:
                raise Refuse("wrong_state", f"ledger is {ledger.state} at {ledger.attempt.order}")
            if round_ is not None and round_ is not followed:
                state.follow(progress, round_)
                progress.follow(lambda: self._context.background.finished)
                followed = round_
            state.changed.clear()
            timing = self._context.config.timing
            try:
                async with asyncio.timeout(timing.request_s) if round_ is None else self._moving(state, round_):
                    await state.changed.wait()
            except TimeoutError:
                if round_ is None and ledger.state == "averaging":
                    continue  # it was told, and copies what it sealed
                waited_for = "told to start the round" if round_ is None else "done with the round"
                raise Refuse("wrong_state", f"this member was not {waited_for}") from None
        return sums

    def _moving(self, state: StepState, round_: Round) -> Moving:
        background, still_s = self._context.background, self._context.config.timing.average_s
        return Moving(lambda: (state.movement(round_), background.finished), still_s)
