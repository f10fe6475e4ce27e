"""Evaluation by a trainer: the mean loss over the held-out samples at one version. Must not know tickets' leases."""

from __future__ import annotations

import asyncio
import logging

from swarm.base.errors import LinkError, RemoteError, RemoteRefused
from swarm.base.ids import Ticket
from swarm.peer.link import Link, together
from swarm.peer.trainer.reports import BatchLike, Evaluation, FeedLike, payload_of
from swarm.peer.trainer.route_trips import RouteTrips
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: A batch is sent so often before the evaluation is given up.
MAX_ATTEMPTS = 20


class Evaluator:
    """Evaluates for one trainer."""

    def __init__(self, link: Link, route_trips: RouteTrips, feed: FeedLike) -> None:
        self._link = link
        self._route_trips = route_trips
        self._feed = feed

    async def evaluate(self, record: m.CommitRecord) -> Evaluation | None:
        """Evaluate at `record.version_id` and tell the members, which keep their best checkpoint. None if that failed."""
        limit = asyncio.Semaphore(2 * self._link.context.config.num_stages)

        async def one(number: int, batch: BatchLike) -> tuple[float, int]:
            tensors, buffers = payload_of(batch)
            async with limit:
                for attempt in range(MAX_ATTEMPTS):
                    try:
                        trained = await self._route_trips.evaluate(
                            Ticket(record.step + 1, number), record.version_id, tensors, buffers
                        )
                        return trained.loss_sum, trained.tokens
                    except (LinkError, RemoteError) as error:
                        if isinstance(error, RemoteRefused) and error.code == "failed_everywhere":
                            raise  # and it would again
                        logger.info("evaluation batch %d again: %s", number, error)
                        await asyncio.sleep(0.1 * (attempt + 1))
            raise RemoteError(f"evaluation batch {number} found no route")

        try:
            parts = await together(*(one(i, b) for i, b in enumerate(self._feed.eval_batches())))
        except RemoteError as error:
            logger.warning("no evaluation after step %d: %s", record.step + 1, error)
            return None
        loss_sum, tokens = sum(p[0] for p in parts), sum(p[1] for p in parts)
        if not tokens:
            return None
        evaluation = Evaluation(record.step + 1, record.version_id, loss_sum / tokens, tokens)
        await self._tell_members(record, evaluation)
        return evaluation

    async def _tell_members(self, record: m.CommitRecord, evaluation: Evaluation) -> None:
        """Tell the result to all members; whoever does not hear it keeps what it has."""
        told = m.Evaluated(
            run=self._link.context.run, step=evaluation.step, version_id=evaluation.version_id, loss=evaluation.loss
        )
        await asyncio.gather(*(self._link.tell(x, told) for members in record.members for x in members if x.ready))
