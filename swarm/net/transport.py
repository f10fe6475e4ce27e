"""The transport interface: one request, one streamed reply, and a wait that lasts only while counters advance.

`http` (aiohttp) and `memory` (seeded, lossy, virtual time) implement it; one contract suite runs on both. Must not know
what any message means, except `Heartbeat` and `Refusal`.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import numpy

from swarm.base.ids import Address
from swarm.wire.framing import Frame


class Progress:
    """Counts what a served request has done; heartbeats carry `count` to the caller, who waits while it advances."""

    def __init__(self, remote: str = "", *, among: Progress | None = None) -> None:
        self._own = 0
        #: Counts the bytes of this request too.
        self._among = among
        self._sources: list[Callable[[], int]] = []
        #: Blocks of `vouched` that have not ended.
        self._num_vouched = 0
        #: Bytes that `moved` has counted.
        self.num_bytes = 0
        #: Host that the request came from, as the transport saw it.
        self.remote = remote

    def advance(self, amount: int = 1) -> None:
        """Something moved: a job finished, a downstream heartbeat counted on, bytes arrived."""
        self._own += amount

    def moved(self, num_bytes: int) -> None:
        """Bytes of a message moved; heartbeats are no movement."""
        self.num_bytes += num_bytes
        self.advance()
        if self._among is not None:
            self._among.moved(num_bytes)

    def follow(self, source: Callable[[], int]) -> None:
        """Count `source()` too (a monotone counter, such as an executor's finished jobs)."""
        self._sources.append(source)

    @contextmanager
    def vouched(self) -> Iterator[None]:
        """Every look counts until the block ends: what is waited for in it has a deadline of its own.

        Else a caller's patience with this peer would end at the same moment as this peer's with the next.
        """
        self._num_vouched += 1
        try:
            yield
        finally:
            self._num_vouched -= 1

    @property
    def count(self) -> int:
        """Everything counted so far; it only grows."""
        self._own += self._num_vouched
        return self._own + sum(source() for source in self._sources)


def pageable(num_bytes: int) -> memoryview:
    """Fresh memory whose pages are untouched: a body that is announced but never comes takes none."""
    return numpy.empty(num_bytes, numpy.uint8).data


#: Serves one request. Cancelled when the caller closes its connection. An exception becomes a `failed` refusal.
Handler = Callable[[Frame, Progress], Awaitable[Frame]]


class Transport(abc.ABC):
    """Sends requests and serves them. One instance per peer."""

    #: Gives writable memory for a body that comes in.
    allocate: Callable[[int], memoryview] = staticmethod(pageable)

    def __init__(self) -> None:
        #: Bytes of the large requests that this peer serves, as they come in and as their answers leave: a handler that
        #: waits for what others send follows it.
        self.served = Progress()

    @abc.abstractmethod
    def carried(self) -> tuple[int, int]:
        """Bytes that this peer's link has carried so far, out (and arrived) and in; what cannot be told is not counted."""

    def receive_into(self, allocate: Callable[[int], memoryview]) -> None:
        """Take memory for bodies from `allocate`: for a peer whose device copies from pinned memory."""
        self.allocate = allocate

    @property
    def loop_late_s(self) -> float | None:
        """The longest that the event loop was held up lately, in seconds; None where its time is virtual."""
        return None

    @property
    @abc.abstractmethod
    def address(self) -> Address:
        """Where this transport listens; valid after `start`."""

    @abc.abstractmethod
    async def start(self, handler: Handler) -> None:
        """Listen, and serve every request with `handler`.

        Raises:
            ConfigError: if the address cannot be bound, naming it.
        """

    @abc.abstractmethod
    async def call(self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None) -> Frame:
        """Send `request` and return the result frame (which may be a `Refusal`).

        Waits only while counters advance: at most `stall_s` seconds between advances of the heartbeat counter or of the
        bytes moved in either direction. `progress` is advanced whenever they do. Cancelling closes the connection.

        Raises:
            Unreachable: no connection within `connect_s`; the request was not delivered.
            Stalled: nothing advanced for `stall_s`.
            LinkBroken: the connection ended early.
            RemoteProtocolError: the reply is no valid frame.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop serving (running handlers are cancelled) and close every connection."""
