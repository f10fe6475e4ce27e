"""What a stranger may send to the HTTP transport: refused before memory is taken, and the next valid request works.

Real sockets on loopback with small deadlines; the same limits in production are 10 s for headers and 30 s for 16 KiB.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import random
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from swarm.base.errors import LinkBroken, RemoteProtocolError, Stalled, UnknownHost, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import Bounds
from swarm.net.http.transport import HttpTransport
from swarm.net.transport import Progress
from swarm.wire.framing import MAGIC, PREFIX, Frame, decode_header, decode_prefix, encode
from swarm.wire.messages import PROTOCOL_MAJOR, Ack, Heartbeat, StateChunk, TensorSpec

HEADER_S = 0.3
MOVING_S = 0.4


async def echo(frame: Frame, progress: Progress) -> Frame:
    return frame


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def run(scenario: Callable[[HttpTransport], Awaitable[None]]) -> None:
    """Run `scenario` against a small server; afterwards a valid request must work, and nothing may be held."""

    async def main() -> None:
        server = HttpTransport(header_s=HEADER_S, moving_s=MOVING_S, heartbeat_s=0.05, bounds=Bounds(max_body_bytes=2**30))
        await server.start(echo)
        try:
            async with asyncio.timeout(10):
                before = resident_bytes()
                await scenario(server)
                taken = resident_bytes() - before
                assert taken < 50 * 2**20, f"the request took {taken} bytes"
                reply = await server.call(server.address, Frame(Ack()), stall_s=2)
                assert reply.message == Ack(), "the next valid request must work"
                assert server.held_bytes == 0
        finally:
            await server.close()

    asyncio.run(main())


def frame_bytes(header: bytes, body_bytes: int, body: bytes = b"", *, magic: bytes = MAGIC, major: int = PROTOCOL_MAJOR) -> bytes:
    return PREFIX.pack(magic, major, 0, 0, len(header), body_bytes) + header + body


def chunk_header(**spec: object) -> bytes:
    tensor = {"name": "x", "dtype": "uint8", "shape": [4], **spec}
    return json.dumps({"kind": "state_chunk", "tensors": [tensor]}).encode()


async def send_raw(server: HttpTransport, data: bytes) -> bytes:
    """Write `data` and return all that comes back until the end."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def post(body: bytes, content_length: int | None = None, path: str = "/v1") -> bytes:
    length = len(body) if content_length is None else content_length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body


def refusal_in(answer: bytes) -> tuple[int, str, str]:
    """HTTP status, code and reason of the refusal in a raw HTTP answer, behind heartbeats if there are any."""
    frame = answer[answer.rindex(MAGIC) :]
    prefix = decode_prefix(frame)
    message = decode_header(frame[PREFIX.size : PREFIX.size + prefix.header_bytes], prefix)
    return int(answer.split()[1]), message.code, message.reason


def test_bytes_that_are_no_http_get_a_short_answer() -> None:
    noise = random.Random(0).randbytes(2**17).replace(b"\n", b"x")

    async def scenario(server: HttpTransport) -> None:
        answer = await send_raw(server, noise + b"\r\n\r\n")
        assert answer.split()[1] == b"400"
        assert len(answer) < 2000, "what was sent came back"

    run(scenario)


@pytest.mark.parametrize(
    ("name", "request_bytes", "status", "reason"),
    [
        ("10 GB of Content-Length", post(b"", 10 * 10**9), 413, "over this peer's limit"),
        ("10 GB of header", post(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, 2**32 - 1, 0)), 400, "header of 4294967295 bytes"),
        ("10 GB of body", post(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, 10, 10 * 10**9)), 400, "body of 10000000000 bytes"),
        (
            "an endless chunked body",
            b"POST /v1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + bytes(65536) + b"\r\n",
            411,
            "Content-Length",
        ),
        ("pickle bytes", post(pickle.dumps({"a": list(range(50))})), 400, "wrong magic"),
        ("wrong magic", post(frame_bytes(b"{}", 0, magic=b"EVIL")), 400, "wrong magic"),
        ("another major version", post(frame_bytes(b"{}", 0, major=9)), 400, "protocol version 9.0"),
        ("no JSON", post(frame_bytes(b"\x80\x04K", 0)), 400, "JSON"),
        ("unknown kind", post(frame_bytes(b'{"kind":"exec"}', 0)), 400, "kind"),
        ("negative size", post(frame_bytes(chunk_header(shape=[-4]), 4, b"1234")), 400, "greater than or equal to 0"),
        ("huge shape", post(frame_bytes(chunk_header(shape=[2**31, 2**31]), 4, b"1234")), 400, "tensors take 46116860"),
        ("wrong dtype", post(frame_bytes(chunk_header(dtype="object"), 4, b"1234")), 400, "dtype"),
        ("codec for integers", post(frame_bytes(chunk_header(codec="scaled8"), 8, b"12345678")), 400, "codec scaled8"),
        ("body longer than its specs", post(frame_bytes(chunk_header(), 5, b"12345")), 400, "tensors take 4 bytes"),
        ("frame longer than its length", post(frame_bytes(chunk_header(), 4, b"1234more")), 400, "came with"),
        ("too short for a frame", post(b"SWRM"), 400, "too few"),
        ("another path", post(b"x" * 40, path="/etc/passwd"), 404, "/v1"),
        ("another method", b"GET /v1 HTTP/1.1\r\nHost: x\r\n\r\n", 405, "POST"),
        (
            "a web page",
            post(frame_bytes(b'{"kind":"ack"}', 0)).replace(b"Host: x", b"Host: x\r\nOrigin: http://a.page"),
            403,
            "web pages",
        ),
        ("another version of HTTP", b"POST /v1 HTTP/1.0\r\nContent-Length: 40\r\n\r\n" + bytes(40), 505, "HTTP/1.1"),
        ("a deep JSON", post(frame_bytes(b"[" * 100_000, 0)), 400, "JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_hostile_requests_are_refused_with_a_reason(name: str, request_bytes: bytes, status: int, reason: str) -> None:
    async def scenario(server: HttpTransport) -> None:
        got_status, code, got_reason = refusal_in(await send_raw(server, request_bytes))
        assert (got_status, code) == (status, "bad_request")
        assert reason in got_reason

    run(scenario)


@pytest.mark.parametrize(
    "lines",
    [
        ("POST /v1 HTTP/1.1", "Content-Length: {size}", "Transfer-Encoding: chunked"),
        ("POST /v1 HTTP/1.1", "Content-Length: {size}", "content-length: 60"),
        ("POST /v1 HTTP/1.1", "Content-Length: {size}, {size}"),
        ("POST /v1 HTTP/1.1", "Content-Length: -{size}"),
        ("POST /v1 HTTP/1.1", "Content-Length: +{size}"),
        ("POST /v1 HTTP/1.1", "Content-Length: " + "9" * 30),
        ("POST /v1 HTTP/1.1", "Content-Length : {size}"),
        ("POST /v1 HTTP/1.1", "A: 1", " Content-Length: {size}"),
        ("POST /v1 HTTP/1.1", "no colon", "Content-Length: {size}"),
        ("POST /v1 HTTP/1.1", "A: b\nContent-Length: {size}"),
        ("POST /v1 HTTP/2.0", "Content-Length: {size}"),
        ("POST /v1", "Content-Length: {size}"),
        ("post /v1 HTTP/1.1", "Content-Length: {size}"),
    ],
)
def test_a_version_that_two_readers_could_take_for_different_ones_is_refused(lines: tuple[str, ...]) -> None:
    """Two ends must never disagree about where a message ends."""
    body = encode(Frame(Ack()))
    version_id = "\r\n".join([lines[0], "Host: x", *lines[1:]]).format(size=len(body))

    async def scenario(server: HttpTransport) -> None:
        answer = await send_raw(server, version_id.encode() + b"\r\n\r\n" + body)
        assert answer == b"" or answer.split()[1] in (b"400", b"411", b"413", b"505"), "served though it is ambiguous"

    run(scenario)


def test_a_body_that_is_announced_but_never_comes_takes_no_memory_and_is_dropped() -> None:
    size = 2**29
    frame = frame_bytes(chunk_header(shape=[size]), size)

    async def scenario(server: HttpTransport) -> None:
        request = post(frame, len(frame) + size)
        got_status, code, reason = refusal_in(await send_raw(server, request))
        assert (got_status, code) == (200, "bad_request"), "the headers had left with the first heartbeat"
        assert "a transfer brought" in reason or "nothing advanced" in reason

    run(scenario)


@pytest.mark.parametrize("part", ["headers", "frame", "body"])
def test_a_request_that_comes_byte_by_byte_is_dropped(part: str) -> None:
    valid = post(frame_bytes(chunk_header(shape=[100_000]), 100_000, bytes(100_000)))
    at = {"headers": 10, "frame": valid.index(MAGIC) + 6, "body": len(valid) - 90_000}[part]

    async def scenario(server: HttpTransport) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(valid[:at])

        async def drip() -> None:
            for offset in range(at, at + 2000):
                writer.write(valid[offset : offset + 1])
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        began = asyncio.get_running_loop().time()
        try:
            answer = await reader.read()
        except ConnectionResetError:  # a byte that came after the end: the answer may be lost with the connection
            answer = b""
        assert asyncio.get_running_loop().time() - began < 5, "dropped at the deadline"
        if part == "frame" and answer:
            assert refusal_in(answer)[0] == 408
        dripping.cancel()
        await asyncio.wait({dripping})
        writer.close()

    run(scenario)


@pytest.mark.parametrize("garbage", [b"\x00" * 5000, b"\x16\x03\x01\x02\x00\x01", b"GET " + b"a" * 100_000, b"", b"PO"])
def test_garbage_and_silence_end_the_connection(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: HttpTransport) -> None:
        answer = await send_raw(server, garbage)
        assert answer == b"" or answer.startswith(b"HTTP/1.")

    with caplog.at_level(logging.INFO):
        run(scenario)
    told = [record for record in caplog.records if record.name.startswith(("swarm", "aiohttp", "asyncio"))]
    assert not told, "a stranger must not be able to fill the log"


def test_a_caller_that_does_not_read_its_answer_is_dropped() -> None:
    async def scenario(server: HttpTransport) -> None:
        size = 32 * 2**20
        _, writer = await asyncio.open_connection(*server.address, limit=1024)
        writer.write(post(frame_bytes(chunk_header(shape=[size]), size, bytes(size))))
        async with asyncio.timeout(8):
            await writer.drain()
            while not server.held_bytes:  # noqa: ASYNC110 - the server's side has no event for this test to await
                await asyncio.sleep(0.01)
            while server.held_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.transport.abort()

    async def main() -> None:
        server = HttpTransport(moving_s=MOVING_S, heartbeat_s=0.05)
        await server.start(echo)
        await scenario(server)
        assert (await server.call(server.address, Frame(Ack()), stall_s=2)).message == Ack()
        await server.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ hostile servers


def call_raw_server(answers: Callable[[], AsyncIterator[bytes]], *, stall_s: float = 0.5) -> Frame:
    """Call a server that answers any request with these bytes and then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            async for data in answers():
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def main() -> Frame:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpTransport(bounds=Bounds(max_body_bytes=2**20), moving_s=MOVING_S)
        try:
            async with asyncio.timeout(5):
                address = Address("127.0.0.1", listener.sockets[0].getsockname()[1])
                return await client.call(address, Frame(Ack()), stall_s=stall_s)
        finally:
            await client.close()
            listener.close()

    return asyncio.run(main())


OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def http_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def say(*answers: bytes) -> AsyncIterator[bytes]:
    for data in answers:
        yield data


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n" + b"<html>this is a web page</html>"], RemoteProtocolError),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], RemoteProtocolError),
        ([OK, http_chunk(PREFIX.pack(MAGIC, PROTOCOL_MAJOR, 0, 0, 100, 2**40))], RemoteProtocolError),
        ([OK, http_chunk(encode(Frame(Ack()))[:30]), b"0\r\n\r\n"], RemoteProtocolError),
        ([OK, http_chunk(encode(Frame(Heartbeat(counter=1)))), b"0\r\n\r\n"], RemoteProtocolError),
        ([OK, http_chunk(frame_bytes(b'{"kind":"heartbeat"' + b" " * 5000 + b"}", 0))], RemoteProtocolError),
        ([OK, http_chunk(encode(Frame(Heartbeat(counter=1))))], LinkBroken),
        ([OK, b"nonsense\r\n"], RemoteProtocolError),
        ([OK, b"-1\r\n", encode(Frame(Ack()))], RemoteProtocolError),
        ([OK, b"0x40\r\n", encode(Frame(Ack()))], RemoteProtocolError),
        ([OK, b"f" * 17 + b"\r\n", encode(Frame(Ack()))], RemoteProtocolError),
        ([], LinkBroken),
    ],
)
def test_a_bad_answer_is_told_by_its_type(answers: list[bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        call_raw_server(lambda: say(*answers))


def test_heartbeats_whose_counter_stands_still_are_no_progress() -> None:
    async def answers() -> AsyncIterator[bytes]:
        yield OK
        while True:
            yield http_chunk(encode(Frame(Heartbeat(counter=7))))
            await asyncio.sleep(0.02)

    with pytest.raises(Stalled):
        call_raw_server(answers)


def test_an_answer_that_comes_byte_by_byte_is_stalled() -> None:
    reply = Frame(StateChunk(tensors=(TensorSpec(name="x", dtype="uint8", shape=(8000,)),)), (bytes(8000),))

    async def answers() -> AsyncIterator[bytes]:
        yield OK
        for byte in encode(reply):
            yield http_chunk(bytes([byte]))
            await asyncio.sleep(0.01)

    with pytest.raises(Stalled, match="a transfer brought"):
        call_raw_server(answers, stall_s=5)


def test_trailing_bytes_cost_the_connection_but_not_the_answer() -> None:
    assert call_raw_server(lambda: say(OK, http_chunk(encode(Frame(Ack())) + b"more"))).message == Ack()


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_may_come_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    tensor = TensorSpec(name="x", dtype="uint8", shape=(rng.choice([1, 20_000, 300_000]),))
    reply = Frame(StateChunk(tensors=(tensor,)), (rng.randbytes(tensor.num_bytes),))
    data = encode(Frame(Heartbeat(counter=1))) + encode(reply)
    chunks = b""
    while data:
        size = rng.choice([1, 7, 1000, 100_000])
        chunks, data = chunks + http_chunk(data[:size]), data[size:]
    wire = OK + chunks + b"0\r\n\r\n"

    async def answers() -> AsyncIterator[bytes]:
        sent = 0
        while sent < len(wire):
            size = rng.choice([1, 3, 5000, 200_000])
            yield wire[sent : sent + size]
            sent += size
            await asyncio.sleep(0)

    got = call_raw_server(answers, stall_s=5)
    assert bytes(got.buffers[0]) == reply.buffers[0]


def test_a_refused_upload_stops() -> None:
    async def main() -> None:
        server = HttpTransport(bounds=Bounds(max_body_bytes=2**20))
        await server.start(echo)
        try:
            size, progress = 64 * 2**20, Progress()
            request = Frame(StateChunk(tensors=(TensorSpec(name="x", dtype="uint8", shape=(size,)),)), (bytes(size),))
            reply = await server.call(server.address, request, stall_s=5, progress=progress)
            assert "over this peer's limit" in reply.message.reason
            assert progress.num_bytes < size / 2, "what is refused by its length need not be sent"
        finally:
            await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["", "no such host", "a" * 300, "x/y?z", "..", "\u2603"])
def test_a_host_that_is_none_is_unreachable(host: str) -> None:
    async def main() -> None:
        client = HttpTransport(connect_s=1)
        try:
            with pytest.raises(Unreachable):
                await client.call(Address(host, 1), Frame(Ack()), stall_s=1)
        finally:
            await client.close()

    asyncio.run(main())


def test_bodies_land_in_the_memory_that_the_peer_gives() -> None:
    """A GPU copies from pinned memory in the background: what comes in must be there without another copy."""
    given: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        given.append(memoryview(bytearray(num_bytes)))
        return given[-1]

    async def main() -> None:
        async def handle(frame: Frame, progress: Progress) -> Frame:
            assert memoryview(frame.buffers[0]).obj is given[-1].obj
            return frame

        server = HttpTransport()
        server.allocate = allocate
        await server.start(handle)
        request = Frame(StateChunk(total=8, tensors=(TensorSpec(name="x", dtype="uint8", shape=(8,)),)), (b"12345678",))
        try:
            reply = await server.call(server.address, request, stall_s=2)
            assert bytes(reply.buffers[0]) == b"12345678"
            assert memoryview(reply.buffers[0]).obj is given[-1].obj
        finally:
            await server.close()

    asyncio.run(main())


SERVER_WITH_FEW_FILES = """
import asyncio
from swarm.net.http.transport import HttpTransport

async def main():
    async def echo(frame, progress):
        return frame
    server = HttpTransport(header_s=0.3)
    await server.start(echo)
    print(server.address.port, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_more_connections_than_a_process_may_have_files_neither_fill_its_log_nor_stop_it() -> None:
    """A hundred files, four hundred connections that say nothing."""

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    server = subprocess.Popen(
        [sys.executable, "-c", SERVER_WITH_FEW_FILES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=few_files,
    )
    assert server.stdout is not None

    async def main(address: Address) -> None:
        held = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(400)))
        caller = HttpTransport()
        async with asyncio.timeout(20):
            while True:
                try:
                    reply = await caller.call(address, Frame(Ack()), stall_s=2)
                    break
                except (LinkBroken, Unreachable, Stalled):
                    await asyncio.sleep(0.05)
        assert reply.message == Ack()
        await caller.close()
        for _, writer in held:
            writer.close()

    try:
        asyncio.run(main(Address("127.0.0.1", int(server.stdout.readline()))))
    finally:
        server.kill()
        _, errors = server.communicate()
    assert errors == ""


def test_a_name_that_no_service_knows_is_told_from_a_peer_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    async def scenario() -> None:
        transport = HttpTransport()
        try:
            with pytest.raises(UnknownHost, match=r"the name nowhere\.test is not known \(Name or service not known\)"):
                await transport.call(Address("nowhere.test", 4000), Frame(Ack()), stall_s=5.0)
        finally:
            await transport.close()

    asyncio.run(scenario())
