"""What peers say of themselves in the DHT, and who says that it coordinates. Hints, never decisions. Needs no torch."""

from __future__ import annotations

import logging

from swarm.base.errors import SwarmError
from swarm.peer.context import coordinator_key
from swarm.peer.link import Link
from swarm.wire.messages import Member
from swarm.wire.records import PeerRecord, sign_record

logger = logging.getLogger(__name__)


def member_of(record: PeerRecord) -> Member:
    """The peer that announced `record`."""
    return Member(peer=record.peer, incarnation=record.incarnation, host=record.host, port=record.port)


async def announce(link: Link, key: str, record: PeerRecord) -> None:
    """Publish one signed record; a failure is logged, the next round tries again."""
    context = link.context
    try:
        await context.dht.publish(key, sign_record(context.identity.private_key, key, record))
    except (SwarmError, OSError) as error:
        logger.warning("could not announce under %s: %s", key[-24:], error)


async def find_coordinators(link: Link) -> list[Member]:
    """Coordinators that announce themselves, highest ballot first."""
    records = await link.context.dht.lookup(coordinator_key(link.context.run))
    return [member_of(r) for r in sorted(records, key=lambda r: (r.ballot, r.peer), reverse=True)]
