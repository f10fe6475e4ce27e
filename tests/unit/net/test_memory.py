"""The faults that the in-memory network can inject, and that the same seed gives the same schedule."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from swarm.base.errors import LinkBroken, LinkError, Stalled, Unreachable
from swarm.base.ids import Address
from swarm.net.transport import Handler, Progress
from swarm.testing.memory_transport import MemoryNetwork, MemoryTransport
from swarm.testing.virtual_time import run_virtual
from swarm.wire.framing import Frame
from swarm.wire.messages import Ack, StateChunk, TensorSpec

A, B = Address("a", 1), Address("b", 1)


def chunk(num_bytes: int) -> Frame:
    return Frame(StateChunk(tensors=(TensorSpec(name="x", dtype="uint8", shape=(num_bytes,)),)), (bytes(num_bytes),))


class Counting:
    """A handler that works for a while and counts what happened to it."""

    def __init__(self, work_s: float = 0.1, advance_s: float = 0.05) -> None:
        self.work_s = work_s
        self.advance_s = advance_s
        self.began = self.ended = self.cancelled = 0

    async def __call__(self, frame: Frame, progress: Progress) -> Frame:
        self.began += 1
        try:
            until = now() + self.work_s
            while now() < until:
                await asyncio.sleep(self.advance_s)
                progress.advance()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.ended += 1
        return Frame(Ack())


def now() -> float:
    return asyncio.get_running_loop().time()


async def pair(network: MemoryNetwork, handler: Handler) -> MemoryTransport:
    """Start `handler` at B, and return a transport at A."""
    client = MemoryTransport(network, A)
    await client.start(handler)
    await MemoryTransport(network, B).start(handler)
    return client


def simulate(scenario: Callable[[MemoryNetwork], Awaitable[Any]], **faults: float) -> MemoryNetwork:
    network = MemoryNetwork(random.Random(7), **faults)

    async def main() -> None:
        await scenario(network)

    run_virtual(main())
    return network


async def outcome(call: Awaitable[Frame]) -> str:
    try:
        return (await call).message.kind
    except LinkError as error:
        return type(error).__name__


def test_a_dropped_request_never_arrives_and_its_caller_is_stalled() -> None:
    handler = Counting()

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        with pytest.raises(Stalled):
            await client.call(B, Frame(Ack()), stall_s=3)
        assert now() == pytest.approx(3)

    network = simulate(scenario, drop=1.0)
    assert (handler.began, network.injected["drop"]) == (0, 1)


def test_a_dropped_reply_was_handled_and_its_caller_cannot_know() -> None:
    handler = Counting()

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        seen = [await outcome(client.call(B, Frame(Ack()), stall_s=3)) for _ in range(40)]
        assert set(seen) == {"LinkBroken", "Stalled"}
        assert min(seen.count("LinkBroken"), seen.count("Stalled")) > 10

    network = simulate(scenario, drop_reply=1.0)
    assert handler.ended == network.injected["drop_reply"] == 40


def test_a_duplicated_request_is_handled_twice_and_answered_once() -> None:
    handler = Counting()

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        assert (await client.call(B, Frame(Ack()), stall_s=3)).message == Ack()
        await asyncio.sleep(1)

    network = simulate(scenario, duplicate=1.0)
    assert (handler.ended, network.injected["duplicate"]) == (2, 1)


def test_jitter_reorders_requests() -> None:
    order: list[int] = []

    async def handler(frame: Frame, progress: Progress) -> Frame:
        order.append(frame.body_bytes)
        return Frame(Ack())

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        await asyncio.gather(*(client.call(B, chunk(i), stall_s=3) for i in range(20)))

    simulate(scenario, jitter_s=0.1)
    assert sorted(order) == list(range(20)) != order


def test_latency_and_bandwidth_take_their_time_and_a_moving_body_never_stalls() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, Counting(work_s=0))
        network.link(A, B, bytes_per_s=1000)
        await client.call(B, chunk(1_200_000), stall_s=3)
        assert now() == pytest.approx(1200, rel=0.01), "20 minutes on a slow but moving link"

    simulate(scenario, latency_s=0.1)


def test_a_link_slower_than_16_kib_in_30_s_is_stalled() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, Counting(work_s=0))
        network.link(A, B, bytes_per_s=100)
        with pytest.raises(Stalled, match="a transfer brought"):
            await client.call(B, chunk(1_200_000), stall_s=8)
        assert now() == pytest.approx(30, abs=1)

    simulate(scenario)


def test_a_cut_link_is_unreachable_and_works_once_healed() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, Counting())
        network.cut(A, B)
        with pytest.raises(Unreachable):
            await client.call(B, Frame(Ack()), stall_s=3)
        assert now() == pytest.approx(2), "connect_s"
        network.heal(A, B)
        assert (await client.call(B, Frame(Ack()), stall_s=3)).message == Ack()

    simulate(scenario)


@pytest.mark.parametrize(("source", "target", "ended"), [(A, B, 1), (B, A, 0)])
def test_a_one_way_cut_stalls_the_caller_whichever_way_it_is(source: Address, target: Address, ended: int) -> None:
    handler = Counting(work_s=5)

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        call = asyncio.create_task(outcome(client.call(B, Frame(Ack()), stall_s=3)))
        await asyncio.sleep(1)
        network.cut(source, target, one_way=True)
        if (source, target) == (A, B):
            assert await call == "ack", "heartbeats and reply still come through"
        else:
            assert await call == "Stalled"
        await asyncio.sleep(10)

    simulate(scenario)
    assert handler.ended == ended, "a caller's hanging up reaches the server only if its direction is open"


def test_a_short_cut_delays_what_is_on_its_way() -> None:
    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, Counting(work_s=1))
        call = asyncio.create_task(outcome(client.call(B, Frame(Ack()), stall_s=3)))
        await asyncio.sleep(0.5)
        network.cut(A, B)
        await asyncio.sleep(2)
        network.heal(A, B)
        assert await call == "ack"

    simulate(scenario)


def test_a_crash_cancels_handlers_breaks_links_and_lets_a_new_peer_take_the_address() -> None:
    handler = Counting(work_s=60)

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        call = asyncio.create_task(client.call(B, Frame(Ack()), stall_s=3))
        await asyncio.sleep(5)
        network.crash(B)
        with pytest.raises(LinkBroken, match="crashed"):
            await call
        assert (handler.cancelled, now()) == (1, pytest.approx(5, abs=0.01))
        with pytest.raises(Unreachable):
            await client.call(B, Frame(Ack()), stall_s=3)
        await MemoryTransport(network, B).start(Counting())
        assert (await client.call(B, Frame(Ack()), stall_s=3)).message == Ack()

    simulate(scenario)


def test_the_crash_of_a_caller_cancels_its_work_elsewhere() -> None:
    handler = Counting(work_s=60)

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        call = asyncio.create_task(client.call(B, Frame(Ack()), stall_s=3))
        await asyncio.sleep(5)
        network.crash(A)
        with pytest.raises(LinkBroken):
            await call
        await asyncio.sleep(0.1)
        assert handler.cancelled == 1
        with pytest.raises(Unreachable):
            await client.call(B, Frame(Ack()), stall_s=3)

    simulate(scenario)


def test_a_paused_peer_accepts_and_does_nothing_until_it_is_resumed() -> None:
    handler = Counting()

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        network.pause(B)
        patient = asyncio.create_task(client.call(B, Frame(Ack()), stall_s=60))
        with pytest.raises(Stalled):
            await client.call(B, Frame(Ack()), stall_s=3)
        assert handler.began == 0
        await asyncio.sleep(20)
        network.resume(B)
        assert (await patient).message == Ack()
        assert now() == pytest.approx(23.1, abs=0.1)

    simulate(scenario)


def test_a_peer_paused_at_work_sends_neither_heartbeats_nor_its_reply() -> None:
    handler = Counting(work_s=5)

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        impatient = asyncio.create_task(outcome(client.call(B, Frame(Ack()), stall_s=3)))
        patient = asyncio.create_task(outcome(client.call(B, Frame(Ack()), stall_s=60)))
        await asyncio.sleep(1)
        network.pause(B)
        assert await impatient == "Stalled"
        assert now() == pytest.approx(4, abs=0.6)
        await asyncio.sleep(20)
        assert not patient.done()
        network.resume(B)
        assert await patient == "ack"

    simulate(scenario)


def test_a_paused_peer_calls_nobody() -> None:
    handler = Counting(work_s=0)

    async def scenario(network: MemoryNetwork) -> None:
        client = await pair(network, handler)
        network.pause(A)
        call = asyncio.create_task(client.call(B, Frame(Ack()), stall_s=3))
        await asyncio.sleep(30)
        assert handler.began == 0
        network.resume(A)
        assert (await call).message == Ack()

    simulate(scenario)


def schedule(seed: int) -> tuple[list[tuple[float, int]], dict[str, int]]:
    """What arrives when, in a busy simulation with every fault."""
    network = MemoryNetwork(random.Random(seed), jitter_s=0.05, drop=0.1, drop_reply=0.1, duplicate=0.1, bytes_per_s=10_000)
    arrivals: list[tuple[float, int]] = []

    async def main() -> None:
        async def handler(frame: Frame, progress: Progress) -> Frame:
            arrivals.append((now(), frame.body_bytes))
            await asyncio.sleep(0.2)
            return Frame(Ack())

        peers = [MemoryTransport(network, Address(f"peer{i}", 1)) for i in range(5)]
        for peer in peers:
            await peer.start(handler)
        calls = [outcome(peers[i % 5].call(peers[(i * i + 1) % 5].address, chunk(i * 10), stall_s=2)) for i in range(100)]
        running = asyncio.gather(*calls)
        await asyncio.sleep(0.05)
        network.cut(peers[0].address, peers[1].address)
        network.crash(peers[2].address)
        network.pause(peers[3].address)
        await asyncio.sleep(1)
        network.resume(peers[3].address)
        await running

    run_virtual(main())
    return arrivals, dict(network.injected)


def test_the_same_seed_gives_the_same_schedule() -> None:
    arrivals, injected = schedule(7)
    assert (arrivals, injected) == schedule(7)
    assert arrivals != schedule(8)[0]
    assert min(injected.values()) > 0, "every fault took part"
