"""One hop of a micro-batch: ask a stage's candidates in order until one answers. Shared by trainers and stage peers.

Only the candidate's own fault moves the caller on; a refusal that speaks of the ticket itself passes unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.base.errors import LinkError, RemoteError, RemoteProtocolError, Stalled
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse, RefusedBy
from swarm.peer.presence import Candidates
from swarm.wire.framing import Buffer, Frame
from swarm.wire.messages import Member, Route, Train, Trained

logger = logging.getLogger(__name__)

#: Refusals that another candidate would repeat: the step is over, or they are from further downstream. A peer of another
#: run, or one that finds no sense in the request, speaks for itself alone.
PASSED_ON = frozenset({"no_candidate", "failed_everywhere", "ahead", "stale"})


@dataclass(frozen=True, slots=True)
class HopResult:
    """The reply of the candidate that answered, and those that failed before it with (member, reason, waited_s)."""

    trained: Trained
    frame: Frame
    seconds: float
    failed: tuple[tuple[Member, str, float], ...]

    @property
    def moving_s(self) -> float:
        """Seconds in which bytes of the request and of the answer moved."""
        return (self.trained.hops[0].moving_s or 0.0) + self.frame.arrival_s

    @property
    def transfer_s(self) -> float:
        """Seconds that the stages asked did not take: latency, and bytes that move."""
        below = sum(hop.queue_s + hop.forward_s + hop.backward_s + hop.transfer_s for hop in self.trained.hops)
        return max(0.0, self.seconds - below)


def _living(link: Link, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return those that are not known to be silent; all if nobody else is left, for the stage before them may reach them."""
    silent = link.presence.liveness.silent(x.key for x in members)
    return tuple(x for x in members if x.key not in silent) or members


async def call_stage(
    link: Link, route: Route, make_request: Callable[[Route], Train], buffers: Sequence[Buffer], *, stage: int, progress: Progress
) -> HopResult:
    """Ask the candidates of `route[0]`, which serve `stage`, in order; those that are known to be silent are not asked.

    Raises:
        Refuse: `no_candidate`, or `failed_everywhere` if each one computed and failed, or found no sense in the request; with
            every candidate's reason.
        RefusedBy: with a code in `PASSED_ON`.
    """
    loop = asyncio.get_running_loop()
    failed: list[tuple[Member, str, float]] = []
    num_useless = 0
    candidates, below = Candidates(link.presence, route[0]), route[1:]
    while (candidate := await candidates.next([x for members in below for x in members])) is not None:
        others = tuple(x for x in route[0] if x is not candidate)
        below = tuple(_living(link, members) for members in below)
        request = make_request(((candidate, *others), *below))
        began = loop.time()
        try:
            with progress.vouched():
                trained, frame = await link.ask(
                    candidate, request, Trained, buffers=buffers, stall_s=link.context.config.timing.stall_s, progress=progress
                )
            if [hop.stage for hop in trained.hops] != list(range(stage, link.context.config.num_stages)):
                raise RemoteProtocolError("its hops are not those from its stage to the last")
            return HopResult(trained, frame, loop.time() - began, tuple(failed))
        except RefusedBy as refused:
            if refused.code in PASSED_ON:
                raise
            num_useless += refused.code in ("failed", "bad_request")
            failed.append((candidate, f"{refused.code}: {refused.reason}"[:300], 0.0))
        except (LinkError, RemoteError) as error:
            waited = loop.time() - began if isinstance(error, Stalled) else 0.0
            failed.append((candidate, f"{type(error).__name__}: {error}"[:300], waited))
        member, reason, _ = failed[-1]
        logger.debug("stage %d: %s passed by after %.1f s: %s", stage, member.peer[:8], loop.time() - began, reason)
        progress.advance()  # there is one less to ask: whoever waits for this peer waits on
    told = [*((member, reason) for member, reason, _ in failed), *candidates.left_out()]
    reasons = "; ".join(f"{member.peer[:8]} {reason}" for member, reason in told) or "the route names nobody"
    code = "failed_everywhere" if failed and num_useless == len(told) else "no_candidate"
    raise Refuse(code, f"stage {stage}: {reasons}"[:1900], stage=stage)
