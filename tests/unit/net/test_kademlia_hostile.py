"""What a hostile node can do to an honest one: nothing that lasts. The real code, in virtual time.

Every question is fuzzed; ids, addresses, records and floods are forged, replayed and repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import pytest
import umsgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.net.kademlia import wire
from swarm.net.kademlia.answers import NUM_ARGUMENTS
from swarm.net.kademlia.calls import UnknownNode
from swarm.net.kademlia.known_addresses import prove
from swarm.net.kademlia.record_storage import RecordStorage, RecordVerifier, StorageLimits
from swarm.wire.peer_records import PeerRecord, SignedRecord
from tests.unit.net.kademlia_nodes import KEY, ask, close, fabric, make, protocol, run, signed, spawn

HOME = ("10.9.9.9", 9)


def question(name: Any, *args: Any, token: Any = b"", prove: Any = False, message_id: bytes = bytes(20)) -> bytes:
    return b"\x00" + message_id + umsgpack.packb([name, token, prove, list(args)])


async def sent_to(address: tuple[str, int]) -> list[bytes]:
    """Datagrams that arrive at an address where nobody answers."""
    arrived: list[bytes] = []

    class Sink(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            arrived.append(data)

    await fabric().create_datagram_endpoint(Sink, sock=fabric().bound_socket(*address))
    return arrived


# ------------------------------------------------------------------ every question, fuzzed

anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=20),
        st.binary(max_size=40),
        st.binary(min_size=20, max_size=20),
        st.sampled_from(["", KEY, b"", bytes(20)]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
records = st.tuples(st.binary(max_size=40), st.binary(max_size=1200), st.binary(max_size=80), st.integers(-5, 2**40))


@pytest.mark.parametrize("name", sorted(NUM_ARGUMENTS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_argument_of_any_question_does_harm(name, data):
    argument = anything | records.map(list)
    same_number = st.lists(argument, min_size=NUM_ARGUMENTS[name], max_size=NUM_ARGUMENTS[name])
    calls = data.draw(st.lists(same_number | st.lists(argument, max_size=5), min_size=1, max_size=8))

    async def main() -> None:
        [node] = await spawn(1)
        token = protocol(node)._tokens.give(HOME)
        for args in calls:
            datagram = question(name, bytes(20), *args, token=token)
            protocol(node).datagram_received(datagram, HOME)
            protocol(node).datagram_received(datagram[:-1], HOME)
        assert node.statistics()["records"] == 0
        assert max(fabric().endpoints[node.address].sent_sizes, default=0) < wire.MAX_DATAGRAM_BYTES
        await close(node)

    run(main())


@settings(max_examples=60, deadline=None)
@given(bodies=st.lists(anything | st.binary(max_size=300), min_size=len(NUM_ARGUMENTS), max_size=len(NUM_ARGUMENTS)))
def test_no_answer_does_harm(bodies):
    async def main() -> None:
        node, liar = await spawn(2)
        for name, body in zip(sorted(NUM_ARGUMENTS), bodies, strict=True):
            protocol(liar)._handlers[name] = lambda *_, body=body: body
        assert await node.publish(KEY, signed(0)) in (1, 2)
        assert [record.peer for record in await node.lookup(KEY)] == [signed(0).peer]
        await asyncio.sleep(40)
        assert node.statistics().get("failed_tasks", 0) == 0
        await close(node, liar)

    run(main())


# ------------------------------------------------------------------ ids


def test_who_cannot_prove_an_id_is_no_contact_and_its_answers_do_not_count():
    async def main() -> None:
        victim, thief, node = await spawn(3)
        stolen = victim._running.node.id
        await close(victim)
        protocol(thief).source_node.id = stolen  # it answers under the id, and signs with its own key
        newcomer = make(7)
        await newcomer.start([thief.address])
        assert newcomer.statistics()["contacts"] == 0
        assert newcomer.statistics()["refused_unproven_id"] >= 1
        assert await protocol(newcomer).call_ping(UnknownNode(*thief.address)) is None
        await close(thief, node, newcomer)

    run(main())


def test_a_proof_made_for_another_is_refused_though_it_is_genuine():
    async def main() -> None:
        node, honest = await spawn(2)
        identity = honest._identity
        content = wire.pack_answer(honest._running.node.id, bytes(8), wire.pack_address("10.0.0.1", 1))
        old = prove(identity.private_key, bytes(20), node._running.node.id, content)
        mallory = make(66)
        await mallory.start([])
        protocol(mallory)._sign = lambda message_id, *_: wire.PROVEN_REPLY + message_id + content + old
        assert await protocol(node).call_ping(UnknownNode(*mallory.address)) is None
        contact = protocol(node).router.contact(honest._running.node.id)
        assert contact is not None
        assert contact.port == honest.address.port, "the honest node is still known where it lives"
        await close(node, honest, mallory)

    run(main())


def test_an_id_is_proven_once_and_costs_nothing_later():
    async def main() -> None:
        nodes = await spawn(4)
        await asyncio.sleep(5)
        before = sum(node.statistics()["proven_ids"] for node in nodes)
        for _ in range(5):
            for seed, node in enumerate(nodes):
                await node.publish(KEY, signed(seed))
                await node.lookup(KEY)
        assert before == sum(node.statistics()["proven_ids"] for node in nodes) == 4 * 3
        await close(*nodes)

    run(main())


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize("name", ["find_node", "find_value", "ping", "store"])
def test_nobody_is_flooded_in_anothers_name(name):
    async def main() -> None:
        nodes = await spawn(12)
        for seed in range(30):
            await nodes[0].publish(KEY, signed(seed))
        arrived = await sent_to(HOME)
        record = wire.pack_record(signed(99), 5.0)
        args = {"find_node": [bytes(20)], "find_value": [KEY, b"", True], "ping": [], "store": [KEY, record]}[name]
        num_bytes = 0
        for number in range(20):
            spoofed = question(name, random.Random(number).randbytes(20), *args, prove=True)
            num_bytes += len(spoofed)
            protocol(nodes[0]).datagram_received(spoofed, HOME)
            await asyncio.sleep(2)
        assert arrived
        assert sum(map(len, arrived)) <= 4.5 * num_bytes, "about three times what came, and one sign of life asked for"
        assert nodes[0].statistics()["records"] == 30, "nothing is stored for an address that was not shown to be real"
        await close(*nodes)

    run(main())


def test_a_token_is_demanded_once_and_then_shown():
    async def main() -> None:
        asker, asked = await spawn(2)
        for seed in range(30):
            await asked.publish(KEY, signed(seed))
        protocol(asker).known.of(tuple(asked.address)).token = bytes(8)  # the asked one has restarted, say
        before = asked.statistics().get("tokens_demanded", 0)
        assert len(await asker.lookup(KEY)) == 30
        assert asked.statistics()["tokens_demanded"] == before + 1
        assert asker.statistics()["renewed_requests"] >= 1
        await close(asker, asked)

    run(main())


def test_a_node_that_always_demands_another_token_gets_no_more():
    async def main() -> None:
        asker, liar = await spawn(2)
        protocol(liar)._handlers["find_value"] = lambda *_: None
        started = fabric().time()
        assert await ask(asker, liar, "find_value", KEY, b"", True) is None
        assert fabric().time() - started < 0.5
        assert liar.statistics()["served_find_value"] == 3
        await close(asker, liar)

    run(main())


# ------------------------------------------------------------------ records


def test_bad_records_are_refused_where_they_arrive_and_counted_by_reason():
    async def main() -> None:
        node, evil = await spawn(2)
        good = signed(3, sequence=5)
        shown = wire.pack_record
        cases = {
            "forged": [KEY, shown(SignedRecord(good.public_key, good.payload, bytes(64)), 5.0)],
            "oversize": [KEY, shown(SignedRecord(good.public_key, bytes(1001), good.signature), 5.0)],
            "malformed": [KEY, shown(SignedRecord(good.public_key[:31], good.payload, good.signature), 5.0)],
            "expired": [KEY, shown(good, 0.0)],
        }
        for reason, args in cases.items():
            assert await ask(evil, node, "store", *args) == reason
        assert await ask(evil, node, "store", KEY, shown(good, 600.0)) == ""
        assert await ask(evil, node, "store", KEY, shown(signed(3, sequence=4), 600.0)) == "old_sequence", "replayed"
        statistics = node.statistics()
        assert [statistics[f"refused_{reason}"] for reason in (*cases, "old_sequence")] == [1] * 5
        assert statistics["records"] == 1
        await close(node, evil)

    run(main())


def test_a_sender_of_forged_records_is_soon_not_verified_any_more_and_others_are():
    async def main() -> None:
        node, evil, honest = await spawn(3)
        good = signed(3)
        bad = wire.pack_record(SignedRecord(good.public_key, good.payload, bytes(64)), 5.0)
        answers = Counter([await ask(evil, node, "store", KEY, bad) for _ in range(200)])
        assert 64 <= answers["forged"] < 100
        assert answers["rate_limited"] == 200 - answers["forged"]
        assert node.statistics()["refused_rate_limited"] == answers["rate_limited"]
        assert await ask(honest, node, "store", KEY, wire.pack_record(good, 5.0)) == ""
        await asyncio.sleep(60)
        assert await ask(evil, node, "store", KEY, wire.pack_record(signed(4), 5.0)) == "", "it is forgiven"
        await close(node, evil, honest)

    run(main())


class TrustingVerifier(RecordVerifier):
    """Leaves the signature out, which would take a minute for 100,000 records."""

    def verify(self, key: str, signed: SignedRecord) -> PeerRecord:
        return PeerRecord.model_validate_json(signed.payload)


def test_100_000_records_of_one_writer_stay_within_its_bound():
    counters: Counter[str] = Counter()
    limits = StorageLimits(per_writer=64)
    store = RecordStorage(now=lambda: 5.0, verifier=TrustingVerifier(), limits=limits, counters=counters)
    record = signed(1)
    reasons: Counter[str] = Counter()
    for number in range(100_000):
        reasons[store.put(f"key {number}", record, 600.0, "10.0.0.1")] += 1
    assert reasons == {"": 64, "full": 100_000 - 64}
    assert counters["refused_full"] == 100_000 - 64
    assert store.num_records == 64
    assert len(store._expiries) <= 2 * 64 + 65
    for sequence in range(2000):
        newer = SignedRecord(record.public_key, record.payload.replace(b'"sequence":1', b'"sequence":%d' % (sequence + 2)), b"")
        assert store.put("key 0", newer, 600.0, "10.0.0.1") == ""
    assert store.num_records == 64
    assert sum(map(len, store._from.values())) == 64


def test_one_source_with_many_identities_crowds_out_only_itself():
    async def main() -> None:
        limits = StorageLimits(per_key=32)
        nodes = [make(seed, host=f"10.0.0.{seed + 1}", limits=limits) for seed in range(4)]
        for node in nodes:
            await node.start([nodes[0].address] if node is not nodes[0] else [])
        target, evil, *honest = nodes
        for seed in range(100, 150):  # long lives, so that they are never the first to expire
            await ask(evil, target, "store", KEY, wire.pack_record(signed(seed, ttl_s=3600.0), 3600.0))
        assert target.statistics()["records"] == 32
        for seed, node in enumerate(honest):
            assert await ask(node, target, "store", KEY, wire.pack_record(signed(seed, ttl_s=30.0), 30.0)) == ""
        for seed in range(150, 200):
            await ask(evil, target, "store", KEY, wire.pack_record(signed(seed, ttl_s=3600.0), 3600.0))
        held = {held.record.peer for held in target._running.storage[KEY]}
        assert {signed(0).peer, signed(1).peer} <= held, "short lives of others outlast a flood of long ones"
        await close(*nodes)

    run(main())


def test_the_whole_storage_is_shared_fairly_too():
    counters: Counter[str] = Counter()
    store = RecordStorage(now=lambda: 5.0, verifier=RecordVerifier(), limits=StorageLimits(total=20), counters=counters)
    for seed in range(40):
        store.put(f"evil {seed}", signed(seed, key=f"evil {seed}", ttl_s=3600.0), 3600.0, "10.6.6.6")
    for seed in range(5):
        assert store.put(f"good {seed}", signed(seed, key=f"good {seed}"), 60.0, f"10.0.0.{seed}") == ""
    for seed in range(40, 80):
        store.put(f"evil {seed}", signed(seed, key=f"evil {seed}", ttl_s=3600.0), 3600.0, "10.6.6.6")
    assert store.num_records == 20
    assert all(store.get(f"good {seed}") for seed in range(5))


def test_nothing_of_all_this_is_logged_as_an_error(caplog):
    async def main() -> None:
        [node] = await spawn(1)
        for number in range(300):
            protocol(node).datagram_received(random.Random(number).randbytes(number), HOME)
            protocol(node).datagram_received(question("ping", bytes(20), number), HOME)
        await close(node)

    with caplog.at_level(logging.DEBUG, logger="swarm"):
        run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
