"""Counts what a peer does at its stage, for those who decide where peers are needed. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.stage_context import StageContext
from swarm.stage.versions import state_bytes
from swarm.wire import messages as m


class LoadMeter:
    """Counts for one peer at one stage.

    Args:
        context: of the peer at its stage.
        committed: has the state whose size is told.
        free_bytes: memory that is left for another stage's state; None where nobody can tell.
        flops_per_s: of the device; 0 if not known.
    """

    def __init__(
        self,
        context: StageContext,
        committed: CommittedState,
        free_bytes: Callable[[], int] | None = None,
        flops_per_s: float = 0.0,
    ) -> None:
        self._context = context
        self._committed = committed
        self._free_bytes = free_bytes
        self._flops_per_s = flops_per_s
        self._began = asyncio.get_running_loop().time()
        self._num_tickets = 0
        #: Seconds that the device has worked on micro-batches that were answered.
        self.busy_s = 0.0
        self._queue_s = 0.0
        self._num_bytes = 0

    def ticket(self, *, busy_s: float, queue_s: float, num_bytes: int) -> None:
        """Count a micro-batch: seconds of compute and of waiting for it, bytes in the link's busier direction."""
        self._num_tickets += 1
        self.busy_s += busy_s
        self._queue_s += queue_s
        self._num_bytes += num_bytes

    def report(self) -> m.Load:
        """Return what this peer has done at its stage so far."""
        carries = self._context.carries
        measured = [meter.rate for meter in (carries.upload, carries.download) if meter.rate]
        return m.Load(
            member=self._context.me,
            elapsed_s=asyncio.get_running_loop().time() - self._began,
            num_tickets=self._num_tickets,
            busy_s=self.busy_s,
            queue_s=self._queue_s,
            num_bytes=self._num_bytes,
            bandwidth=min(measured, default=0.0),
            state_bytes=state_bytes(self._committed.versions.state()),
            room_bytes=-1 if self._free_bytes is None else max(0, self._free_bytes()),
            flops_per_s=self._flops_per_s,
        )
