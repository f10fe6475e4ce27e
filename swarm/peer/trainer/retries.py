"""A ticket is sent on its way, and again on new routes while its step is open, until it is back or must be given up.

Owns what a failure teaches for the next time: whom to avoid, how long to wait, when nobody can. Must not know leases.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from swarm.base.errors import RemoteError, RemoteRefused, SwarmError
from swarm.base.ids import Ticket
from swarm.lifecycle.commit_record import is_replayable
from swarm.peer.context import PeerContext
from swarm.peer.link import Refuse
from swarm.peer.trainer.reports import FeedLike, TicketReport, payload_of
from swarm.peer.trainer.route_trips import RouteTrips
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: A ticket that every peer of a stage failed to compute this often will not succeed.
MAX_FAILURES = 8


class TicketFailed(SwarmError):
    """A ticket cannot be computed by anyone: model or data are at fault, and the run would never end."""


class TicketRetries:
    """Sends one trainer's tickets.

    Args:
        context: of the trainer.
        feed: has the samples.
        route_trips: carry a micro-batch to the stages and back.
        record: the newest that the trainer knows; there is one before the first ticket.
        on_ticket: wants to know of tickets that can be computed again.
    """

    def __init__(
        self,
        context: PeerContext,
        feed: FeedLike,
        route_trips: RouteTrips,
        record: Callable[[], m.CommitRecord | None],
        on_ticket: Callable[[TicketReport], None] | None,
    ) -> None:
        self._context = context
        self._config = context.config
        self._feed = feed
        self._route_trips = route_trips
        self._record = record
        self._on_ticket = on_ticket
        #: Peers that found a ticket's numbers not finite: others are asked for a second opinion.
        self._avoid: dict[Ticket, frozenset[str]] = {}
        #: Micro-batches that were sent again, by this trainer or on their way, since `taken_count`.
        self.num_retries = 0
        self._stopping = False

    def stop(self) -> None:
        """Try nothing again from here on: the trainer leaves."""
        self._stopping = True

    def lease(self, num_again: int, avoid: Mapping[Ticket, Iterable[str]]) -> None:
        """Note what a lease says: how many of its tickets were leased before, and whom to avoid with some."""
        self.num_retries += num_again
        self._avoid |= {ticket: frozenset(peers) for ticket, peers in avoid.items()}

    def forget(self, ticket: Ticket) -> None:
        """Forget whom to avoid with `ticket`, which is not this trainer's any more."""
        self._avoid.pop(ticket, None)

    def taken_count(self) -> int:
        """Return how many micro-batches were sent again since this was asked last."""
        taken, self.num_retries = self.num_retries, 0
        return taken

    async def train(self, ticket: Ticket) -> bool:
        """Send `ticket` on its way until it is back from all stages; True if each of them has accumulated it.

        Raises:
            Refuse: nobody could take it for long, or it is not wanted any more.
            TicketFailed: nobody ever will.
        """
        batch = self._feed.batch(ticket)
        tensors, buffers = payload_of(batch)
        loop = asyncio.get_running_loop()
        served_by: dict[int, str] = {}
        backoff = 0.1
        num_failed = 0
        give_up_at = math.inf  # counted from the first failure: how long a good one takes is the model's affair
        while True:
            try:
                avoid = self._avoid.get(ticket, frozenset()) | self._movers_before(ticket.step)
                version_id = self._version_for(ticket.step)
                is_recorded = self._on_ticket is not None and is_replayable(self._config, ticket.step)
                trained, again = await self._route_trips.train(
                    ticket, version_id, tensors, buffers, served_by, avoid, with_norms=is_recorded
                )
                self.num_retries += again
                if trained.overflow and ticket not in self._avoid:
                    # What others make of it tells whether the ticket or one of these peers is to blame.
                    self._avoid[ticket] = frozenset(hop.peer for hop in trained.hops)
                    through = ", ".join(hop.peer[:8] for hop in trained.hops)
                    logger.warning("ticket %s: not finite on its way through %s; asking others", tuple(ticket), through)
                    served_by.clear()
                    self.num_retries += 1
                    continue
                if self._on_ticket is not None and is_recorded:
                    self._on_ticket(TicketReport(self._context.run, ticket, version_id, trained))
                return all(hop.accumulated for hop in trained.hops)
            except RemoteRefused as refused:
                if refused.code in ("ahead", "stale"):
                    return True  # over already: the next lease tells
                reason = refused.reason
                num_failed += refused.code == "failed_everywhere"
            except RemoteError as error:
                reason = str(error)
            if num_failed == MAX_FAILURES:
                raise TicketFailed(f"ticket {tuple(ticket)} fails on every peer of {reason}; do the data fit the model?")
            self.num_retries += 1
            give_up_at = min(give_up_at, loop.time() + self._config.timing.stage_lost_s)
            if loop.time() > give_up_at or self._stopping:
                raise Refuse("no_candidate", reason)
            logger.debug("ticket %s again: %s", tuple(ticket), reason[:300])
            await asyncio.sleep(backoff * self._context.rng.uniform(0.5, 1.0))
            backoff = min(2.0, backoff * 2)

    def _movers_before(self, step: int) -> frozenset[str]:
        """Return the peers that will have gone to another stage before `step` is sealed."""
        record = self._record()
        moving = record.moves if record is not None and step > record.step + 1 else ()
        return frozenset(move.member.peer for move in moving)

    def _version_for(self, step: int) -> str:
        """Return the name of the version whose parameters the tickets of `step` use."""
        record = self._record()
        assert record is not None
        base = self._config.base_step(step)
        if record.step + 1 == base:
            return record.version_id
        if record.step == base:
            return record.previous_version_id
        raise Refuse("ahead", f"step {step} builds on {base} commits, the newest record has {record.step + 1}")
