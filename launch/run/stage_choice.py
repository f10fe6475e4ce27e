"""Which stage a newcomer with `--stage auto` serves: it asks the coordinator, who knows what everyone can do.

Where there is no coordinator yet, the peers that answer are counted, with the same policy. Knows no role.
"""

from __future__ import annotations

import asyncio
import logging

from swarm.base.errors import ConfigError
from swarm.base.ids import Address
from swarm.net.transport import Transport
from swarm.net.visitor import answer_or_error, visiting
from swarm.peer.context import PeerContext
from swarm.policy.placement import best_stage
from swarm.policy.throughput import StageWork, Swarm, Worker
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


async def choose_stage(context: PeerContext, *, flops_per_s: float, room_bytes: int) -> int:
    """The stage where this peer raises predicted throughput most; any stage if there is nobody to ask.

    Raises:
        ConfigError: no stage's state fits into this peer's memory.
    """
    request = m.Place(run=context.run, member=context.member(), flops_per_s=flops_per_s, room_bytes=room_bytes)
    async with visiting(connect_s=context.config.timing.connect_s) as asker:
        placed = await _ask_coordinator(asker, context, request) or await _count_peers(asker, context)
    if placed.stage is None or placed.stage >= context.config.num_stages:
        raise ConfigError(f"--stage auto: {placed.reason or 'no stage'}; a stage of your choice: --stage N")
    logger.info("serving stage %d: %s", placed.stage, placed.reason)
    return placed.stage


async def _ask_coordinator(transport: Transport, context: PeerContext, request: m.Place) -> m.Placed | None:
    asked: set[Address] = set()
    timeout_s = context.config.timing.request_s
    for contact in context.bootstrap:
        info = await answer_or_error(transport, contact, m.Hello(), timeout_s=timeout_s)
        if not isinstance(info, m.RunInfo) or info.coordinator is None:
            continue
        address = Address(info.coordinator.host, info.coordinator.port)
        if address not in asked:
            asked.add(address)
            answer = await answer_or_error(transport, address, request, timeout_s=timeout_s)
            if isinstance(answer, m.Placed):
                return answer
    return None


async def _count_peers(transport: Transport, context: PeerContext) -> m.Placed:
    """As the coordinator would, of nobody's pace: the peers that this one knows of and that answer now."""
    timeout_s = context.config.timing.request_s
    answers = await asyncio.gather(
        *(answer_or_error(transport, contact, m.Status(), timeout_s=timeout_s) for contact in context.bootstrap)
    )
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
