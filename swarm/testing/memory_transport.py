"""The transport without a network: seeded, lossy, in virtual time, and every message still passes through its bytes.

`MemoryNetwork` owns requests in flight and what becomes of them: drops, lost replies, duplicates, crashed peers; what lies
between two peers is in `memory_links`. Must not know what a message means, except `Heartbeat` and `Refusal`.

A paused peer is like a stopped process: requests reach it, but it sends and answers nothing. Its coroutines are held at
the transport only, so timers inside a handler run on.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from swarm.base.errors import ConfigError, LinkBroken, RemoteProtocolError, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import MAX_HEARTBEAT_BYTES, Admission, Beating, Bounds, ProgressTimeout, Waiting, answer, cancel, parts_of
from swarm.net.transport import Handler, Progress, Transport
from swarm.testing.memory_links import SimulatedLinks
from swarm.wire.framing import Frame, decode, encode
from swarm.wire.messages import Heartbeat, Refusal


@dataclass(eq=False, slots=True)
class _Exchange:
    """One request in flight, from the caller's first byte until the caller has its result or gave up."""

    caller: MemoryTransport
    server: MemoryTransport
    result: asyncio.Future[bytes]
    progress_timeout: ProgressTimeout
    progress: Progress
    counter: int = 0
    #: Seconds that the reply took to arrive.
    arrival_s: float = 0.0
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)

    def transfer(self, is_open: bool) -> None:
        if not self.result.done():
            (self.progress_timeout.open if is_open else self.progress_timeout.shut)(asyncio.get_running_loop().time())

    def moved(self, num_bytes: int) -> None:
        if not self.result.done():
            self.progress_timeout.moved(asyncio.get_running_loop().time(), num_bytes)
            self.progress.moved(num_bytes)

    def beat(self, counter: int) -> None:
        if counter > self.counter and not self.result.done():
            self.counter = counter
            self.progress_timeout.advance(asyncio.get_running_loop().time())
            self.progress.advance()

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class MemoryNetwork(SimulatedLinks):
    """The links between all transports of one simulation, and what is on its way."""

    def __init__(
        self,
        rng: random.Random,
        *,
        latency_s: float = 0.001,
        jitter_s: float = 0.0,
        bytes_per_s: float = math.inf,
        drop: float = 0.0,
        drop_reply: float = 0.0,
        duplicate: float = 0.0,
    ) -> None:
        """
        Args:
            rng, latency_s, jitter_s, bytes_per_s: see `SimulatedLinks`.
            drop: probability that a request vanishes: its caller sees `Stalled`.
            drop_reply: probability that the handler runs and its reply is lost: `LinkBroken` or, as often, `Stalled`.
            duplicate: probability that the handler runs a second time; that reply is ignored.
        """
        super().__init__(rng, latency_s=latency_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s)
        self.drop = drop
        self.drop_reply = drop_reply
        self.duplicate = duplicate
        self._transports: list[MemoryTransport] = []
        self._listening: dict[Address, MemoryTransport] = {}
        self._exchanges: dict[_Exchange, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def crash(self, address: Address) -> None:
        """Kill the peer: its handlers are cancelled, callers see `LinkBroken`, new calls `Unreachable`.

        A new transport may then start at the same address.
        """
        self.injected["crash"] += 1
        for transport in self._transports:
            if transport.address == address and not transport.gone:
                self.vanish(transport, "crashed")
        self._transports = [transport for transport in self._transports if not transport.gone]

    # -------------------------------------------------------------------------------------------- for transports

    def attach(self, transport: MemoryTransport) -> None:
        """Know a transport, so that it can crash."""
        self._transports.append(transport)

    def listen(self, transport: MemoryTransport) -> None:
        """Let a transport be reached at its address.

        Raises:
            ConfigError: if the address is taken.
        """
        if transport.address in self._listening:
            raise ConfigError(f"cannot listen on {transport.address}: address already in use")
        self._listening[transport.address] = transport

    def vanish(self, transport: MemoryTransport, how: str) -> list[asyncio.Task[None]]:
        """Take a transport off the network: every exchange that it takes part in breaks.

        Returns:
            Its handlers' tasks, which were cancelled.
        """
        transport.gone = True
        handlers: list[asyncio.Task[None]] = []
        if self._listening.get(transport.address) is transport:
            del self._listening[transport.address]
            self.forget(transport.address)
        for exchange in list(self._exchanges):
            if exchange.caller is transport:
                exchange.fail(LinkBroken(f"{transport.address} {how}"))
            elif exchange.server is transport:
                handlers += _cancel_all(exchange)
                broken = LinkBroken(f"{transport.address} {how}")
                self._spawn(self._tell(exchange, functools.partial(exchange.fail, broken)))
        self.change()
        return handlers

    async def connect(self, source: Address, target: Address, connect_s: float) -> MemoryTransport:
        """The transport that listens at `target`, once it is connected.

        Raises:
            Unreachable: at once if nobody listens, after `connect_s` if the link is cut.
        """
        try:
            async with asyncio.timeout(connect_s):
                await self.connectable(source, target)
        except TimeoutError:
            raise Unreachable(f"{target}: no connection within {connect_s:g} s") from None
        server = self._listening.get(target)
        if server is None:
            await asyncio.sleep(self.between(source, target).latency_s)
            raise Unreachable(f"{target}: connection refused")
        return server

    def send(self, exchange: _Exchange, data: bytes) -> None:
        """Set the request on its way."""
        self._exchanges[exchange] = None
        if self._draw_fault("drop", self.drop):
            return
        self._run(exchange, self._deliver(exchange, data))
        if self._draw_fault("duplicate", self.duplicate):
            ghost: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            ghost.cancel()  # nobody waits for the second reply
            twin = _Exchange(exchange.caller, exchange.server, ghost, exchange.progress_timeout, exchange.progress)
            self._exchanges[twin] = None
            self._run(twin, self._deliver(twin, data))

    def hang_up(self, exchange: _Exchange) -> None:
        """The caller is gone: the server learns of it, and drops the work, as soon as a packet can reach it."""
        if exchange.tasks:
            self._spawn(self._hang_up(exchange))
        else:
            self._exchanges.pop(exchange, None)

    def beat(self, exchange: _Exchange, counter: int) -> None:
        """Send a heartbeat, unless nothing leaves the server now: a later one tells more."""
        if self.is_blocked(exchange.server.address, exchange.caller.address):
            return
        data = encode(Frame(Heartbeat(counter=counter)))
        self._spawn(self._tell(exchange, lambda: exchange.beat(decode(data).message.counter)))

    # -------------------------------------------------------------------------------------------- moving bytes

    async def _deliver(self, exchange: _Exchange, data: bytes) -> None:
        source, target = exchange.caller.address, exchange.server.address
        await self.carry(source, target)
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        await self._transfer(source, target, len(data), exchange)
        arrival_s = loop.time() - came_at
        await self.awake(target)
        reply = await exchange.server.serve(exchange, data, arrival_s)
        await self.awake(target)
        if self._draw_fault("drop_reply", self.drop_reply):
            if self._rng.random() < 0.5:
                await self._tell(exchange, lambda: exchange.fail(LinkBroken(f"{target}: connection reset")))
            return
        await self.carry(target, source)
        came_at = loop.time()
        await self._transfer(target, source, len(reply), exchange)
        exchange.arrival_s = loop.time() - came_at
        if not exchange.result.done():
            exchange.result.set_result(reply)

    async def _tell(self, exchange: _Exchange, what: Callable[[], None]) -> None:
        """Have `what` happen at the caller once a small packet from the server has reached it."""
        await self.carry(exchange.server.address, exchange.caller.address)
        what()

    async def _hang_up(self, exchange: _Exchange) -> None:
        await self.carry(exchange.caller.address, exchange.server.address)
        _cancel_all(exchange)

    async def _transfer(self, source: Address, target: Address, num_bytes: int, exchange: _Exchange) -> None:
        """Move a message's bytes at the link's rate, counting them at the caller while both ends are awake."""
        sender, receiver = exchange.caller, exchange.server
        if source != sender.address:
            sender, receiver = receiver, sender
        is_limited = self.is_limited(source, target)
        exchange.transfer(True)
        async for piece in self.pieces(source, target, num_bytes):
            if not self.is_paused(target):
                exchange.moved(piece)
                if num_bytes > MAX_HEARTBEAT_BYTES:
                    exchange.server.served.moved(piece)
            if is_limited:
                sender.num_sent += piece
                receiver.num_received += piece
        exchange.transfer(False)

    def _draw_fault(self, kind: str, probability: float) -> bool:
        happens = probability > 0 and self._rng.random() < probability
        self.injected[kind] += happens
        return happens

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _run(self, exchange: _Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a part of `exchange`, which is forgotten with its last task."""
        task = self._spawn(work)
        exchange.tasks[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            del exchange.tasks[task]
            if not exchange.tasks and exchange.result.done():
                self._exchanges.pop(exchange, None)

        task.add_done_callback(ended)


class MemoryTransport(Transport):
    """One peer's end of a `MemoryNetwork`."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: Address,
        *,
        connect_s: float = 2.0,
        heartbeat_s: float = 0.5,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__()
        self._network = network
        self._address = address
        self._connect_s = connect_s
        self._heartbeat_s = heartbeat_s
        self._bounds = bounds or Bounds()
        self._admission = Admission(self._bounds)
        self._handler: Handler | None = None
        #: Bytes over links and lines of limited rates.
        self.num_sent = self.num_received = 0
        #: Closed or crashed: it can neither call nor serve.
        self.gone = False
        network.attach(self)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._address

    @property
    def held_bytes(self) -> int:
        """Bytes of requests that are being served."""
        return self._admission.held_bytes

    async def start(self, handler: Handler) -> None:
        """Listen, and have `handler` answer requests."""
        self._handler = handler
        self._network.listen(self)

    async def close(self) -> None:
        """Listen no more and break what is open."""
        handlers = self._network.vanish(self, "closed")
        if handlers:
            await asyncio.wait(handlers)

    async def call(self, address: Address, request: Frame, *, stall_s: float, progress: Progress | None = None) -> Frame:
        """As of every transport: send a request and wait for the reply."""
        data = b"".join(parts_of(request))
        what = f"{request.message.kind} to {address}"
        await self._network.awake(self._address)
        if self.gone:
            raise Unreachable(f"{what}: this peer's transport is closed")
        server = await self._network.connect(self._address, address, self._connect_s)
        loop = asyncio.get_running_loop()
        progress_timeout = ProgressTimeout(stall_s=stall_s)
        progress_timeout.open(loop.time())
        progress_timeout.shut(loop.time())
        exchange = _Exchange(self, server, loop.create_future(), progress_timeout, progress or Progress())
        self._network.send(exchange, data)
        try:
            async with Waiting(progress_timeout, what):
                reply = await exchange.result
        finally:
            await cancel(exchange.result)
            self._network.hang_up(exchange)
        await self._network.awake(self._address)
        return replace(decode(reply, max_body_bytes=self._bounds.max_body_bytes), arrival_s=exchange.arrival_s)

    def carried(self) -> tuple[int, int]:
        """Bytes that it sent and received."""
        return self.num_sent, self.num_received

    async def serve(self, exchange: _Exchange, data: bytes, arrival_s: float) -> bytes:
        """Answer one request, which took so long to arrive, with heartbeats to its caller until then."""
        refusal = self._admission.admit(len(data))
        if refusal is not None:
            return encode(Frame(refusal))
        try:
            request = replace(decode(data, max_body_bytes=self._admission.max_body_bytes), arrival_s=arrival_s)
            progress = Progress(exchange.caller.address.host)
            assert self._handler is not None

            async def beat() -> None:
                self._network.beat(exchange, progress.count)

            async with Beating(self._heartbeat_s, beat):
                return b"".join(await answer(self._handler, request, progress))
        except RemoteProtocolError as error:
            return encode(Frame(Refusal(code="bad_request", reason=str(error)[:2000])))
        finally:
            self._admission.release(len(data))


def _cancel_all(exchange: _Exchange) -> list[asyncio.Task[None]]:
    tasks = list(exchange.tasks)
    for task in tasks:
        task.cancel()
    return tasks
