"""Leases tickets to trainers and has one of them evaluate when that is due. Soft state: any of it may be lost.

No safety rests on it: a ticket leased twice is accumulated once, because claims and seals say so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from swarm.base.ids import MemberKey, Ticket
from swarm.lifecycle.tickets import TicketPool
from swarm.peer.coordinator.run_leadership import RunLeadership
from swarm.peer.link import Refuse
from swarm.wire import messages as m

#: Trainers served at once.
MAX_TRAINERS = 1024


class Leasing:
    """The open steps' tickets, and the trainers that ask for them."""

    def __init__(self, leadership: RunLeadership) -> None:
        self._leadership = leadership
        self.pools: dict[int, TicketPool] = {}
        #: Trainers seen, with the time of their last word.
        self.trainers: dict[MemberKey, float] = {}
        #: Step after which the held-out samples must be evaluated before anything else is leased.
        self.evaluation_due: int | None = None
        #: Some ticket was not accumulated by every stage: a leader may be gone.
        self.is_uncertain = False
        self.finished = False
        #: An operator has the run wait: what is leased ends, nothing else is leased.
        self.paused = False
        #: A new coordinator collects the ledgers of the open steps; claims that were granted meanwhile would be void.
        self._recovering = False
        #: The coordinator goes: no other step is begun.
        self._closing = False
        self._evaluator: tuple[MemberKey, float] | None = None

    def pause(self, is_paused: bool) -> None:
        """Lease nothing else while an operator has the run wait."""
        self.paused = is_paused

    def finish(self, is_finished: bool) -> None:
        """Tell trainers that the run is over, or that it is not after all."""
        self.finished = is_finished

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Lease nothing until the block ends, in which a new coordinator collects the ledgers of the open steps."""
        self._recovering = True
        try:
            yield
        finally:
            self._recovering = False

    def leaders_are_looked_at(self) -> None:
        """Note that it is being found out now whether a leader is gone."""
        self.is_uncertain = False

    def open_pools(self) -> None:
        """Keep one pool for each step whose tickets may be computed on the newest record."""
        config, commits = self._leadership.config, self._leadership.newest.step + 1
        steps = range(commits, min(commits + config.delay_steps + 1, config.total_steps))
        if self._closing:
            self.pools = {s: pool for s, pool in self.pools.items() if s in steps}
        else:
            self.pools = {s: self.pools.get(s) or TicketPool(s, config.tickets_per_step) for s in steps}

    def close(self) -> None:
        """Begin no other step, and none of which nothing was leased yet."""
        self._closing = True
        self.pools = {s: pool for s, pool in self.pools.items() if pool.num_free < pool.num_tickets}

    def commit_evaluates(self, step: int) -> None:
        """Note whether an evaluation is due after `step`."""
        config = self._leadership.config
        last = step + 1 == config.total_steps
        if config.eval_samples > 0 and (last or (config.eval_every > 0 and (step + 1) % config.eval_every == 0)):
            self.evaluation_due = step

    def lost(self, tickets: Iterable[Ticket]) -> None:
        """Lease the tickets again now, not after the next seal: the peer that held these has gone with them."""
        for step, index in tickets:
            if step in self.pools and index < self.pools[step].num_tickets:
                self.pools[step].free([index])
                self.is_uncertain = True

    async def on_lease(self, message: m.Lease) -> m.Leased:
        """Answer a trainer that reports and asks; it is held open for a while if there is nothing to tell."""
        if self._leadership.config.data_digest and message.data_digest != self._leadership.config.data_digest:
            raise Refuse("bad_request", "the trainer's data differ from the run's")
        trainer, now = message.trainer.key, self._leadership.now
        lease_s = self._leadership.timing.lease_s
        if message.leaving:
            self.trainers.pop(trainer, None)
            for pool in self.pools.values():
                pool.drop_trainer(trainer)
            if self._evaluator is not None and self._evaluator[0] == trainer:
                self._evaluator = None
            await self._leadership.notify()
            return m.Leased(ballot=self._leadership.ballot)
        for key in [k for k, seen in self.trainers.items() if now - seen > 2 * lease_s]:
            del self.trainers[key]
        if trainer not in self.trainers and len(self.trainers) >= MAX_TRAINERS:
            raise Refuse("busy", f"{MAX_TRAINERS} trainers are served already")
        self.trainers[trainer] = now
        for ticket, accumulated in message.done:
            if ticket.step in self.pools:
                self.pools[ticket.step].done(ticket.index)
                if not accumulated:
                    self.is_uncertain = True
        for step, held in self.pools.items():
            held.renew(trainer, [t.index for t in message.holding if t.step == step], now=now, lease_s=lease_s)
        if self._evaluator is not None and self._evaluator[0] == trainer:  # it is heard while it evaluates
            self._evaluator = (trainer, now + 4 * lease_s)
        if message.evaluated is not None and message.evaluated[0] == self.evaluation_due:
            self.evaluation_due = self._evaluator = None
        if message.done or message.evaluated:
            await self._leadership.notify()
        until = now + self._leadership.timing.coordinator_s / 3
        while True:
            if trainer not in self.trainers:
                return self._leased(message)  # it has left since it asked
            reply = self._lease(message)
            if reply is not None or message.want == 0 or self._leadership.now >= until:
                return reply or self._leased(message)
            try:
                async with asyncio.timeout_at(until):
                    async with self._leadership.changed:
                        await self._leadership.changed.wait()
            except TimeoutError:
                continue

    def _leased(self, message: m.Lease, **extra: object) -> m.Leased:
        records = tuple(r for r in self._leadership.records if _is_news(r, message))
        return m.Leased(ballot=self._leadership.ballot, records=records, waiting_for=self._leadership.waiting_for, **extra)

    def _lease(self, message: m.Lease) -> m.Leased | None:
        """What there is to tell `message.trainer` now, or None."""
        trainer, now = message.trainer.key, self._leadership.now
        if self.evaluation_due is not None:
            free = self._evaluator is None or self._evaluator[1] <= now
            mine = self._evaluator is not None and self._evaluator[0] == trainer
            if message.want and (free or mine):  # a trainer that evaluates asks for nothing
                self._evaluator = (trainer, now + 4 * self._leadership.timing.lease_s)
                return self._leased(message, evaluate=True)
            return self._leased(message) if self._has_news(message) else None
        if self.finished:
            return self._leased(message, finished=True)
        tickets: list[tuple[int, int]] = []
        again = 0
        for step in [] if self._recovering or self.paused else sorted(self.pools):
            want = message.want - len(tickets)
            if want > 0:
                taken = self.pools[step].lease(trainer, want, now=now, lease_s=self._leadership.timing.lease_s)
                tickets += [(step, index) for index in taken]
                again += self.pools[step].num_again(taken)
        if tickets or self._has_news(message):
            avoid = [((s, i), sorted(self.pools[s].avoid[i])) for s, i in tickets if i in self.pools[s].avoid]
            return self._leased(message, tickets=tuple(tickets), again=again, avoid=tuple(avoid))
        return None

    def _has_news(self, message: m.Lease) -> bool:
        record = self._leadership.record
        return record is not None and _is_news(record, message)


def _is_news(record: m.CommitRecord, message: m.Lease) -> bool:
    """The trainer does not have it: also another coordinator's version of what it has, which may name other members."""
    step, known = (record.era, record.step), (message.known_era, message.known_step)
    return step > known or (
        step == known and record.version_id == message.known_version_id and record.ballot > message.known_ballot
    )
