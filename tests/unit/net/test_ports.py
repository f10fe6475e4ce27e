"""One port number for TCP and UDP."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarm.base.errors import ConfigError
from swarm.base.ids import Address
from swarm.net.http.transport import HttpTransport
from swarm.net.ports import bind_tcp, bind_tcp_and_udp
from swarm.net.transport import Progress
from swarm.wire.framing import Frame
from swarm.wire.messages import Ack


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "localhost"])
def test_both_protocols_share_a_picked_port(host: str) -> None:
    tcp, udp, port = bind_tcp_and_udp(host, 0)
    with tcp, udp:
        assert tcp.getsockname()[1] == udp.getsockname()[1] == port > 0


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_a_configuration_error_that_names_the_address(host: str, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind) as taken:
        taken.bind((host, 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        protocol = "TCP" if kind == socket.SOCK_STREAM else "UDP"
        with pytest.raises(ConfigError) as caught:
            bind_tcp_and_udp(host, port)
        assert f"{protocol} {Address(host, port)}: Address already in use" in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "a" * 300])
def test_an_address_that_is_not_ours_is_a_configuration_error(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on .*{host}.*--host"):
        bind_tcp(host, 0)


def test_a_restarted_peer_takes_its_old_port_at_once() -> None:
    tcp, udp, port = bind_tcp_and_udp("127.0.0.1", 0)
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = tcp.accept()
    for sock in (served, tcp, udp, client):  # the server closes first: its side waits in TIME_WAIT
        sock.close()
    tcp, udp, _ = bind_tcp_and_udp("127.0.0.1", port)
    tcp.close()
    udp.close()


@pytest.mark.parametrize(("listen", "connect"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::", "127.0.0.1")])
def test_a_transport_serves_on_a_bound_socket(listen: str, connect: str) -> None:
    async def main() -> None:
        seen: list[str] = []

        async def handler(frame: Frame, progress: Progress) -> Frame:
            seen.append(progress.remote)
            return frame

        tcp, udp, port = bind_tcp_and_udp(listen, 0)
        transport = HttpTransport(host=listen, sock=tcp)
        await transport.start(handler)
        assert transport.address == Address(listen, port)
        reply = await transport.call(Address(connect, port), Frame(Ack()), stall_s=2)
        assert reply.message == Ack()
        assert seen == [connect], "an IPv4 caller on a dual-stack socket is told as IPv4"
        await transport.close()
        udp.close()

    asyncio.run(main())
