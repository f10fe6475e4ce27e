"""Which stage a newcomer with `--stage auto` serves: the one with the fewest live peers in the DHT. Knows no role."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from swarm.net.identity import Identity
from swarm.net.kademlia_dht import KademliaDht
from swarm.peer.context import PeerContext, stage_key

#: The DHT gets this long, in seconds, to find its first contact.
_FIRST_CONTACT_S = 3.0
_LOOK_EVERY_S = 0.05


def fewest(num_peers: Sequence[int], rng: random.Random) -> int:
    """The stage with the fewest peers; `rng` breaks ties, so that newcomers who look at once spread out."""
    least = min(num_peers)
    return rng.choice([stage for stage, count in enumerate(num_peers) if count == least])


async def least_served_stage(context: PeerContext) -> int:
    """Count the live peers of every stage, through a DHT node that lives only for this, and choose."""
    node = KademliaDht(identity=Identity.ephemeral(random.SystemRandom()), host="::" if _is_v6(context) else "0.0.0.0",
                       advertise_host=context.advertise_host)
    try:
        await node.start(context.bootstrap)
        for _ in range(round(_FIRST_CONTACT_S / _LOOK_EVERY_S)):
            if not context.bootstrap or len(node.contacts()) > 1:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        stages = range(context.config.num_stages)
        rosters = await asyncio.gather(*(node.lookup(stage_key(context.run, stage)) for stage in stages))
    finally:
        await node.close()
    # A record of this very peer is of an earlier life.
    return fewest([sum(record.peer != context.peer for record in roster) for roster in rosters], context.rng)


def _is_v6(context: PeerContext) -> bool:
    return any(":" in address.host for address in context.bootstrap)
