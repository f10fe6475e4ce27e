"""Tokens, proofs and round trips one by one, and the file of contacts; time is a number here."""

from __future__ import annotations

import json
import os
import random

import pytest

from swarm.base.errors import StorageError
from swarm.base.ids import Address
from swarm.net.identity import Identity
from swarm.net.kademlia.contact_file import MAX_CONTACTS, ContactFile
from swarm.net.kademlia.known_addresses import (
    PROOF_BYTES,
    TOKEN_BYTES,
    AddressTokens,
    KnownAddresses,
    is_proven,
    prove,
    source_of,
)

NEAR, FAR = ("10.0.0.1", 1), ("10.9.9.9", 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def known(clock: Clock) -> KnownAddresses:
    return KnownAddresses(least_s=0.05, most_s=0.4, unknown_s=0.3, now=clock)


def test_before_any_answer_a_given_time_is_assumed():
    assert known(Clock()).lost_after_s(NEAR) == 0.3


def test_each_address_has_its_own_time_and_strangers_the_common_one():
    clock = Clock()
    addresses = known(clock)
    for _ in range(50):
        addresses.observe(NEAR, 0.001)
    assert addresses.lost_after_s(NEAR) == 0.05, "processes stall: never sooner"
    assert addresses.lost_after_s(FAR) == 0.05
    for _ in range(50):
        addresses.observe(FAR, 0.2)
    assert 0.2 < addresses.lost_after_s(FAR) < 0.3
    assert addresses.lost_after_s(NEAR) == 0.05
    addresses.observe(FAR, 30.0)
    assert addresses.lost_after_s(FAR) == 0.4, "nor later"


def test_a_busy_moment_is_forgotten_when_others_answer_fast_again():
    clock = Clock()
    addresses = known(clock)
    for seconds in (0.06, 0.5):
        addresses.observe(NEAR, seconds)
        addresses.observe(FAR, seconds)
    clock.now += 20
    assert addresses.lost_after_s(NEAR) == 0.4, "all were busy, and nothing says that this is over"
    for _ in range(60):
        addresses.observe(FAR, 0.06)
    assert addresses.lost_after_s(NEAR) == pytest.approx(0.09, abs=0.002)


def test_silence_is_noticed_and_an_answer_ends_it():
    addresses = known(Clock())
    for _ in range(3):
        assert not addresses.seems_dead(NEAR)
        addresses.lost(NEAR)
    assert addresses.seems_dead(NEAR)
    assert not addresses.seems_dead(FAR)
    addresses.observe(NEAR, 0.1)
    assert not addresses.seems_dead(NEAR)


def test_the_memory_of_addresses_is_bounded():
    addresses = known(Clock())
    for port in range(20000):
        addresses.of(("10.0.0.1", port))
    assert len(addresses) == 8192


def test_a_token_is_good_at_its_address_for_a_while():
    clock = Clock()
    tokens, others = AddressTokens(b"s" * 32, clock), AddressTokens(b"t" * 32, clock)
    token = tokens.give(NEAR)
    assert len(token) == TOKEN_BYTES
    assert tokens.accepts(NEAR, token)
    assert not tokens.accepts(FAR, token)
    assert not tokens.accepts((NEAR[0], 9), token)
    assert not others.accepts(NEAR, token)
    assert not tokens.accepts(NEAR, b"")
    clock.now += 600
    assert tokens.accepts(NEAR, token)
    clock.now += 600
    assert not tokens.accepts(NEAR, token)


def test_a_proof_is_good_for_its_answer_only():
    identity, other = (Identity.ephemeral(random.Random(seed)) for seed in (1, 2))
    node_id, message_id, asker = bytes.fromhex(identity.peer_id), os.urandom(20), os.urandom(20)
    proof = prove(identity.private_key, message_id, asker, b"content")
    assert len(proof) == PROOF_BYTES
    assert is_proven(proof, node_id, message_id, asker, b"content")
    assert not is_proven(proof, bytes.fromhex(other.peer_id), message_id, asker, b"content")
    assert not is_proven(proof, node_id, bytes(20), asker, b"content"), "an old one replayed"
    assert not is_proven(proof, node_id, message_id, bytes(20), b"content"), "one made for somebody else"
    assert not is_proven(proof, node_id, message_id, asker, b"changed")
    assert not is_proven(prove(other.private_key, message_id, asker, b"content"), node_id, message_id, asker, b"content")
    for length in (0, 31, 95):
        assert not is_proven(proof[:length], node_id, message_id, asker, b"content")


def test_one_customer_is_one_source():
    assert source_of("10.0.0.1") != source_of("10.0.0.2")
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db8:0:1::1")


def test_contacts_come_back_in_order_and_only_so_many(tmp_path):
    file = ContactFile(tmp_path / "contacts.json")
    assert file.load() == []
    contacts = [Address("10.0.0.1", port) for port in range(1, 200)] + [Address("2001:db8::1", 5)]
    file.save(contacts)
    assert file.load() == contacts[:MAX_CONTACTS]
    file.save([Address("peer.example", 4), *contacts[-1:]])
    assert file.load() == contacts[-1:], "a name is left out, and costs the others nothing"
    assert os.listdir(tmp_path) == ["contacts.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 9000,
        b'{"contacts": 5}',
        b'{"contacts": [5]}',
        b'{"contacts": [["10.0.0.1"]]}',
        b'{"contacts": [["somewhere", 5]]}',
        b'{"contacts": [["10.0.0.1", "5"]]}',
        b'{"contacts": [["10.0.0.1", 0]]}',
        b'{"contacts": [["10.0.0.1", 1e999]]}',
        json.dumps({"contacts": [["10.0.0.1", 65536]]}).encode(),
    ],
)
def test_a_file_that_makes_no_sense_is_no_file(tmp_path, content):
    path = tmp_path / "contacts.json"
    path.write_bytes(content)
    assert ContactFile(path).load() == []


def test_a_disk_that_refuses_is_reported(tmp_path):
    (tmp_path / "contacts.json").mkdir()
    with pytest.raises(StorageError, match="contacts cannot be kept"):
        ContactFile(tmp_path / "contacts.json").save([Address("10.0.0.1", 1)])
