"""A stage leader's auxiliaries: aggregators that announce themselves, asked for each attempt if they would reduce slices of it.

Owns what the leader knows of them. No step waits long or fails twice for their sake: they are asked while the ledgers are
collected, those that do not answer soon are left out for a while, and so are those that an attempt failed with, which is
made again without any. Whether an offer is taken up is decided in `policy/shares.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence

from swarm.averaging.compressors.plain import Plain
from swarm.base.errors import LinkError, RemoteError
from swarm.base.ids import MemberKey, PeerId
from swarm.peer.announcing import find_aggregators
from swarm.peer.link import RefusedBy
from swarm.peer.stage.stage_context import StageContext
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: One that has failed is left out for the life of a DHT record, and for twice as long each time, up to this many times.
MAX_DOUBLINGS = 8


class Auxiliaries:
    """Asks aggregators for the leader of one stage."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._most = context.config.auxiliaries
        self._known: list[m.Member] = []
        #: The attempt for which they are asked, and their answers to come.
        self._asking: tuple[m.Attempt, asyncio.Task[list[m.Assisting]]] | None = None
        #: How often one has failed since it last helped, and until when it is left out.
        self._out: dict[PeerId, tuple[int, float]] = {}
        #: The step that goes on without.
        self._step_without = -1
        #: Why there is no offer for the attempt to come.
        self.why_none = "" if self._most else "the run uses none"
        #: The last refusal that was logged.
        self._told = ""

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------------------------------------------ asking

    def ask(self, message: m.Gather) -> None:
        """Begin to ask for help with the attempt that `message` seals."""
        self._asking = None
        if not self._most or not message.freeze:
            return
        max_group = self._context.config.max_group
        if len(message.members) > max_group:
            self.why_none = f"{len(message.members)} members average in groups of {max_group}"
        elif message.step == self._step_without:
            self.why_none = "an attempt of this step failed with one"
        else:
            self._asking = (message.attempt, self._context.tasks.start(self._ask_all(message), "ask aggregators"))
        self._context.tasks.start(self._look(), "look for aggregators")

    async def offers(self, attempt: m.Attempt) -> list[m.Assisting]:
        """Return the offers of those that agreed to help with `attempt`."""
        if self._asking is None or self._asking[0] != attempt:
            return []
        return await self._asking[1]

    async def _look(self) -> None:
        """Find aggregators for the next attempt: the DHT may take its time."""
        found = await find_aggregators(self._context.link)
        stage = self._context.stage
        # The same order as long as the same are there, another one at each stage, so that stages spread over them.
        self._known = sorted(found, key=lambda x: hashlib.sha256(f"{stage}/{x.peer}".encode()).digest())
        peers = {x.peer for x in found}
        self._out = {peer: out for peer, out in self._out.items() if peer in peers or out[1] > self._now}

    async def _ask_all(self, message: m.Gather) -> list[m.Assisting]:
        compressor, compute = self._context.compressor, self._context.compute
        assert isinstance(compressor, Plain), "the configuration excludes others"
        request = m.Assist(
            run=message.run,
            stage=message.stage,
            step=message.step,
            attempt=message.attempt,
            vector=compressor.code.spec(compute.layout.num_elements, compute.master_dtype),
            num_members=len(message.members),
        )
        asked = [x for x in self._known if self._out.get(x.peer, (0, 0.0))[1] <= self._now][: 2 * self._most]
        replies = await asyncio.gather(*(self._ask(x, request) for x in asked))
        self.why_none = f"none of {len(asked)} that were asked agreed" if asked else "nobody is known that could be asked"
        return [reply for reply in replies if reply is not None]

    async def _ask(self, aggregator: m.Member, request: m.Assist) -> m.Assisting | None:
        try:
            async with asyncio.timeout(self._context.config.timing.request_s / 4):
                reply, _ = await self._context.link.ask(aggregator, request, m.Assisting)
        except RefusedBy as refused:
            text = f"{aggregator.peer[:8]} does not help: {refused}"
            logger.log(logging.DEBUG if text == self._told else logging.INFO, "stage %d: %s", request.stage, text)
            self._told = text
            return None
        except (LinkError, RemoteError, TimeoutError) as error:
            self._leave_out(aggregator, str(error) or "no answer")
            return None
        return reply if reply.member.peer == aggregator.peer else None

    # ------------------------------------------------------------------------------------------------ judging

    def judge(self, step: int, auxiliaries: Sequence[m.Member], suspects: Counter[MemberKey], *, everyone_holds: bool) -> bool:
        """Blame the auxiliaries that an attempt of `step` suffered from; True if it failed for their sake.

        Then it is made again, also if some members hold the average: none is left out for an auxiliary's sake.

        Args:
            step: if its attempt failed, the next ones go on without.
            auxiliaries: that took part.
            suspects: how often each was suspected, members and auxiliaries alike; between these, auxiliaries are to blame,
                and also where nobody is suspected: they can be done without.
            everyone_holds: every member holds the average.
        """
        if not auxiliaries:
            return False
        most = max(suspects.values(), default=0)
        if most:
            failed = [x for x in auxiliaries if suspects[x.key] == most]
        else:
            failed = [] if everyone_holds else list(auxiliaries)
        for auxiliary in auxiliaries:
            if auxiliary in failed:
                self._leave_out(auxiliary, f"an attempt of step {step} suffered from it")
            elif everyone_holds:
                self._out.pop(auxiliary.peer, None)
        if not everyone_holds:
            self._step_without = step
        return bool(failed) and not everyone_holds

    def _leave_out(self, aggregator: m.Member, reason: str) -> None:
        times, _ = self._out.get(aggregator.peer, (0, 0.0))
        seconds = self._context.config.timing.record_ttl_s * 2 ** min(times, MAX_DOUBLINGS)
        self._out[aggregator.peer] = (times + 1, self._now + seconds)
        logger.warning(
            "stage %d: aggregator %s is left out for %g s: %s", self._context.stage, aggregator.peer[:8], seconds, reason
        )
