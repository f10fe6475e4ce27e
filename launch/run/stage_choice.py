"""Which stage a newcomer with `--stage auto` serves: it asks the coordinator, who knows what everyone can do.

Where there is no coordinator yet, the peers that answer are counted, with the same policy. Knows no role.
"""

from __future__ import annotations

import asyncio
import logging

from swarm.base.errors import ConfigError, LinkError, RemoteError
from swarm.base.ids import Address
from swarm.net.transport import Transport
from swarm.net.transports import new_transport
from swarm.peer.context import PeerContext
from swarm.policy.placement import best_stage
from swarm.policy.throughput import StageWork, Swarm, Worker
from swarm.wire import messages as m
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)


async def choose_stage(context: PeerContext, *, flops_per_s: float, room_bytes: int) -> int:
    """The stage where this peer raises predicted throughput most; any stage if there is nobody to ask.

    Raises:
        ConfigError: no stage's state fits into this peer's memory.
    """
    asker = new_transport(connect_s=context.config.timing.connect_s)
    request = m.Place(run=context.run, member=context.member(), flops_per_s=flops_per_s, room_bytes=room_bytes)
    try:
        placed = await _ask_coordinator(asker, context, request) or await _count_peers(asker, context)
    finally:
        await asker.close()
    if placed.stage is None or placed.stage >= context.config.num_stages:
        raise ConfigError(f"--stage auto: {placed.reason or 'no stage'}; a stage of your choice: --stage N")
    logger.info("serving stage %d: %s", placed.stage, placed.reason)
    return placed.stage


async def _call(transport: Transport, context: PeerContext, address: Address, message: m.Message) -> m.Message | None:
    try:
        async with asyncio.timeout(context.config.timing.request_s):
            return (await transport.call(address, Frame(message), stall_s=context.config.timing.request_s)).message
    except (LinkError, RemoteError, TimeoutError) as error:
        logger.debug("%s: %s", address, error)
        return None


async def _ask_coordinator(transport: Transport, context: PeerContext, request: m.Place) -> m.Placed | None:
    asked: set[Address] = set()
    for contact in context.bootstrap:
        info = await _call(transport, context, contact, m.Hello())
        if not isinstance(info, m.RunInfo) or info.coordinator is None:
            continue
        address = Address(info.coordinator.host, info.coordinator.port)
        if address not in asked:
            asked.add(address)
            answer = await _call(transport, context, address, request)
            if isinstance(answer, m.Placed):
                return answer
    return None


async def _count_peers(transport: Transport, context: PeerContext) -> m.Placed:
    """As the coordinator would, of nobody's pace: the peers that this one knows of and that answer now."""
    answers = await asyncio.gather(*(_call(transport, context, contact, m.Status()) for contact in context.bootstrap))
    num_stages = context.config.num_stages
    found = {
        x.member.key: x.stage
        for x in answers
        if isinstance(x, m.StatusReply) and 0 <= x.stage < num_stages and x.member.peer != context.peer
    }
    if not found:
        return m.Placed(stage=context.rng.randrange(num_stages), reason="nobody serves any stage yet")
    swarm = Swarm([StageWork()] * num_stages, [Worker(key=key, stage=stage) for key, stage in found.items()])
    stage, reason = best_stage(swarm, Worker(key=(context.peer, context.incarnation), stage=0))
    return m.Placed(stage=stage, reason=f"{reason} (no coordinator answers; {len(found)} peers do)")
