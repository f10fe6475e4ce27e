"""The first words of a newcomer: ask one address for the run. Needs no run yet, so it is not part of `Link`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from swarm.base.config import run_id_of
from swarm.base.errors import ConfigError, SwarmError, Unreachable
from swarm.base.ids import Address, PeerId, RunId
from swarm.net.transport import Transport
from swarm.wire.framing import Frame
from swarm.wire.messages import CommitRecord, Hello, RunInfo, Status, StatusReply

logger = logging.getLogger(__name__)

#: Of several addresses each gets so long, in seconds, before the next is asked.
ONE_OF_MANY_S = 3.0
#: After so long without an answer, in seconds, the operator is told that it is waited for.
TOLD_S = 2.0


async def fetch_run(
    transport: Transport, addresses: Sequence[Address], *, run: RunId | None = None, deadline_s: float
) -> RunInfo:
    """The run that the peers at `addresses` belong to, asked for in turn until `deadline_s` has passed.

    Args:
        transport: asks.
        addresses: the one that was named, and those known from an earlier life.
        run: takes no other run than this.
        deadline_s: seconds.

    Raises:
        ConfigError: nobody answers; names the first address and the time waited.
    """
    loop = asyncio.get_running_loop()
    telling = loop.call_later(
        TOLD_S, logger.warning, "nobody answers at %s yet; trying for %g s in all", addresses[0], deadline_s
    )
    try:
        return await _ask_in_turn(transport, addresses, run, deadline_s)
    finally:
        telling.cancel()


async def _ask_in_turn(transport: Transport, addresses: Sequence[Address], run: RunId | None, deadline_s: float) -> RunInfo:
    loop = asyncio.get_running_loop()
    began = loop.time()
    last: Exception | None = None
    for address in itertools.cycle(addresses):
        remaining = deadline_s - (loop.time() - began)
        if remaining <= 0:
            break
        try:
            async with asyncio.timeout(remaining if len(addresses) == 1 else min(remaining, ONE_OF_MANY_S)):
                reply = await transport.call(address, Frame(Hello()), stall_s=remaining)
            if isinstance(reply.message, RunInfo) and run in (None, run_id_of(reply.message.config.encode())):
                return reply.message
            last = ConfigError(f"answered with {reply.message.__class__.__name__}, or for another run")
        except (SwarmError, TimeoutError) as error:
            last = error
        await asyncio.sleep(min(0.3, max(0.0, deadline_s - (loop.time() - began))))
    hint = "is a peer of the run listening there?"
    if isinstance(last, TimeoutError):
        hint = "something listens there and says nothing: is its process stopped, or is it no peer?"
    elif not isinstance(last, Unreachable):
        hint = f"last: {last}"
    raise ConfigError(f"nobody answers at {addresses[0]} (waited {deadline_s:g} s); {hint}")


async def require_alone(
    transport: Transport, peer: PeerId, record: CommitRecord | None, *, own: Address, deadline_s: float
) -> None:
    """No member that `record` lists is this peer and lives: two that announce themselves alike hide one another.

    Args:
        transport: asks.
        peer: who is about to join, at the address `own`: what the record lists there is an earlier life.
        deadline_s: seconds. Who does not answer by then is taken for dead.

    Raises:
        ConfigError: there is one; where, and what to do.
    """
    listed = [x for members in record.members for x in members if x.peer == peer] if record is not None else []
    for address in [x for x in (Address(y.host, y.port) for y in listed) if x != own]:
        try:
            async with asyncio.timeout(deadline_s):
                reply = await transport.call(address, Frame(Status()), stall_s=deadline_s)
        except (SwarmError, TimeoutError):
            continue
        if isinstance(reply.message, StatusReply) and reply.message.member.peer == peer:
            raise ConfigError(
                f"another peer with this one's identity {peer[:8]} runs at {address}; if the state directory was copied from "
                "there, start with an empty one"
            )
