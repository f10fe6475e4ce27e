"""Identifiers: their shape, their order, and addresses as people write them."""

from __future__ import annotations

import hashlib
import random

import pytest

from swarm.base.ids import ZERO_BALLOT, Address, Ballot, new_incarnation, parse_address, peer_id_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("example.org:80", Address("example.org", 80)),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535)),
        ("[::1]:8080", Address("::1", 8080)),
        ("[2001:db8::1]:0", Address("2001:db8::1", 0)),
        (":7000", Address("127.0.0.1", 7000)),
    ],
)
def test_an_address_is_parsed(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


def test_a_missing_host_is_the_default() -> None:
    assert parse_address(":7000", default_host="0.0.0.0") == Address("0.0.0.0", 7000)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:http", "host:-1", "host:65536", "host:1.5", "host: 80", "[::1]", "7000"]
)
def test_what_has_no_port_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT") as raised:
        parse_address(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["::1", "fe80::1", "2001:db8::8080"])
def test_a_bare_ipv6_address_has_no_port(text: str) -> None:
    """Its last group must not be taken for one: whoever types it would be sent to another machine."""
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("address", [Address("example.org", 80), Address("10.0.0.1", 1), Address("2001:db8::1", 443)])
def test_an_address_survives_being_written(address: Address) -> None:
    assert parse_address(str(address)) == address


def test_a_peer_id_is_the_start_of_the_keys_hash() -> None:
    key = bytes(range(32))
    assert peer_id_of(key) == hashlib.sha256(key).hexdigest()[:40]
    assert peer_id_of(key) != peer_id_of(bytes(32))


def test_an_incarnation_is_16_hex_digits_and_fresh() -> None:
    rng = random.Random(1)
    drawn = [new_incarnation(rng) for _ in range(200)]
    assert len(set(drawn)) == 200
    assert all(len(text) == 16 and set(text) <= set("0123456789abcdef") for text in drawn)
    assert new_incarnation(random.Random(1)) == drawn[0]


def test_ballots_are_totally_ordered_and_the_zero_ballot_is_the_lowest() -> None:
    ballots = [Ballot(2, "a"), Ballot(1, "b"), Ballot(1, "a"), Ballot(0, "f" * 40)]
    assert sorted(ballots) == [Ballot(0, "f" * 40), Ballot(1, "a"), Ballot(1, "b"), Ballot(2, "a")]
    assert all(ballot > ZERO_BALLOT for ballot in ballots)
