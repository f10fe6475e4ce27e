"""An aggregator by itself: what it answers to leaders and members, right or wrong, over real sockets and in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from swarm.averaging.reduction import Code, bytes_under_way
from swarm.base.config import RunConfig
from swarm.base.ids import Address, Ballot, new_incarnation
from swarm.net.exchange import Bounds
from swarm.net.http.transport import HttpTransport
from swarm.net.identity import Identity
from swarm.net.transport import Transport
from swarm.peer.aggregator import MAX_SENDERS, Aggregator
from swarm.peer.context import PeerContext
from swarm.peer.link import Link, RefusedBy
from swarm.stage.executor import Executor, InlineExecutor, ThreadExecutor
from swarm.testing.memory_dht import MemoryDht, MemoryDhtNetwork
from swarm.testing.memory_transport import MemoryNetwork, MemoryTransport
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor

torch.set_num_threads(1)

CONFIG = RunConfig(num_stages=2, auxiliaries=1)
NUM_MEMBERS = 3
LIMIT = 2**24


def context_of(transport: Transport, seed: int) -> PeerContext:
    rng = random.Random(seed)
    identity = Identity.ephemeral(rng)
    return PeerContext(
        config=CONFIG,
        config_bytes=CONFIG.to_bytes(),
        identity=identity,
        incarnation=new_incarnation(rng),
        transport=transport,
        dht=MemoryDht(MemoryDhtNetwork(rng), identity=identity, address=Address("nowhere", 1)),
        rng=rng,
        advertise_host=transport.address.host,
    )


class World:
    """One aggregator, and another peer that speaks for a leader and all members."""

    def __init__(self, here: Transport, there: Transport, executor: Executor) -> None:
        self.link, self.served = Link(context_of(here, 1)), Link(context_of(there, 2))
        self.aggregator = Aggregator(self.served, executor, limit_bytes=LIMIT)
        self.members = [m.Member(peer=f"{i:040x}", incarnation="0" * 16, host="somewhere", port=1) for i in range(NUM_MEMBERS)]

    async def start(self) -> None:
        await self.served.serve()
        await self.link.serve()

    async def close(self) -> None:
        self.aggregator.close()
        await self.served.context.transport.close()
        await self.link.context.transport.close()

    @property
    def target(self) -> m.Member:
        return self.served.context.member()

    def fields(self, n: int, **changes: Any) -> dict[str, Any]:
        attempt = m.Attempt(ballot=Ballot(1, "0" * 40), n=n)
        return {"run": self.link.context.run, "stage": 0, "step": 0, "attempt": attempt, **changes}

    async def assist(self, n: int, code: Code, num_elements: int, **changes: Any) -> m.Assisting:
        changes = {"vector": code.spec(num_elements, torch.float32), "num_members": NUM_MEMBERS, **changes}
        return (await self.link.ask(self.target, m.Assist(**self.fields(n, **changes)), m.Assisting))[0]

    async def reduce(self, n: int, shares: list[int], **changes: Any) -> m.Reduced:
        seals = [m.Seal(member=member, version_id="c" * 64) for member in self.members]
        changes = {"seals": seals, "shares": shares, "auxiliaries": [self.target], **changes}
        return (await self.link.ask(self.target, m.Reduce(**self.fields(n, **changes)), m.Reduced, stall_s=20.0))[0]

    async def slice(
        self, n: int, index: int, number: int, code: Code, values: torch.Tensor | None, **changes: Any
    ) -> torch.Tensor:
        spec, buffers = (), ()
        if values is not None:
            payload = code.encode(values)
            spec, buffers = (payload[0],), (payload[1],)  # type: ignore[assignment]
        changes = {"member": self.members[index], "number": number, "tensors": spec, **changes}
        request = m.Slice(**self.fields(n, **changes))
        _, frame = await self.link.ask(self.target, request, m.ReducedSlice, buffers=buffers, stall_s=20.0)
        return decode_tensor(*frame.only_tensor())


def over_http(main: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        limits: Any = {"bounds": Bounds(max_inflight_bytes=LIMIT), "heartbeat_s": 0.05}
        world = World(HttpTransport(), HttpTransport(**limits), ThreadExecutor("aggregate"))
        await world.start()
        try:
            async with asyncio.timeout(20):
                await main(world)
        finally:
            await world.close()

    asyncio.run(run())


def in_virtual_time(main: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        network = MemoryNetwork(random.Random(1))
        transports = [MemoryTransport(network, Address(name, 1)) for name in ("leader", "aggregator")]
        world = World(*transports, InlineExecutor(lambda priority: 0.001))
        await world.start()
        await main(world)
        await world.close()

    run_virtual(run())


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_it_reduces_a_slice_over_real_sockets(codec: str) -> None:
    """In chunks, of members that begin before it was told to; one of them has nothing to add."""
    code = Code(codec)  # type: ignore[arg-type]
    num_elements, mine = 2**20, 2**20 - 3000
    chunk = 2**14

    async def main(world: World) -> None:
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(num_elements, generator=generator) for _ in range(2)]
        offer = await world.assist(1, code, num_elements)
        assert offer.member == world.target
        assert offer.bandwidth is None
        starts = range(num_elements - mine, num_elements, chunk)

        async def member(index: int) -> list[torch.Tensor]:
            sums = []
            for number, start in enumerate(starts):
                part = values[index][start : start + chunk] if index < 2 else None
                sums.append(await world.slice(1, index, number, code, part))
            return sums

        members = [asyncio.create_task(member(index)) for index in range(NUM_MEMBERS)]
        await asyncio.sleep(0)
        reduced = await world.reduce(1, [1000, 1000, 1000, mine])
        assert reduced.reason == ""
        sums = await asyncio.gather(*members)
        for number, start in enumerate(starts):
            rounded = [decode_tensor(*code.encode(x[start : start + chunk])) for x in values]
            expected = decode_tensor(*code.encode(rounded[0] + rounded[1]))
            assert all(torch.equal(each[number], expected) for each in sums)
        assert world.aggregator.status()["attempts_helped"] == 1
        assert world.aggregator.status()["attempts_under_way"] == 0

    over_http(main)


async def refusal(asking: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(RefusedBy) as raised:
        await asking
    return raised.value.code, raised.value.reason


RAW = Code()


def test_it_helps_only_with_what_it_was_asked_for() -> None:
    async def main(world: World) -> None:
        one = torch.ones(1)
        assert (await refusal(world.reduce(1, [0, 0, 0, 4])))[0] == "wrong_state"
        assert (await refusal(world.slice(1, 0, 0, RAW, one)))[0] == "wrong_state"
        await world.assist(1, RAW, 4)
        for changes in ({"step": 1}, {"stage": 1}, {"attempt": m.Attempt()}):
            assert (await refusal(world.slice(1, 0, 0, RAW, one, **changes)))[0] == "wrong_state"
        assert (await refusal(world.slice(1, 0, 0, RAW, one)))[1] == "this peer was not told to start"

    in_virtual_time(main)


def test_an_average_that_cannot_be_summed_is_refused_before_memory_is_taken() -> None:
    sparse = Code("sparse4", 0.1)

    async def main(world: World) -> None:
        strange = [
            sparse.spec(4, torch.float32),
            RAW.spec(4, torch.float16),
            m.TensorSpec(name="slice", dtype="int64", shape=(4,), role="state"),
            m.TensorSpec(name="slice", dtype="float32", shape=(2, 2), role="state"),
        ]
        for vector in strange:
            code, reason = await refusal(world.assist(1, RAW, 4, vector=vector))
            assert code == "bad_request"
            assert "is no average that is summed here" in reason
        assert (await refusal(world.assist(1, RAW, 4, stage=2)))[0] == "wrong_stage"
        assert (await refusal(world.assist(1, RAW, 2**39, num_members=4)))[0] == "busy"
        assert (await refusal(world.assist(1, RAW, 4, num_members=MAX_SENDERS + 1)))[0] == "busy"

    in_virtual_time(main)


def test_all_attempts_together_stay_within_the_limit() -> None:
    async def main(world: World) -> None:
        num = NUM_MEMBERS
        while 2 * bytes_under_way(RAW, 2**30, torch.float32, num + 1) <= LIMIT:
            num += 1
        num_elements = 2**22
        while 2 * bytes_under_way(RAW, num_elements, torch.float32, num) <= LIMIT:
            num_elements *= 2
        await world.assist(1, RAW, num_elements, num_members=num)
        code, reason = await refusal(world.assist(1, RAW, num_elements, num_members=num, stage=1))
        assert code == "busy"
        assert f"the limit is {LIMIT}" in reason
        await world.assist(2, RAW, num_elements, num_members=num)  # a newer attempt takes the place of the one before
        await asyncio.sleep(CONFIG.timing.average_s + 1.0)
        await world.assist(1, RAW, num_elements, num_members=num, stage=1)  # what never began is forgotten

    in_virtual_time(main)


def test_the_attempt_must_be_as_its_leader_said() -> None:
    async def main(world: World) -> None:
        await world.assist(1, RAW, 4, num_members=2)
        assert "3 members, this peer was asked to help 2" in (await refusal(world.reduce(1, [0, 0, 0, 4])))[1]
        await world.assist(2, RAW, 4)
        assert (await refusal(world.reduce(2, [0, 0, 0, 4], auxiliaries=[])))[0] == "not_member"
        assert (await refusal(world.reduce(2, [0, 0, 0, 5])))[0] == "bad_request"
        assert (await refusal(world.reduce(2, [0, 0, 4])))[0] == "bad_request"
        reducing = asyncio.create_task(world.reduce(2, [0, 0, 0, 4]))
        await asyncio.sleep(0.1)
        assert (await refusal(world.reduce(2, [0, 0, 0, 4])))[1] == "this attempt has been started already"
        part = torch.ones(4)
        unknown_node = world.target
        assert (await refusal(world.slice(2, 0, 0, RAW, part, member=unknown_node)))[0] == "bad_request"
        unknown_node = unknown_node.model_copy(update={"peer": "f" * 40})
        assert (await refusal(world.slice(2, 0, 0, RAW, part, member=unknown_node)))[0] == "not_member"
        assert (await refusal(world.slice(2, 0, 0, RAW, part, phase=1)))[0] == "bad_request"
        assert (await refusal(world.slice(2, 0, 1, RAW, part)))[0] == "bad_request"
        for bad in (torch.ones(3), torch.ones(4, dtype=torch.float64)):
            assert (await refusal(world.slice(2, 0, 0, RAW, bad)))[0] == "bad_request"
        sums = await asyncio.gather(*(world.slice(2, index, 0, RAW, part) for index in range(NUM_MEMBERS)))
        assert all(torch.equal(each, torch.full((4,), 3.0)) for each in sums)
        assert (await reducing).reason == ""

    in_virtual_time(main)


def test_a_newer_attempt_ends_the_one_before_at_once() -> None:
    async def main(world: World) -> None:
        await world.assist(2, RAW, 4)
        reducing = asyncio.create_task(world.reduce(2, [0, 0, 0, 4]))
        waiting = asyncio.create_task(world.slice(2, 0, 0, RAW, torch.ones(4)))
        await asyncio.sleep(0.1)
        assert (await refusal(world.assist(1, RAW, 4)))[0] == "wrong_state", "an older leader"
        await world.assist(3, RAW, 4)
        assert (await reducing).reason == "a newer attempt began"
        assert await refusal(waiting) == ("failed", "a newer attempt began")

    in_virtual_time(main)


def test_who_is_waited_for_in_vain_is_named_while_the_others_are_patient() -> None:
    async def main(world: World) -> None:
        loop = asyncio.get_running_loop()
        await world.assist(1, RAW, 4)
        reducing = asyncio.create_task(world.reduce(1, [0, 0, 0, 4]))
        waiting = [asyncio.create_task(world.slice(1, index, 0, RAW, torch.ones(4))) for index in (0, 2)]
        reduced = await reducing
        assert reduced.suspects == (world.members[1],)
        assert loop.time() < CONFIG.timing.stall_s, "before members suspect this peer"
        name = world.members[1].peer[:8]
        for each in waiting:
            assert await refusal(each) == ("failed", f"no chunk of {name} came for 6.5 s")

    in_virtual_time(main)


def test_who_sends_no_numbers_is_named() -> None:
    async def main(world: World) -> None:
        await world.assist(1, RAW, 4)
        reducing = asyncio.create_task(world.reduce(1, [0, 0, 0, 4]))
        parts = [torch.ones(4), torch.full((4,), float("inf")), torch.ones(4)]
        replies = await asyncio.gather(*(world.slice(1, i, 0, RAW, part) for i, part in enumerate(parts)), return_exceptions=True)
        assert all(isinstance(reply, RefusedBy) for reply in replies)
        reduced = await reducing
        assert reduced.suspects == (world.members[1],)
        assert "is not finite" in reduced.reason

    in_virtual_time(main)


def test_one_that_leaves_helps_with_nothing_new() -> None:
    async def main(world: World) -> None:
        world.aggregator._leaving = True
        assert (await refusal(world.assist(1, RAW, 4)))[1] == "this peer leaves"

    in_virtual_time(main)
