"""The first words of a newcomer: ask one address for the run. Needs no run yet, so it is not part of `Link`."""

from __future__ import annotations

import asyncio

from swarm.base.errors import ConfigError, SwarmError, Unreachable
from swarm.base.ids import Address
from swarm.net.transport import Transport
from swarm.wire.framing import Frame
from swarm.wire.messages import Hello, RunInfo


async def fetch_run(transport: Transport, address: Address, *, deadline_s: float) -> RunInfo:
    """The run that the peer at `address` belongs to, asked for again until `deadline_s` has passed.

    Raises:
        ConfigError: nobody answers there; names the address and the time waited.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    last: Exception | None = None
    while True:
        remaining = deadline_s - (loop.time() - began)
        if remaining <= 0:
            hint = "is a peer of the run listening there?" if isinstance(last, Unreachable) else f"last: {last}"
            raise ConfigError(f"nobody answers at {address} (waited {deadline_s:g} s); {hint}")
        try:
            async with asyncio.timeout(remaining):
                reply = await transport.call(address, Frame(Hello()), stall_s=remaining)
            if isinstance(reply.message, RunInfo):
                return reply.message
            last = ConfigError(f"answered with {reply.message.__class__.__name__}")
        except (SwarmError, TimeoutError) as error:
            last = error
        await asyncio.sleep(min(0.3, max(0.0, deadline_s - (loop.time() - began))))
