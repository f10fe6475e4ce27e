"""Answers `Hello` and `Status`: what a newcomer or an operator asks any peer. Owns no state."""

from __future__ import annotations

from collections.abc import Callable

from swarm.net.transport import Progress
from swarm.peer.link import Link
from swarm.wire import messages as m
from swarm.wire.framing import Frame


class RunInfoServer:
    """Serves the run's configuration verbatim, DHT contacts and the newest record."""

    def __init__(
        self,
        link: Link,
        *,
        record: Callable[[], m.CommitRecord | None],
        status: Callable[[], m.StatusReply],
        coordinator: Callable[[], m.Member | None],
    ) -> None:
        self._link = link
        self._record = record
        self._status = status
        self._coordinator = coordinator
        link.register(m.Hello, self._on_hello)
        link.register(m.Status, self._on_status)

    async def _on_hello(self, message: m.Hello, frame: Frame, progress: Progress) -> m.RunInfo:
        context = self._link.context
        contacts = tuple((address.host, address.port) for address in context.dht.contacts()[:16])
        return m.RunInfo(
            config=context.config_bytes.decode(),
            contacts=contacts,
            record=self._record(),
            seen_host=progress.remote,
            coordinator=self._coordinator(),
        )

    async def _on_status(self, message: m.Status, frame: Frame, progress: Progress) -> m.StatusReply:
        reply, late_s = self._status(), self._link.context.transport.loop_late_s
        told = {} if late_s is None else {"loop_late_ms": round(1e3 * late_s, 1)}
        return reply.model_copy(update={"detail": reply.detail | told})
