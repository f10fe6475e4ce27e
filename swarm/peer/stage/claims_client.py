"""Asks the stage's leader for claims, batched: what queues up while one request is under way goes with the next."""

from __future__ import annotations

import asyncio

from swarm.base.errors import LinkError, RemoteError
from swarm.peer.link import Refuse
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.stage_member import StageMember
from swarm.wire import messages as m


class ClaimsClient:
    """Asks for one member's claims. A claim that is denied or unanswered costs work, never correctness."""

    def __init__(self, context: StageContext, member: StageMember) -> None:
        self._context = context
        self._member = member
        self._waiting: dict[int, dict[int, asyncio.Future[str]]] = {}
        self._busy: set[int] = set()

    def request(self, step: int, index: int) -> asyncio.Future[str]:
        """Ask for one ticket. The future ends with "" if granted (the ledger knows), else with the reason; never raises."""
        batch = self._waiting.setdefault(step, {})
        future = batch.get(index)
        if future is None:
            future = batch[index] = asyncio.get_running_loop().create_future()
        if step not in self._busy:
            self._busy.add(step)
            self._context.tasks.start(self._drain(step), f"claims of step {step}")
        return future

    async def _drain(self, step: int) -> None:
        try:
            while batch := self._waiting.pop(step, None):
                try:
                    granted, reason = await self._ask(step, sorted(batch))
                except (LinkError, RemoteError) as error:
                    granted, reason = set(), str(error)
                for index, future in batch.items():
                    if not future.done():
                        future.set_result("" if index in granted else reason or "denied")
        finally:
            self._busy.discard(step)
            for future in self._waiting.pop(step, {}).values():
                future.cancel()

    async def _ask(self, step: int, indexes: list[int]) -> tuple[set[int], str]:
        leader = self._member.leader_of(step)
        if leader is None:
            raise Refuse("wrong_state", "the stage has no leader")
        ledger = self._member.step_state(step).accumulator.ledger
        request = m.Claim(
            run=self._context.link.context.run,
            stage=self._context.stage,
            step=step,
            attempt=ledger.attempt,
            member=self._context.me,
            indexes=tuple(indexes),
        )
        asked_at = ledger.num_revocations
        reply, _ = await self._context.link.ask(leader, request, m.Claimed)
        for index in reply.granted:
            ledger.grant(index, reply.attempt, asked_at=asked_at)
        return set(reply.granted), reply.reason
