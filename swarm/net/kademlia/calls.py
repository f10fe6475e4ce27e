"""What a request is while it waits for its reply: whom it asks, how often it was sent, and until when.

Must not know sockets; `rpc` sends requests and ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kademlia.node import Node

from swarm.net.kademlia.wire import NODE_ID_BYTES

#: A request is asked anew once for a token and once for a proof.
_MAX_RENEWALS = 2


class UnknownNode(Node):
    """A node of which only the address is known."""

    def __init__(self, ip: str, port: int) -> None:
        super().__init__(bytes(NODE_ID_BYTES), ip, port)
        self.id = b""


class Reply(NamedTuple):
    """What the node at the asked address answered."""

    node_id: bytes
    body: Any


#: Ends with the reply, or with None after the last retransmission went unanswered.
ReplyFuture = asyncio.Future[Reply | None]


@dataclass(slots=True)
class Call:
    """One outstanding request."""

    node: Node
    name: str
    args: tuple[Any, ...]
    future: ReplyFuture
    started_at: float
    max_transmissions: int
    content: bytes = b""
    sent_at: list[float] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    #: When the timer should fire; None before it is set.
    due_at: float | None = None
    #: Whether a timer came late before: one grace is enough.
    has_stalled: bool = False
    #: Times that it was asked anew, with another token or for a proof.
    renewals: int = 0

    def write(self, content: bytes) -> None:
        """Send `content` from now on."""
        self.content = content

    def arm(self, loop: asyncio.AbstractEventLoop, due_at: float, then: Callable[[bytes], None], call_id: bytes) -> None:
        """Have `then(call_id)` called at `due_at`, by the loop's clock in seconds."""
        self.due_at = due_at
        self.timer = loop.call_at(due_at, then, call_id)

    def disarm(self) -> None:
        """Cancel the timer, if one is set."""
        if self.timer is not None:
            self.timer.cancel()
        self.due_at = None

    def note_stall(self, now: float, least_s: float) -> bool:
        """Note it if the timer came over `least_s` seconds late: this process itself stood still. True then, and once at most."""
        if self.due_at is None or self.has_stalled or now - self.due_at < least_s:
            return False
        self.has_stalled = True
        return True

    def renew(self) -> bool:
        """Begin anew with one more transmission, and return whether that is still allowed."""
        self.renewals += 1
        if self.renewals > _MAX_RENEWALS:
            return False
        self.disarm()
        self.max_transmissions += 1
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcTiming:
    """How long a request waits."""

    #: Seconds until a request fails.
    timeout_s: float = 1.0
    #: Times that it is sent at most, at growing intervals that begin with what the round trips measured so far suggest.
    transmissions: int = 5
    #: No datagram is taken for lost before so many seconds.
    least_wait_s: float = 0.05
    #: A contact is dropped after so many failed requests in a row.
    max_misses: int = 3
