"""The first words of a newcomer: ask one address for the run, then those known from before. Not part of `Link`: needs no run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.base.config import run_id_of
from swarm.base.errors import ConfigError, UnknownHost, Unreachable
from swarm.base.ids import Address, PeerId, RunId
from swarm.net.transport import Transport
from swarm.net.visitor import answer_or_error
from swarm.wire.messages import CommitRecord, Hello, RunInfo, Status, StatusReply

logger = logging.getLogger(__name__)

#: Of several addresses each gets so long, in seconds, before the next is asked.
ONE_OF_MANY_S = 3.0
#: After so long without an answer, in seconds, the operator is told that it is waited for.
TOLD_S = 2.0
_NOT_ASKED: Exception = TimeoutError()


@dataclass(frozen=True, kw_only=True)
class Contacts:
    """Addresses known from an earlier life in `run`. Whoever serves another run there now is passed over."""

    run: RunId
    addresses: Sequence[Address]


async def fetch_run(
    transport: Transport, named: Address, *, run: RunId | None = None, contacts: Contacts | None = None, deadline_s: float
) -> RunInfo:
    """Ask the peer at `named` for its run, else whoever of `contacts` answers first, until `deadline_s` has passed.

    Args:
        transport: asks.
        named: who is asked first.
        run: takes no other run than this from it.
        contacts: asked all at once, each time that `named` does not answer.
        deadline_s: seconds.

    Raises:
        ConfigError: nobody answers; names the first address, why and the time waited.
    """
    loop = asyncio.get_running_loop()
    began, last = loop.time(), _NOT_ASKED
    telling = loop.call_later(
        TOLD_S,
        lambda: logger.warning(
            "nobody answers at %s yet%s; trying for %g s in all",
            named,
            f" ({last})" if isinstance(last, UnknownHost) else "",
            deadline_s,
        ),
    )
    others = [x for x in contacts.addresses if x != named] if contacts is not None else []
    try:
        while (remaining := deadline_s - (loop.time() - began)) > 0:
            found = await _ask(transport, named, run, min(remaining, ONE_OF_MANY_S) if others else remaining)
            if isinstance(found, RunInfo):
                return found
            last = found
            if contacts is not None and others:
                info = await _first_of([_ask(transport, x, contacts.run, ONE_OF_MANY_S) for x in others])
                if info is not None:
                    logger.warning("nobody answers at %s; another peer of the run does, which is known from before", named)
                    return info
            await asyncio.sleep(min(0.3, max(0.0, deadline_s - (loop.time() - began))))
    finally:
        telling.cancel()
    also = f", nor at {len(others)} addresses known from before" if others else ""
    raise ConfigError(f"nobody answers at {named}{also} (waited {round(loop.time() - began, 1):g} s); {_hint(named, last)}")


def _hint(named: Address, last: Exception) -> str:
    if isinstance(last, UnknownHost):
        return f"{last}: is {named.host} spelt as its owner told, and does this machine's name service know it?"
    if isinstance(last, TimeoutError):
        return "something listens there and says nothing: is its process stopped, or is it no peer?"
    if not isinstance(last, Unreachable):
        return f"last: {last}"
    return "is a peer of the run listening there?"


async def _ask(transport: Transport, address: Address, run: RunId | None, limit_s: float) -> RunInfo | Exception:
    """Return what the peer at `address` says of its run, or why it does not within `limit_s`."""
    reply = await answer_or_error(transport, address, Hello(), timeout_s=limit_s)
    if isinstance(reply, Exception) or (isinstance(reply, RunInfo) and run in (None, run_id_of(reply.config.encode()))):
        return reply
    return ConfigError(f"answered with {reply.__class__.__name__}, or for another run")


async def _first_of(asking: Sequence[Coroutine[Any, Any, RunInfo | Exception]]) -> RunInfo | None:
    """Return the first that is an answer, without waiting for the others."""
    tasks = [asyncio.ensure_future(one) for one in asking]
    try:
        for task in asyncio.as_completed(tasks):
            if isinstance(found := await task, RunInfo):
                return found
        return None
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def require_alone(
    transport: Transport, peer: PeerId, record: CommitRecord | None, *, own: Address, deadline_s: float
) -> None:
    """Make sure that no living member of `record` is this peer: two that announce themselves alike hide one another.

    Args:
        transport: asks.
        peer: who is about to join, at the address `own`: what the record lists there is an earlier life.
        deadline_s: seconds. Who does not answer by then is taken for dead.

    Raises:
        ConfigError: there is one; where, and what to do.
    """
    listed = [x for members in record.members for x in members if x.peer == peer] if record is not None else []
    for address in [x for x in (Address(y.host, y.port) for y in listed) if x != own]:
        reply = await answer_or_error(transport, address, Status(), timeout_s=deadline_s)
        if isinstance(reply, StatusReply) and reply.member.peer == peer:
            raise ConfigError(
                f"another peer with this one's identity {peer[:8]} runs at {address}; if the state directory was copied from "
                "there, start with an empty one"
            )
