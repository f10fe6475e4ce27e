"""The averages that records decided on: held here, or copied from a member that holds them; the last ones are kept for others.

Owns the copies and serves `FetchSum`. Must not know what an average is for: `committed_state` takes the optimizer's steps.
"""

from __future__ import annotations

import logging
from collections import deque

import torch

from swarm.averaging.all_reduce import StageSum
from swarm.base.errors import RemoteError, SwarmError
from swarm.net.transport import Progress
from swarm.peer.link import Refuse
from swarm.peer.presence import Candidates
from swarm.peer.stage.ranges import fetch_ranges
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.step_state import OpenSteps
from swarm.stage.digest import digest_of
from swarm.stage.executor import Priority
from swarm.stage.flat import empty_flat
from swarm.stage.memory_plan import KEPT_SUMS
from swarm.wire import messages as m
from swarm.wire.compression import encode_tensor
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)

#: Elements of an average, or of a sum that goes into it, that one request moves.
CHUNK_ELEMENTS = 2**22


def part_of(flat: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Copy elements `offset : offset + length`, `CHUNK_ELEMENTS` at most.

    A view would hold all of `flat` for as long as a slow link takes to carry it.
    """
    return flat[offset : offset + min(length, CHUNK_ELEMENTS)].clone()


class SumCopies:
    """Keeps the averages of the last steps at one stage peer, and copies those that it lacks."""

    def __init__(self, context: StageContext, steps: OpenSteps) -> None:
        self._context = context
        self._steps = steps
        #: By step.
        self._last: deque[tuple[int, StageSum]] = deque(maxlen=KEPT_SUMS)
        #: The average of the newest record was made without this peer, and is on its way: that takes as long as it is large.
        self.is_copying = False
        context.link.register(m.FetchSum, self._on_fetch)

    def keep(self, step: int, average: StageSum) -> None:
        """Keep the average of `step`, which has committed, for those that lack it."""
        self._last.append((step, average))

    def forget(self) -> None:
        """Drop what is kept: its steps do not count any more."""
        self._last.clear()

    async def of(self, record: m.CommitRecord) -> StageSum | None:
        """Return the average that `record` decided on: held, or copied from one of its holders; None if nobody gives it."""
        result = record.results[self._context.stage]
        state = self._steps.get(record.step)
        held = state.held_sum(result.sum_digest) if state is not None else None
        if state is not None and held is not None:
            state.accumulator.ledger.transition("commit")
            return held
        self.is_copying = True
        try:
            holders = Candidates(self._context.link.presence, [x for x in result.holders if x.key != self._context.me.key])
            while (holder := await holders.next()) is not None:
                try:
                    flat = await self._copy(holder, record.step, result.sum_digest)
                except SwarmError as error:
                    logger.info("average of step %d not copied from %s: %s", record.step, holder.peer[:8], error)
                    continue
                return StageSum(result.attempt, (), flat, result.sum_digest, result.sum_squares, result.tied)
        finally:
            self.is_copying = False
        logger.warning("no holder gave the average of step %d", record.step)
        return None

    async def _copy(self, holder: m.Member, step: int, digest: str) -> torch.Tensor:
        """Download the flat average, in the masters' dtype.

        Raises:
            LinkError, RemoteError: `holder` did not give it, or gave another.
        """
        context = self._context
        total = context.compute.layout.num_elements

        async def fetch(offset: int) -> Frame:
            request = m.FetchSum(
                run=context.run, stage=context.stage, step=step, digest=digest, offset=offset, length=CHUNK_ELEMENTS
            )
            return (await context.link.ask(holder, request, m.SumCopy))[1]

        flat = empty_flat(total, dtype=context.compute.master_dtype)
        await fetch_ranges(flat, CHUNK_ELEMENTS, fetch, what="the average")
        if (await context.background.run(lambda: digest_of([flat]), Priority.CONTROL)).value != digest:
            raise RemoteError(f"the average from {holder.peer[:8]} has another digest")
        return flat

    async def _on_fetch(self, message: m.FetchSum, frame: Frame, progress: Progress) -> Frame:
        self._context.require_stage(message.stage)
        state = self._steps.get(message.step)
        average = state.held_sum(message.digest) if state is not None else None
        for step, kept in self._last:
            if step == message.step and kept.digest == message.digest:
                average = kept
        if average is None:
            raise Refuse("unknown", f"no such average of step {message.step} is held")
        spec, buffer = encode_tensor("average", part_of(average.flat, message.offset, message.length), "raw", "state")
        self._context.bytes_moved.sent_average(spec.num_bytes)
        return Frame(m.SumCopy(total=average.flat.numel(), tensors=(spec,)), (buffer,))
