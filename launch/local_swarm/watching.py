"""How the processes of a local swarm are, asked once a second, for a picture of them. Starts and ends none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launch.local_swarm.view import Picture, Row
from launch.processes.children import Child
from launch.status import ask
from swarm.base.errors import SwarmError
from swarm.base.ids import Address

if TYPE_CHECKING:
    from swarm.net.transport import Transport

_ASK_EVERY_S = 1.0
_ASK_TIMEOUT_S = 1.0


async def watch_peers(picture: Picture, children: Mapping[str, Child], serving: Mapping[str, asyncio.Future[Address]]) -> None:
    """Keep the rows of `picture` true until cancelled.

    Args:
        picture: has a row for each of `children`, by name.
        children: may grow meanwhile.
        serving: where each serves, once it does.
    """
    from swarm.net.visitor import visiting

    async with visiting(connect_s=_ASK_TIMEOUT_S) as transport:
        while True:
            names = [name for name, child in children.items() if child.alive and serving[name].done()]
            await asyncio.gather(
                *(_look(transport, serving[name].result(), picture.rows[name], children[name]) for name in names)
            )
            await asyncio.sleep(_ASK_EVERY_S)


async def _look(transport: Transport, address: Address, row: Row, child: Child) -> None:
    try:
        status = await ask(transport, address, timeout_s=_ASK_TIMEOUT_S)
    except SwarmError:
        state = "silent"
    else:
        state = status.state
        in_flight = status.detail.get("in_flight")
        row.work(status.step if status.step >= 0 else None, in_flight if isinstance(in_flight, int) else None)
    if child.alive:
        row.look(state)
