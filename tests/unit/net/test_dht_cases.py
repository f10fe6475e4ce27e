"""Cases from the field, by their number, as far as discovery is concerned: the real code in virtual time.

Case 6's relay, and case 20's mutating requests, belong to the transport; here is what the DHT owes to them.
"""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from swarm.net.identity import Identity
from swarm.net.kademlia import wire
from swarm.net.kademlia.server import ServerTiming
from swarm.wire.peer_records import MAX_RECORD_BYTES, PeerRecord, SignedRecord
from tests.unit.net.kademlia_nodes import KEY, ask, close, fabric, make, protocol, run, signed, spawn


def test_case_1_a_dead_peers_record_dies_at_its_time_however_often_others_hand_it_on():
    async def main() -> None:
        nodes = await spawn(10, timing=ServerTiming(refresh_s=4.0))
        await nodes[0].publish(KEY, signed(0, ttl_s=30.0))
        published_at = fabric().time()
        await nodes[0].close()
        last_seen_at, number = 0.0, 100
        while fabric().time() < published_at + 60:
            for node in nodes[1:]:
                if await node.lookup(KEY):
                    last_seen_at = fabric().time()
            if number < 106:  # and newcomers are given copies all the while
                newcomer = make(number, timing=ServerTiming(refresh_s=4.0))
                await newcomer.start([nodes[1].address])
                nodes.append(newcomer)
                number += 1
            await asyncio.sleep(1)
        assert sum(node.statistics().get("handed_over", 0) for node in nodes[1:]) > 10, "it was handed on"
        assert published_at + 28 < last_seen_at < published_at + 32
        assert all(node.statistics()["records"] == 0 for node in nodes[1:])
        await close(*nodes[1:])

    run(main())


def test_case_2_a_set_larger_than_a_datagram_is_paged_and_none_is_dropped():
    async def main() -> None:
        nodes = await spawn(3)
        for seed in range(150):
            assert await nodes[seed % 3].publish(KEY, signed(seed)) == 3
        for node in nodes:
            assert {record.peer for record in await node.lookup(KEY)} == {signed(seed).peer for seed in range(150)}
        sizes = [size for endpoint in fabric().endpoints.values() for size in endpoint.sent_sizes]
        assert max(sizes) < wire.MAX_DATAGRAM_BYTES
        await close(*nodes)

    run(main())


def test_case_2_an_over_long_record_is_refused_at_publish_naming_key_and_size():
    async def main() -> None:
        [node] = await spawn(1)
        identity = Identity.ephemeral(random.Random(0))
        record = PeerRecord(
            peer=identity.peer_id, incarnation="0" * 16, role="stage", host="\U0001f40d" * 255, port=1, ttl_s=1, sequence=1
        )
        with pytest.raises(ValueError, match=rf"{KEY}.* has \d{{4}} bytes, the limit is {MAX_RECORD_BYTES}"):
            identity.sign_record(KEY, record)
        good = signed(0)
        with pytest.raises(ValueError, match=rf"{KEY}.* has 2096 bytes, the limit is {MAX_RECORD_BYTES}"):
            await node.publish(KEY, SignedRecord(good.public_key, bytes(2000), good.signature))
        assert node.statistics()["records"] == 0
        await close(node)

    run(main())


def test_case_3_hundreds_of_dead_contacts_in_a_bootstrap_node_are_pruned_and_lookups_stay_fast():
    async def main() -> None:
        nodes = await spawn(6)
        for dead in range(400):
            protocol(nodes[0]).router.heard_from(random.Random(1000 + dead).randbytes(20), "10.9.9.9", 1 + dead)
        await nodes[1].publish(KEY, signed(1))
        newcomer = make(50)
        started = fabric().time()
        await newcomer.start([nodes[0].address])
        for node in (nodes[0], newcomer, nodes[3]):
            assert len(await node.lookup(KEY)) == 1
        assert fabric().time() - started < 4
        await asyncio.sleep(90)
        assert [node.statistics()["contacts"] for node in (*nodes, newcomer)] == [6] * 7
        await close(*nodes, newcomer)

    run(main())


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
def test_case_4_a_peer_whose_clock_is_an_hour_off_changes_nothing(offset_s):
    async def main() -> None:
        loop = fabric()
        nodes = [make(seed, clock=(lambda: loop.time() + offset_s) if seed == 1 else None) for seed in range(3)]
        for node in nodes:
            await node.start([nodes[0].address] if node is not nodes[0] else [])
        for seed, node in enumerate(nodes):
            await node.publish(KEY, signed(seed, ttl_s=20.0))
        await asyncio.sleep(19)
        assert [len(await node.lookup(KEY)) for node in nodes] == [3, 3, 3]
        await asyncio.sleep(2)
        assert [len(await node.lookup(KEY)) for node in nodes] == [0, 0, 0]
        await close(*nodes)

    run(main())


def test_case_5_a_restarted_peer_has_its_identity_and_leaves_no_ghost(tmp_path):
    async def main() -> None:
        nodes = await spawn(5)
        for life in (1, 2, 3):
            identity = Identity.load_or_create(tmp_path / "identity.json")
            node = make(0, contacts_path=tmp_path / "contacts.json")
            node._identity = identity
            await node.start([nodes[0].address])
            record = PeerRecord(
                peer=identity.peer_id,
                incarnation=f"{life:016x}",
                role="stage",
                host="h",
                port=life,
                ttl_s=600.0,
                sequence=identity.next_sequence(),
            )
            await node.publish(KEY, identity.sign_record(KEY, record))
            for reader in (*nodes, node):
                [found] = await reader.lookup(KEY)
                assert (found.port, found.incarnation) == (life, f"{life:016x}"), "no ghost of an earlier life"
            await asyncio.sleep(2)
            for other in nodes:
                contact = protocol(other).router.contact(bytes.fromhex(identity.peer_id))
                assert contact is not None
                assert contact.port == node.address.port
            await node.close()
        await close(*nodes)

    run(main())


def test_case_6_who_cannot_be_reached_is_told_to_nobody():
    async def main() -> None:
        nodes = await spawn(3)
        hidden = make(9)
        await hidden.start([nodes[0].address])
        # From now on nothing gets in that was not asked for: its questions go out through changing ports.
        secret, home = random.Random(5).randbytes(20), hidden.address
        fabric().isolate([home])
        for port in range(10):
            for node in nodes:
                protocol(node).datagram_received(
                    b"\x00" + bytes(20) + wire.pack_request("find_node", b"", True, secret, (secret,), 467),
                    ("10.6.6.6", 5000 + port),
                )
        await asyncio.sleep(60)
        for node in nodes:
            assert {address.host for address in node.contacts()} == {"10.0.0.1"}
            assert home not in node.contacts()
            assert node.statistics()["contacts"] == 2
        await close(*nodes, hidden)

    run(main())


def test_case_20_forgers_are_refused_and_slowed_down_and_fill_no_log(caplog):
    async def main() -> None:
        node, outsider = await spawn(2)
        good = signed(3)
        forged = wire.pack_record(SignedRecord(good.public_key, good.payload, bytes(64)), 5.0)
        answers = {await ask(outsider, node, "store", KEY, forged) for _ in range(200)}
        assert answers == {"forged", "rate_limited"}
        for _ in range(200):
            protocol(node).datagram_received(b"\x00" + bytes(60), ("10.9.9.9", 9))
        assert node.statistics()["records"] == 0
        assert node.statistics()["refused_forged"] < 100
        assert await node.publish(KEY, good) == 2
        await close(node, outsider)

    with caplog.at_level(logging.DEBUG, logger="swarm"):
        run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
