"""The two ends that `dataplane.py` measures: a server process and a client, of this product's transport, of raw sockets, and
of bare aiohttp, the library that carries the product's: nothing but bodies, received into one buffer that is used again.

Run as a script it is the server: prints its port as a line and serves until its input ends. A payload is a tensor of a
`state_chunk`; what the server does with it is the tensor's name: `echo` sends it back, `sink` answers with an `ack`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable

import aiohttp
import torch
from aiohttp import web

from swarm.base.ids import Address
from swarm.net.http.server import READ_BYTES
from swarm.net.http.transport import HttpTransport
from swarm.net.transport import Progress
from swarm.stage.devices import HostDevice
from swarm.stage.executor import Priority, ThreadExecutor
from swarm.wire.compression import CODECS
from swarm.wire.framing import Frame
from swarm.wire.messages import Ack, StateChunk, TensorSpec

STALL_S = 30.0
#: A raw request is its kind and its size, then the payload.
_KINDS = {b"e": "echo", b"s": "sink"}
_HEAD_BYTES = 9

#: Whether a worker that has done so many calls makes another one.
Deadline = Callable[[int], bool]
#: One after another, over the same connections; each begins when the one before has ended.
Phases = Iterable[Deadline]


def raw_frame(kind: str, num_bytes: int) -> Frame:
    tensor = TensorSpec(name=kind, dtype="uint8", shape=(num_bytes,), role="state")
    return Frame(StateChunk(tensors=(tensor,)), (memoryview(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy()),))


# ---------------------------------------------------------------------------------------------------- servers


async def serve_swarm() -> None:
    executor, device = ThreadExecutor(), HostDevice()

    async def handle(frame: Frame, progress: Progress) -> Frame:
        spec = frame.message.tensors[0]
        if spec.codec == "raw":
            return frame if spec.name == "echo" else Frame(Ack())
        received = (await executor.run(lambda: device.receive(frame, "input"), Priority.FORWARD)).value
        if spec.name == "sink":
            return Frame(Ack())
        sent = (await executor.run(lambda: device.send(received, spec.codec, "input"), Priority.BACKWARD)).value
        ((coded, buffer),) = sent.payload
        return Frame(StateChunk(tensors=(coded,)), (buffer,))

    transport = HttpTransport()
    await transport.start(handle)
    print(transport.address.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


def serve_raw() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(sock: socket.socket) -> None:
        buffer = memoryview(bytearray(0))
        while head := sock.recv(_HEAD_BYTES, socket.MSG_WAITALL):
            size = int.from_bytes(head[1:], "big")
            if len(buffer) != size:
                buffer = memoryview(bytearray(size))
            receive(sock, buffer)
            sock.sendall(buffer if _KINDS[head[:1]] == "echo" else b"a")

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


async def serve_aiohttp() -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        received = await taken(request.content, request.content_length or 0)
        return web.Response(body=received if request.path == "/echo" else b"a")

    server = web.Server(handle, access_log=None, read_bufsize=READ_BYTES)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    listener.close()


#: Bodies are received into these.
_idle: dict[int, list[bytearray]] = {}


async def taken(content: aiohttp.StreamReader, size: int) -> bytearray:
    """The whole body in a buffer that later bodies of its size are received into."""
    buffers = _idle.setdefault(size, [])
    buffer = buffers.pop() if buffers else bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        piece, _ = await content.readchunk()
        view[filled : filled + len(piece)] = piece
        filled += len(piece)
    buffers.append(buffer)
    return buffer


def receive(sock: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled:])
        if not count:
            raise ConnectionError("closed")
        filled += count


# ---------------------------------------------------------------------------------------------------- clients


async def _in_turns(
    transport: HttpTransport | aiohttp.ClientSession, call: Callable[[], Awaitable[None]], in_flight: int, phases: Phases
) -> list[float]:
    """Seconds of every call of the last phase; each of `in_flight` workers calls while a phase goes on."""
    seconds: list[float] = []

    async def work(goes_on: Deadline) -> None:
        num_done = 0
        while goes_on(num_done):
            began = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - began)
            num_done += 1

    try:
        for goes_on in phases:
            seconds.clear()
            await asyncio.gather(*(work(goes_on) for _ in range(in_flight)))
    finally:
        await transport.close()
    return seconds


def call_swarm(port: int, kind: str, size: int, in_flight: int, phases: Phases) -> list[float]:
    """See `_in_turns`."""

    async def main() -> list[float]:
        transport, frame, address = HttpTransport(), raw_frame(kind, size), Address("127.0.0.1", port)

        async def call() -> None:
            await transport.call(address, frame, stall_s=STALL_S)

        return await _in_turns(transport, call, in_flight, phases)

    return asyncio.run(main())


def call_aiohttp(port: int, kind: str, size: int, in_flight: int, phases: Phases) -> list[float]:
    async def main() -> list[float]:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=READ_BYTES, auto_decompress=False)
        payload, url = bytes(size), f"http://127.0.0.1:{port}/{kind}"

        async def call() -> None:
            async with session.post(url, data=payload) as response:
                await taken(response.content, response.content_length or 0)

        return await _in_turns(session, call, in_flight, phases)

    return asyncio.run(main())


def call_swarm_8bit(port: int, kind: str, size: int, in_flight: int, phases: Phases) -> list[float]:
    """Like `call_swarm`, with fp32 tensors of `size` bytes that are quantised and restored at both ends."""

    async def main() -> list[float]:
        transport, executor, device = HttpTransport(), ThreadExecutor(), HostDevice()
        tensor, address = torch.randn(size // 4), Address("127.0.0.1", port)

        async def call() -> None:
            sent = await executor.run(lambda: device.send({kind: tensor}, CODECS["8bit"], "input"), Priority.FORWARD)
            ((spec, buffer),) = sent.value.payload
            reply = await transport.call(address, Frame(StateChunk(tensors=(spec,)), (buffer,)), stall_s=STALL_S)
            if kind == "echo":
                await executor.run(lambda: device.receive(reply, "input"), Priority.BACKWARD)

        try:
            return await _in_turns(transport, call, in_flight, phases)
        finally:
            executor.close()

    return asyncio.run(main())


def call_raw(port: int, kind: str, size: int, in_flight: int, phases: Phases) -> list[float]:
    seconds: list[float] = []

    def work(worker: tuple[socket.socket, memoryview, memoryview], goes_on: Deadline) -> None:
        sock, payload, answer = worker
        num_done = 0
        while goes_on(num_done):
            began = time.perf_counter()
            sock.sendall(kind[:1].encode() + size.to_bytes(_HEAD_BYTES - 1, "big"))
            sock.sendall(payload)
            receive(sock, answer)
            seconds.append(time.perf_counter() - began)
            num_done += 1

    workers = []
    for _ in range(in_flight):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        workers.append((sock, memoryview(bytearray(size)), memoryview(bytearray(size if kind == "echo" else 1))))
    for goes_on in phases:
        seconds.clear()
        threads = [threading.Thread(target=work, args=(worker, goes_on)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for sock, _, _ in workers:
        sock.close()
    return seconds


CLIENTS = {"swarm": call_swarm, "swarm 8bit": call_swarm_8bit, "raw sockets": call_raw, "aiohttp": call_aiohttp}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=["swarm", "raw", "aiohttp"])
    torch.set_num_threads(1)
    gc.freeze()  # as the launchers do
    kind = parser.parse_args().server
    if kind == "raw":
        serve_raw()
    else:
        asyncio.run(serve_swarm() if kind == "swarm" else serve_aiohttp())
