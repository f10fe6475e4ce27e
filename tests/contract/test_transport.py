"""The promises of `net.transport`, kept by both transports: real sockets on a real loop, and virtual time."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from swarm.base.errors import ConfigError, LinkBroken, LinkError, RemoteRefused, Stalled, Unreachable
from swarm.base.ids import Address
from swarm.net.exchange import Bounds
from swarm.net.http.transport import HttpTransport
from swarm.net.transport import Handler, Progress, Transport
from swarm.testing.memory_transport import MemoryNetwork, MemoryTransport
from swarm.testing.virtual_time import run_virtual
from swarm.wire.framing import Frame
from swarm.wire.messages import DTYPE_BYTES, Ack, Member, Refusal, StateChunk, StatusReply, TensorSpec

HEARTBEAT_S = 0.05
STALL_S = 0.6
#: For calls that are not about waiting, on a busy machine.
PATIENT_S = 10.0
CONNECT_S = 2.0


class HttpWorld:
    """Transports on loopback."""

    def __init__(self) -> None:
        self._open: list[Transport] = []

    async def transport(self, handler: Handler | None = None, **options: Any) -> HttpTransport:
        transport = HttpTransport(**{"connect_s": CONNECT_S, "heartbeat_s": HEARTBEAT_S, **options})
        self._open.append(transport)
        await transport.start(handler or echo)
        return transport

    def nobody(self) -> Address:
        """An address where nobody listens."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return Address("127.0.0.1", sock.getsockname()[1])

    def at(self, address: Address) -> Transport:
        return HttpTransport(host=address.host, port=address.port)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(self._closing(main))

    async def _closing(self, main: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(20):
                await main()
        finally:
            for transport in self._open:
                await transport.close()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if left:
                await asyncio.wait(left, timeout=0.2)
            left = [task for task in left if not task.done()]
            assert not left, f"tasks outlive their transports: {left}"


class MemoryWorld(HttpWorld):
    """Transports in one network, in virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork(random.Random(1), jitter_s=0.001)
        self._num = 0

    async def transport(self, handler: Handler | None = None, **options: Any) -> MemoryTransport:  # type: ignore[override]
        self._num += 1
        transport = MemoryTransport(
            self.network, Address(f"peer{self._num}", 1), **{"connect_s": CONNECT_S, "heartbeat_s": HEARTBEAT_S, **options}
        )
        self._open.append(transport)
        await transport.start(handler or echo)
        return transport

    def nobody(self) -> Address:
        return Address("nobody", 1)

    def at(self, address: Address) -> Transport:
        return MemoryTransport(self.network, address)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        run_virtual(self._closing(main))


@pytest.fixture(params=[HttpWorld, MemoryWorld], ids=["http", "memory"])
def world(request: pytest.FixtureRequest) -> HttpWorld:
    return request.param()


async def echo(frame: Frame, progress: Progress) -> Frame:
    return frame


async def forever(frame: Frame, progress: Progress) -> Frame:
    await asyncio.Event().wait()
    raise AssertionError


def tensor_frame(*shape: int, dtype: str = "uint8", seed: int = 0) -> Frame:
    tensor = spec(name="x", dtype=dtype, shape=shape)
    return Frame(StateChunk(tensors=(tensor,)), (random.Random(seed).randbytes(tensor.num_bytes),))


def spec(**fields: object) -> TensorSpec:
    return TensorSpec.model_validate(fields)


def same(a: Frame, b: Frame) -> bool:
    return a.message == b.message and [bytes(x) for x in a.buffers] == [bytes(x) for x in b.buffers]


# ------------------------------------------------------------------------------------------------ what arrives


def test_every_dtype_shape_and_codec_arrives_as_it_was_sent(world: HttpWorld) -> None:
    async def main() -> None:
        server, client = await world.transport(), await world.transport()
        shapes: list[tuple[int, ...]] = [(), (0,), (3, 5)]
        specs = [spec(name=f"{dtype}{shape}", dtype=dtype, shape=shape) for dtype in DTYPE_BYTES for shape in shapes]
        specs += [TensorSpec(name=c, dtype="float32", shape=(5000,), codec=c) for c in ("fp16", "bf16", "scaled8")]
        rng = random.Random(2)
        frame = Frame(StateChunk(tensors=tuple(specs)), tuple(rng.randbytes(each.num_bytes) for each in specs))
        assert same(await client.call(server.address, frame, stall_s=PATIENT_S), frame)
        assert same(await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S), Frame(Ack()))

    world.run(main)


def test_large_bodies_and_many_small_tensors_arrive(world: HttpWorld) -> None:
    async def main() -> None:
        server, client = await world.transport(), await world.transport()
        large = tensor_frame(16 * 2**20)
        assert same(await client.call(server.address, large, stall_s=PATIENT_S), large)
        specs = tuple(TensorSpec(name=str(i), dtype="uint8", shape=(700,)) for i in range(1000))
        small = Frame(StateChunk(tensors=specs), tuple(bytes([i % 256]) * 700 for i in range(1000)))
        assert same(await client.call(server.address, small, stall_s=PATIENT_S), small)

    world.run(main)


def test_buffers_of_any_contiguous_type_are_sent(world: HttpWorld) -> None:
    async def main() -> None:
        server, client = await world.transport(), await world.transport()
        tensors = (spec(name="x", dtype="int32", shape=(2, 2)),)
        view = memoryview(bytearray(range(16))).cast("i", (2, 2))
        reply = await client.call(server.address, Frame(StateChunk(tensors=tensors), (view,)), stall_s=PATIENT_S)
        assert bytes(reply.buffers[0]) == bytes(range(16))
        with pytest.raises(ValueError, match="its spec says 16"):
            await client.call(server.address, Frame(StateChunk(tensors=tensors), (b"short",)), stall_s=PATIENT_S)

    world.run(main)


def test_200_concurrent_nested_calls_in_both_directions_do_not_deadlock(world: HttpWorld) -> None:
    async def main() -> None:
        peers: dict[str, Transport] = {}

        async def bounce(frame: Frame, progress: Progress) -> Frame:
            hops = frame.message.detail["hops"]
            if hops == 0:
                return frame
            target = peers["a" if hops % 2 else "b"].address
            inner = frame.message.model_copy(update={"detail": {"hops": hops - 1}})
            me = peers["b" if hops % 2 else "a"]
            return await me.call(target, Frame(inner), stall_s=PATIENT_S)

        peers["a"] = await world.transport(bounce, connect_s=PATIENT_S)
        peers["b"] = await world.transport(bounce, connect_s=PATIENT_S)
        member = Member(peer="0" * 40, incarnation="0" * 16, host="h", port=1)
        start = Frame(StatusReply(role="trainer", member=member, detail={"hops": 1}))
        there = [peers["a"].call(peers["b"].address, start, stall_s=PATIENT_S) for _ in range(100)]
        twice = start.message.model_copy(update={"detail": {"hops": 2}})
        back = [peers["b"].call(peers["a"].address, Frame(twice), stall_s=PATIENT_S) for _ in range(100)]
        for reply in await asyncio.gather(*there, *back):
            assert reply.message.detail == {"hops": 0}

    world.run(main)


def test_the_handler_learns_where_the_request_came_from(world: HttpWorld) -> None:
    async def main() -> None:
        seen: list[str] = []

        async def handler(frame: Frame, progress: Progress) -> Frame:
            seen.append(progress.remote)
            return frame

        server, client = await world.transport(handler), await world.transport()
        await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        assert seen == [client.address.host]

    world.run(main)


# ------------------------------------------------------------------------------------------------ how long one waits


def test_a_caller_waits_as_long_as_the_counter_advances(world: HttpWorld) -> None:
    async def main() -> None:
        async def slow(frame: Frame, progress: Progress) -> Frame:
            for _ in range(10):
                await asyncio.sleep(STALL_S / 4)
                progress.advance()
            return frame

        server, client = await world.transport(slow), await world.transport()
        mine = Progress()
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert same(await client.call(server.address, Frame(Ack()), stall_s=STALL_S, progress=mine), Frame(Ack()))
        assert loop.time() - began > 2 * STALL_S, "the work should have taken longer than the stall deadline"
        assert mine.count >= 5, "heartbeats must advance the caller's own progress"

    world.run(main)


def test_a_followed_counter_is_told_to_the_caller(world: HttpWorld) -> None:
    async def main() -> None:
        jobs = [0]

        async def queued(frame: Frame, progress: Progress) -> Frame:
            progress.follow(lambda: jobs[0])
            for _ in range(6):
                await asyncio.sleep(STALL_S / 3)
                jobs[0] += 1
            return frame

        server, client = await world.transport(queued), await world.transport()
        assert same(await client.call(server.address, Frame(Ack()), stall_s=STALL_S), Frame(Ack()))

    world.run(main)


def test_a_server_counts_the_bytes_of_large_requests_and_answers_that_it_serves(world: HttpWorld) -> None:
    """What a handler that waits for others' requests follows; heartbeats and short requests are no movement."""

    async def main() -> None:
        server, client = await world.transport(), await world.transport()
        for _ in range(50):
            await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        assert server.served.count == 0
        frame = tensor_frame(2**20)
        await client.call(server.address, frame, stall_s=PATIENT_S)
        assert await settled(lambda: server.served.num_bytes >= 2 * 2**20)
        assert server.served.num_bytes < 2 * 2**20 + 2 * 4096
        assert client.served.num_bytes == 0

    world.run(main)


def test_a_hung_handler_behind_a_lively_loop_is_stalled_within_the_bound(world: HttpWorld) -> None:
    async def main() -> None:
        server, client = await world.transport(forever), await world.transport()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(Stalled, match=r"ack to .*nothing advanced for 0.6 s"):
            await client.call(server.address, Frame(Ack()), stall_s=STALL_S)
        assert STALL_S <= loop.time() - began < STALL_S + 1.0

    world.run(main)


@pytest.mark.parametrize("gives_up", ["cancelled", "stalled"])
def test_a_caller_that_gives_up_cancels_the_handler(world: HttpWorld, gives_up: str) -> None:
    async def main() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(frame: Frame, progress: Progress) -> Frame:
            began.set()
            try:
                return await forever(frame, progress)
            finally:
                cancelled.set()

        server, client = await world.transport(handler), await world.transport()
        call = asyncio.create_task(client.call(server.address, Frame(Ack()), stall_s=STALL_S))
        await began.wait()
        if gives_up == "cancelled":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            with pytest.raises(Stalled):
                await call
        async with asyncio.timeout(2):
            await cancelled.wait()
        assert await settled(lambda: server.held_bytes == 0)

    world.run(main)


async def settled(condition: Callable[[], bool]) -> bool:
    for _ in range(200):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_nobody_there_is_unreachable_quickly(world: HttpWorld) -> None:
    async def main() -> None:
        client = await world.transport()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(Unreachable):
            await client.call(world.nobody(), Frame(Ack()), stall_s=PATIENT_S)
        assert loop.time() - began < CONNECT_S

    world.run(main)


def test_a_taken_address_is_a_configuration_error_that_names_it(world: HttpWorld) -> None:
    async def main() -> None:
        server = await world.transport()
        with pytest.raises(ConfigError, match=str(server.address)):
            await world.at(server.address).start(echo)

    world.run(main)


def test_a_server_that_closes_breaks_the_link_and_is_then_unreachable(world: HttpWorld) -> None:
    async def main() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(frame: Frame, progress: Progress) -> Frame:
            began.set()
            try:
                return await forever(frame, progress)
            finally:
                cancelled.set()

        server, client = await world.transport(handler), await world.transport()
        call = asyncio.create_task(client.call(server.address, Frame(Ack()), stall_s=PATIENT_S))
        await began.wait()
        await server.close()
        assert cancelled.is_set(), "close returns once the running handlers have ended"
        with pytest.raises(LinkBroken):
            await call
        with pytest.raises(LinkError):
            await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)

    world.run(main)


def test_closing_ones_own_transport_ends_ones_calls(world: HttpWorld) -> None:
    async def main() -> None:
        server, client = await world.transport(forever), await world.transport()
        call = asyncio.create_task(client.call(server.address, Frame(Ack()), stall_s=PATIENT_S))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(LinkBroken):
            await call
        with pytest.raises(Unreachable):
            await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)

    world.run(main)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ValueError("two\nlines"), "failed", "ValueError: two lines"),
        (Stalled("downstream"), "failed", "Stalled: downstream"),
        (TimeoutError(), "failed", "TimeoutError:"),
        (asyncio.CancelledError(), "failed", "its work was cancelled"),
        (RemoteRefused("no_candidate", "stage 2"), "no_candidate", "stage 2"),
    ],
)
def test_a_handlers_failure_is_a_refusal(world: HttpWorld, error: BaseException, code: str, reason: str) -> None:
    async def main() -> None:
        errors: list[BaseException] = [error]

        async def handler(frame: Frame, progress: Progress) -> Frame:
            if errors:
                raise errors.pop()
            return frame

        server, client = await world.transport(handler), await world.transport()
        reply = await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        assert reply.message == Refusal(code=code, reason=reason)
        assert same(await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S), Frame(Ack()))

    world.run(main)


def test_a_handlers_reply_that_does_not_fit_its_specs_is_a_refusal(world: HttpWorld) -> None:
    async def main() -> None:
        async def handler(frame: Frame, progress: Progress) -> Frame:
            return Frame(tensor_frame(4).message, (b"12345",))

        server, client = await world.transport(handler), await world.transport()
        reply = await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        assert reply.message.code == "failed"

    world.run(main)


def test_requests_over_a_bound_are_refused_and_the_next_one_works(world: HttpWorld) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def handler(frame: Frame, progress: Progress) -> Frame:
            await release.wait()
            return Frame(Ack())

        bounds = Bounds(max_body_bytes=2**20, max_inflight_bytes=2**21, max_open_requests=4)
        server = await world.transport(handler, bounds=bounds)
        client = await world.transport()
        refused = await client.call(server.address, tensor_frame(2 * 2**20), stall_s=PATIENT_S)
        assert refused.message.code == "bad_request"
        assert "over this peer's limit of 1048576" in refused.message.reason

        held = [asyncio.create_task(client.call(server.address, tensor_frame(900_000), stall_s=PATIENT_S)) for _ in range(2)]
        assert await settled(lambda: server.held_bytes > 1_800_000)
        refused = await client.call(server.address, tensor_frame(900_000), stall_s=PATIENT_S)
        assert refused.message.code == "busy", "a third body would be over max_inflight_bytes"

        held += [asyncio.create_task(client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        assert refused.message == Refusal(code="busy", reason="4 requests are open")

        release.set()
        for reply in await asyncio.gather(*held):
            assert reply.message == Ack()
        assert (await client.call(server.address, tensor_frame(900_000), stall_s=PATIENT_S)).message == Ack()
        assert await settled(lambda: server.held_bytes == 0)

    world.run(main)


def test_nothing_is_left_after_many_calls(world: HttpWorld) -> None:
    async def main() -> None:
        server, client = await world.transport(), await world.transport()
        for _ in range(20):
            await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        gc.collect()
        before = len(asyncio.all_tasks())
        for _ in range(100):
            await client.call(server.address, Frame(Ack()), stall_s=PATIENT_S)
        assert await settled(lambda: len(asyncio.all_tasks()) <= before)

    world.run(main)
