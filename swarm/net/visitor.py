"""Asking peers of a run without being one: an operator's commands, and a newcomer before it serves.

It owns the transport that only asks, and how long an answer is waited for. It must not know what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.base.errors import SwarmError
from swarm.base.ids import Address
from swarm.net.transport import Transport
from swarm.wire.framing import Frame
from swarm.wire.messages import Message


@asynccontextmanager
async def visiting(*, connect_s: float = 2.0) -> AsyncIterator[Transport]:
    """Open a transport that asks and serves nothing; it is closed with the block.

    Args:
        connect_s: a connection must stand within this time, in seconds.
    """
    from swarm.net.transports import new_transport

    transport = new_transport(connect_s=connect_s)
    try:
        yield transport
    finally:
        await transport.close()


async def answer_or_error(transport: Transport, address: Address, message: Message, *, timeout_s: float) -> Message | Exception:
    """Return what the peer at `address` answers within `timeout_s` seconds, or the error that kept it from answering.

    The error is a SwarmError, or a TimeoutError where something listens and says nothing.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return (await transport.call(address, Frame(message), stall_s=timeout_s)).message
    except (SwarmError, TimeoutError) as error:
        return error
