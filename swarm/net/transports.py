"""Which transport peers use, and the commands that ask them. Others are for tests (`swarm/testing`)."""

from __future__ import annotations

import socket

from swarm.net.exchange import Bounds
from swarm.net.http.transport import HttpTransport
from swarm.net.transport import Transport


def new_transport(
    *,
    host: str = "127.0.0.1",
    sock: socket.socket | None = None,
    connect_s: float = 2.0,
    heartbeat_s: float = 0.5,
    max_inflight_bytes: int | None = None,
) -> Transport:
    """A transport that asks, and that serves once it is started.

    Args:
        host: where to listen.
        sock: a listening socket to serve on; owned by the transport. None: a free port.
        connect_s: a connection must stand within this time.
        heartbeat_s: a served request sends its counter this often.
        max_inflight_bytes: bound of all bodies that are being taken in; None: the default.
    """
    bounds = Bounds() if max_inflight_bytes is None else Bounds(max_inflight_bytes=max_inflight_bytes)
    return HttpTransport(host=host, sock=sock, connect_s=connect_s, heartbeat_s=heartbeat_s, bounds=bounds)
