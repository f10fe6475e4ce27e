"""Counts what a peer does at its stage, for those who decide where peers are needed. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm.averaging.compressors.plain import Plain
from swarm.net.transport import Progress
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.stage_context import StageContext
from swarm.policy.throughput import rate_of
from swarm.stage.versions import state_bytes
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)

#: Trainers whose notes are kept.
MAX_TRAINERS = 64


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
        #: What each trainer has seen of this peer's line, the newest last.
        self._seen: dict[str, m.SeenLine] = {}
        context.link.register(m.SeenLine, self._on_seen_line)

    async def _on_seen_line(self, message: m.SeenLine, frame: Frame, progress: Progress) -> m.Ack:
        self._context.require_stage(message.stage)
        before = self._seen.pop(message.trainer, None)
        self._seen[message.trainer] = message
        if len(self._seen) > MAX_TRAINERS:
            del self._seen[next(iter(self._seen))]
        who = message.trainer[:8]
        line = f"its line seems to carry {message.bytes_per_s:.3g} bytes/s" if message.bytes_per_s else "its line is not known"
        if message.reason:
            logger.warning("trainer %s gives this peer no tickets: %s; %s", who, message.reason, line)
        elif before is not None and before.reason:
            logger.info("trainer %s gives this peer tickets again; %s", who, line)
        return m.Ack()

    @property
    def bytes_per_s(self) -> float:
        """What this peer's line carries in the slower direction: as tickets showed it, else as averages did; 0: not known."""
        seen = [message.bytes_per_s for message in self._seen.values() if message.bytes_per_s]
        if seen:  # several trainers share the line: who sees most met fewest tickets of others
            return max(seen)
        carries = self._context.carries
        return min((meter.rate for meter in (carries.upload, carries.download) if meter.rate), default=0.0)

    def told(self) -> dict[str, str | float]:
        """Return what an operator is told: tickets per second that this peer can serve, why so many, and who gives it none."""
        line = {"line_bytes_per_s": round(self.bytes_per_s)}
        reasons = "; ".join(f"trainer {x.trainer[:8]}: {x.reason}" for x in self._seen.values() if x.reason)
        if not self._num_tickets:
            return {**line, "left_out": reasons[:1000]}
        line_s = self._num_bytes / self._num_tickets / self.bytes_per_s if self.bytes_per_s else 0.0
        rate = rate_of(self.busy_s / self._num_tickets, line_s)
        return {**line, "tickets_per_s": round(rate.tickets_per_s, 3), "bound": rate.bound, "left_out": reasons[:1000]}

    def ticket(self, *, busy_s: float, queue_s: float, num_bytes: int) -> None:
        """Count a micro-batch: seconds of compute and of waiting for it, bytes in the link's busier direction."""
        self._num_tickets += 1
        self.busy_s += busy_s
        self._queue_s += queue_s
        self._num_bytes += num_bytes

    def _average_bytes(self) -> int:
        compressor, compute = self._context.compressor, self._context.compute
        if not isinstance(compressor, Plain):
            return 0
        return compressor.code.spec(compute.layout.num_elements, compute.master_dtype).num_bytes

    def report(self) -> m.Load:
        """Return what this peer has done at its stage so far."""
        carries = self._context.carries
        return m.Load(
            member=self._context.me,
            elapsed_s=asyncio.get_running_loop().time() - self._began,
            num_tickets=self._num_tickets,
            busy_s=self.busy_s,
            queue_s=self._queue_s,
            num_bytes=self._num_bytes,
            bandwidth=self.bytes_per_s,
            upload=carries.upload.newest or 0.0,
            download=carries.download.newest or 0.0,
            average_bytes=self._average_bytes(),
            state_bytes=state_bytes(self._committed.versions.state()),
            room_bytes=-1 if self._free_bytes is None else max(0, self._free_bytes()),
            flops_per_s=self._flops_per_s,
        )
