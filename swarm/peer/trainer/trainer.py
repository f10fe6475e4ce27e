"""A trainer: leases tickets, sends each micro-batch on its way, reports it done, and tells what each record says.

One process keeps all stages busy: micro-batches are in flight at once, as many as `policy/in_flight.py` allows. Needs no
torch. Owns the leases; what becomes of one ticket is in `retries.py`, the way of one micro-batch in `route_trips.py`, and
evaluation in `evaluation.py`, all beside this file. Decides nothing about steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.lifecycle.commit_record import MAX_FAULTY_STEPS, is_faulty
from swarm.peer.context import PeerContext
from swarm.peer.coordinator.candidacy import WAITING_STATE
from swarm.peer.coordinator.election import Election
from swarm.peer.coordinator.rebalancing import Planner
from swarm.peer.link import Link, Refuse, RefusedBy, Tasks
from swarm.peer.run_info import RunInfoServer
from swarm.peer.trainer.evaluation import Evaluator
from swarm.peer.trainer.peer_notes import PeerNotes
from swarm.peer.trainer.reports import Evaluation, FeedLike, StepReport, StepsFailed, TicketReport
from swarm.peer.trainer.retries import TicketRetries
from swarm.peer.trainer.route_trips import RouteTrips
from swarm.peer.trainer.whereabouts import AWAITED, MOST_S, TOLD_AFTER_S, whereabouts
from swarm.peer.trainer.wiring import Wiring
from swarm.peer.waiting import USUAL_WAITS, Lasting
from swarm.policy.in_flight import InFlightControl
from swarm.policy.rebalance import plan_moves
from swarm.policy.routing import MakeRouter, StageRouter
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


#: A trainer that leaves waits so long, in seconds, for what it has in flight.
DRAIN_S = 8.0


def _averaged(average_s: float, new_s: float) -> float:
    """Return the moving average, to which `new_s` is added; 0 is none yet."""
    return new_s if average_s == 0 else 0.9 * average_s + 0.1 * new_s


class Trainer:
    """Keeps the stages busy for `num_steps` steps (None: until the run is finished), then leaves."""

    def __init__(
        self,
        context: PeerContext,
        *,
        feed: FeedLike,
        num_steps: int | None = None,
        in_flight: int | None = None,
        router: MakeRouter = StageRouter,
        plan: Planner = plan_moves,
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
        on_waiting: Callable[[str], None] = lambda reason: None,
        on_ticket: Callable[[TicketReport], None] | None = None,
    ) -> None:
        self.context = context
        self.config = context.config
        self._feed = feed
        self._num_steps = num_steps
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self._on_waiting = on_waiting
        self._tasks = Tasks()
        self.link = Link(context)
        self.election = Election(self.link, self._tasks, rank=1, plan=plan)
        RunInfoServer(self.link, record=lambda: self.record, status=self._status, coordinator=lambda: self.election.known)
        wiring = Wiring(self.config, context.rng, self.link.presence, router)
        self._route_trips = RouteTrips(self.link, wiring)
        self._peer_notes = PeerNotes(self.link, self._tasks, wiring)
        self.retries = TicketRetries(context, feed, self._route_trips, lambda: self.record, on_ticket)
        self._evaluator = Evaluator(self.link, self._route_trips, feed)
        highest = self.config.tickets_per_step * (1 + self.config.delay_steps)
        start = min(highest, in_flight or 3 * self.config.num_stages)
        self._control = InFlightControl(start, highest=highest)
        self._fixed = in_flight
        self.record: m.CommitRecord | None = None
        self._first_step: int | None = None
        #: Of the newest steps, how many in a row trained nothing.
        self._num_faulty = 0
        self._last_commit_at = self._step_s = 0.0
        #: A ticket was given up since the last commit.
        self._gave_up = False
        self._running: dict[Ticket, asyncio.Task[None]] = {}
        #: Leased tickets that wait until one in flight is done: as many as finish while a question for work is answered.
        self._reserve: list[Ticket] = []
        #: Seconds that a question to the coordinator and a ticket take, averaged; 0 until known.
        self._ask_s = 0.0
        self._ticket_s = 0.0
        self._done: dict[Ticket, bool] = {}
        self._evaluated: tuple[int, float, int] | None = None
        self._wake = asyncio.Event()
        self._report = asyncio.Event()
        self._stopping = False
        self._ended = asyncio.Event()
        self.finished = False
        self.waiting_for = ""

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve, join the DHT, and begin to ask for tickets."""
        await self.link.serve()
        await self.context.dht.start(self.context.bootstrap)
        self._last_commit_at = asyncio.get_running_loop().time()
        self._tasks.start(self.link.presence.keep_looking(), "looks", vital=True)
        self._tasks.start(self.election.run(), "election", vital=True)
        self._tasks.start(self._poll_loop(), "lease", vital=True)
        self._tasks.start(self._report_loop(), "report", vital=True)
        self._tasks.start(self._tell_what_is_waited_for(), "waiting", vital=True)

    def stop(self) -> None:
        """Hand back what is leased and end `run`."""
        self._stopping = True
        self.retries.stop()
        self._ended.set()

    async def run(self) -> None:
        """Train until the run is finished, the steps are served, or `stop` was called.

        Raises:
            StepsFailed: the newest steps trained nothing, and the next ones will not.
            SwarmError: a part of the trainer failed.
        """
        await self._tasks.until(self._ended)
        if self._num_faulty >= MAX_FAULTY_STEPS:
            assert self.record is not None
            raise StepsFailed(self.record.step + 1, self._num_faulty, self.config.compression)
        if self.election.coordinator is not None and self.finished:
            await asyncio.sleep(self.config.timing.coordinator_s)  # others still ask this peer whether all is done

    @property
    def _served(self) -> bool:
        """The steps it was asked to serve have all committed."""
        if self._num_steps is None or self._first_step is None or self.record is None:
            return False
        return self.record.step + 1 >= self._first_step + self._num_steps

    async def close(self) -> None:
        """Ask for nothing more, let what is in flight end, hand over what it coordinates, and go; all within a bound."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_S
        if self._ended.is_set():
            self.stop()
            self._reserve.clear()
            while self._running and loop.time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await self.election.retire(until)
        if self.election.known is not None and not self.finished:
            try:
                async with asyncio.timeout(self.config.timing.connect_s):
                    await self._lease(leaving=True)
            except (SwarmError, TimeoutError):
                pass  # the leases expire by themselves
        await self._tasks.close()
        await self.context.dht.close()
        await self.context.transport.close()

    def _status(self) -> m.StatusReply:
        coordinator = self.election.coordinator
        detail: dict[str, str | int | float | bool] = {
            "in_flight": len(self._running),
            "in_flight_limit": self.limit,
            "retries": self.retries.num_retries,
            "tickets_per_s": round(self._route_trips.wiring.occupancy.tickets_per_s() or 0.0, 3),
            "left_out": "; ".join(f"{who}: {why}" for who, why in self._peer_notes.left_out.items())[:1000],
            "waiting_for": (self.election.waiting_for or self.waiting_for)[:200],
            "coordinator": coordinator is not None,
            "total_steps": self.context.config.total_steps,
        }
        return m.StatusReply(
            role="trainer",
            member=self.context.member(),
            step=self.record.step + 1 if self.record else -1,
            version_id=self.record.version_id if self.record else "",
            state="finished" if self.finished else WAITING_STATE if self.election.candidacy is not None else "training",
            detail=detail,
            stages=self.record.members if self.record else (),
            ballot=self.election.ballot,
        )

    # ------------------------------------------------------------------------------------------------ leases

    @property
    def limit(self) -> int:
        """Micro-batches that may be in flight at once: what keeps the stages busy, and those on long trips beside it."""
        return self._fixed or self._control.limit + self._route_trips.wiring.num_long

    async def _lease(self, *, want: int = 0, leaving: bool = False) -> m.Leased:
        coordinator = self.election.known
        if coordinator is None:
            raise LinkError("no coordinator is known")
        done = dict(self._done)
        evaluated = self._evaluated
        request = m.Lease(
            run=self.context.run,
            trainer=self.context.member(),
            data_digest=self._feed.data_digest,
            known_step=self.record.step if self.record is not None else -2,
            known_era=self.record.era if self.record is not None else 0,
            known_version_id=self.record.version_id if self.record is not None else "",
            known_ballot=self.record.ballot if self.record is not None else ZERO_BALLOT,
            done=tuple(done.items()),
            holding=(*self._running, *self._reserve),
            want=want,
            retries=self.retries.num_retries,
            evaluated=evaluated,
            leaving=leaving,
        )
        timing = self.config.timing
        leased, _ = await self.link.ask(coordinator, request, m.Leased, stall_s=timing.coordinator_s + timing.heartbeat_s)
        for ticket in done:
            self._done.pop(ticket, None)
        if evaluated is not None and evaluated == self._evaluated:
            self._evaluated = None
        self._take(leased)
        return leased

    async def _poll_loop(self) -> None:
        """Ask for as much work as may be in flight; the coordinator holds the question open until there is some."""
        while True:
            want = self.limit + self._ahead - len(self._running) - len(self._reserve)
            if want <= 0 or self.finished or self._stopping:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                leased = await self._lease(want=want)
            except RefusedBy as refused:
                if refused.code in ("bad_request", "wrong_run"):
                    raise
                await self._pause(refused)
                continue
            except (LinkError, RemoteError) as error:
                await self._pause(error)
                continue
            self.waiting_for = leased.waiting_for
            self.retries.lease(leased.again, dict(leased.avoid))
            record = self.record
            if record is not None and not self._stopping:
                self._reserve += [t for t in leased.tickets if t not in self._running and t not in self._reserve]
            self._start_tickets()
            if leased.evaluate and not self._stopping and record is not None:
                evaluation = await self._evaluator.evaluate(record)
                if evaluation is not None:
                    self._on_evaluation(evaluation)
                loss_sum, tokens = (evaluation.loss * evaluation.tokens, evaluation.tokens) if evaluation else (0.0, 0)
                self._evaluated = (record.step, loss_sum, tokens)
                self._report.set()

    @property
    def _ahead(self) -> int:
        """Tickets to lease beyond those in flight, so that a distant coordinator leaves no gap between two."""
        return min(self.limit, round(self.limit * self._ask_s / self._ticket_s)) if self._ticket_s > 0 else 0

    def _start_tickets(self) -> None:
        while self._reserve and len(self._running) < self.limit and not self._ended.is_set():
            ticket = self._reserve.pop(0)
            self._running[ticket] = self._tasks.start(self._serve(ticket), f"ticket {tuple(ticket)}", vital=True)

    async def _pause(self, error: Exception) -> None:
        self.waiting_for = f"a coordinator ({error})"
        self.election.changed.clear()
        try:
            async with asyncio.timeout(0.2):
                await self.election.changed.wait()
        except TimeoutError:
            return

    async def _report_loop(self) -> None:
        """Report finished tickets at once, also while a question for work is open."""
        while True:
            await self._report.wait()
            self._report.clear()
            if not self._done and self._evaluated is None:
                continue
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await self._lease()
            except (LinkError, RemoteError):
                await asyncio.sleep(0.2)
                self._report.set()
            else:
                self._ask_s = _averaged(self._ask_s, loop.time() - began)

    async def _tell_what_is_waited_for(self) -> None:
        """Tell, while nothing commits, what the coordinator waits for, each time that this becomes something else.

        What every step waits for is told once that takes long, with who is at it.
        """
        loop = asyncio.get_running_loop()
        waiting, since, long_s = Lasting(), self._last_commit_at, TOLD_AFTER_S
        while True:
            await asyncio.sleep(1.0)
            if self._last_commit_at != since:
                waiting, since = Lasting(), self._last_commit_at
                long_s = min(MOST_S, max(TOLD_AFTER_S, 2 * self._step_s))
            waited_s, record = loop.time() - since, self.record
            if waited_s < 1.0 or self.finished:
                continue
            self.waiting_for = await self._hear()
            if waited_s >= long_s and record is not None and self.waiting_for.startswith(AWAITED):
                long_s *= 2
                self._on_waiting(await whereabouts(self.link, record, self.waiting_for.split()[0]))
            if waiting.note_news("" if self.waiting_for.startswith(USUAL_WAITS) else self.waiting_for):
                self._on_waiting(self.waiting_for)

    async def _hear(self) -> str:
        """Ask what the run waits for. Who has all tickets stuck asks for no others: this renews them, and brings new records."""
        coordinator = self.election.known
        if coordinator is None:
            return "a coordinator"
        try:
            return (await self._lease()).waiting_for
        except (LinkError, RemoteError):
            return f"the coordinator at {coordinator.host}:{coordinator.port}, which does not answer"

    def _begin_after(self, records: list[m.CommitRecord]) -> None:
        """Report what had committed before this trainer came as history, and the newest as what the run goes on from."""
        self.record = newest = records[-1]
        self._peer_notes.set_record(newest)
        self._first_step = newest.step + 1
        self._last_commit_at = asyncio.get_running_loop().time()
        for record in records:
            if record.step >= 0:
                self._on_step(StepReport(record, 0.0, 0, goes_on=record is newest))

    def _take(self, leased: m.Leased) -> None:
        loop = asyncio.get_running_loop()
        records = sorted(leased.records, key=lambda r: (r.era, r.step))
        if self.record is None and records:
            self._begin_after(records)
        for record in records:
            known = self.record
            if not record.newer_than(known):
                continue
            self.record = record
            self._peer_notes.set_record(record)
            if record.relists(known):
                continue
            set_back = known is not None and (record.era > known.era or record.step <= known.step)
            for ticket in [t for t in self._running if t.step <= record.step or set_back]:
                self._running[ticket].cancel()
            self._reserve = [t for t in self._reserve if t.step > record.step and not set_back]
            if set_back:
                lost = known is not None and known.step > record.step
                logger.log(logging.ERROR if lost else logging.INFO, "the run goes on from step %d again", record.step + 1)
                self._done.clear()
                self._num_faulty = 0
            elif record.step >= 0:
                now = loop.time()
                retries, round_trips = self.retries.taken_count(), self._route_trips.taken_round_trips()
                self._step_s = now - self._last_commit_at
                self._on_step(StepReport(record, self._step_s, retries, round_trips))
                self._last_commit_at, self._gave_up = now, False
                self._num_faulty = self._num_faulty + 1 if is_faulty(record) else 0
            else:
                self._last_commit_at = loop.time()
        if leased.finished and not self.finished and self.record is not None and self.record.step + 1 < self.config.total_steps:
            logger.info("an operator stopped the run after step %d: this trainer ends", self.record.step + 1)
        self.finished = self.finished or leased.finished
        if self.finished or self._served or self._num_faulty >= MAX_FAULTY_STEPS:
            self._ended.set()
        self._wake.set()

    # ------------------------------------------------------------------------------------------------ tickets

    async def _serve(self, ticket: Ticket) -> None:
        """Send one leased ticket, again on new routes, until it is back or its step has committed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            accumulated = await self.retries.train(ticket)
        except Refuse as refused:
            # While a stage has nobody they are leased and given up again and again.
            logger.log(logging.DEBUG if self._gave_up else logging.WARNING, "ticket %s given up: %s", tuple(ticket), refused)
            self._gave_up = True
        else:
            self._done[ticket] = accumulated
            self._ticket_s = _averaged(self._ticket_s, loop.time() - began)
            if self._fixed is None:
                self._control.completed(loop.time(), in_flight=len(self._running) - self._route_trips.wiring.num_long)
        finally:
            self._running.pop(ticket, None)
            self.retries.forget(ticket)
            self._start_tickets()
            self._report.set()
            self._wake.set()
