"""The first words of a newcomer: ask one address for the run. Needs no run yet, so it is not part of `Link`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from swarm.base.config import run_id_of
from swarm.base.errors import ConfigError, SwarmError, Unreachable
from swarm.base.ids import Address, RunId
from swarm.net.transport import Transport
from swarm.wire.framing import Frame
from swarm.wire.messages import Hello, RunInfo

#: Of several addresses each gets so long, in seconds, before the next is asked.
ONE_OF_MANY_S = 3.0


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
    hint = "is a peer of the run listening there?" if isinstance(last, Unreachable) else f"last: {last}"
    raise ConfigError(f"nobody answers at {addresses[0]} (waited {deadline_s:g} s); {hint}")
