"""What peers say of themselves in the DHT, and who says that it coordinates or aggregates. Hints, never decisions.

Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Literal

from swarm.base.errors import StorageError, SwarmError
from swarm.peer.context import PeerContext, aggregator_key, coordinator_key
from swarm.peer.link import Link
from swarm.wire.messages import Member
from swarm.wire.peer_records import PeerRecord

logger = logging.getLogger(__name__)

#: A peer that goes takes so long, in seconds, to withdraw its record, and leaves one with this life.
WITHDRAW_S = 1.0
WITHDRAWN_TTL_S = 1.0


def member_of(record: PeerRecord) -> Member:
    """Return the peer that announced `record`."""
    return Member(peer=record.peer, incarnation=record.incarnation, host=record.host, port=record.port)


def record_of(context: PeerContext, role: Literal["stage", "coordinator", "backbone"], **details: Any) -> PeerRecord:
    """Return what this peer says of itself in `role`, with the next number of its identity.

    Raises:
        StorageError: the disk refuses to reserve the number.
    """
    return PeerRecord(
        peer=context.peer,
        incarnation=context.incarnation,
        role=role,
        host=context.address.host,
        port=context.address.port,
        ttl_s=context.config.timing.record_ttl_s,
        sequence=context.identity.next_sequence(),
        **details,
    )


async def announce(link: Link, key: str, record: PeerRecord) -> None:
    """Publish one signed record; a failure is logged, the next round tries again."""
    context = link.context
    try:
        await context.dht.publish(key, context.identity.sign_record(key, record))
    except (SwarmError, OSError) as error:
        logger.warning("could not announce under %s: %s", key[-24:], error)


async def keep_announcing(link: Link, key: str, make: Callable[[], PeerRecord]) -> None:
    """Renew this peer's record at a third of its life. A disk that refuses to reserve its number is told once."""
    refused = False
    while True:
        try:
            record = make()
        except StorageError as error:
            if not refused:
                logger.error("%s; this peer works on, and is announced again when the disk takes it", error)
            refused = True
        else:
            refused = False
            await announce(link, key, record)
        await asyncio.sleep(link.context.config.timing.record_ttl_s / 3)


async def withdraw(link: Link, key: str, make: Callable[[], PeerRecord]) -> None:
    """Replace this peer's record by one that is over soon: for a peer that goes."""
    with contextlib.suppress(TimeoutError, StorageError):
        async with asyncio.timeout(WITHDRAW_S):
            await announce(link, key, make().model_copy(update={"ttl_s": WITHDRAWN_TTL_S}))


async def find_coordinators(link: Link) -> list[Member]:
    """Return the coordinators that announce themselves, highest ballot first."""
    records = await link.context.dht.lookup(coordinator_key(link.context.run))
    return [member_of(r) for r in sorted(records, key=lambda r: (r.ballot, r.peer), reverse=True)]


async def find_aggregators(link: Link) -> list[Member]:
    """Return the peers that announce that they reduce slices of averages."""
    return [member_of(record) for record in await link.context.dht.lookup(aggregator_key(link.context.run))]
