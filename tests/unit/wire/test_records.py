"""Records: their exact bytes, and everything that a receiver refuses."""

from __future__ import annotations

import dataclasses
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import peer_id_of
from swarm.wire.peer_records import (
    MAX_KEY_BYTES,
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    PeerRecord,
    RecordRefused,
    SignedRecord,
    sign_record,
    verify_record,
)

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key().public_bytes_raw()
PEER = peer_id_of(PUBLIC)
KEY = "5" * 64 + "/stage/1"


def record(**changes: object) -> PeerRecord:
    fields: dict[str, object] = {
        "peer": PEER,
        "incarnation": "00000000000000ab",
        "role": "stage",
        "host": "10.0.0.7",
        "port": 4000,
        "ttl_s": 10.0,
        "sequence": 12,
        "stage": 1,
        "step": 5,
        "state": "serving",
        "ballot": 3,
    }
    return PeerRecord(**{**fields, **changes})


def test_golden_bytes():
    signed = sign_record(PRIVATE, KEY, record())
    assert PEER == "56475aa75463474c0285df5dbf2bcab73da65135"
    assert signed.public_key.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert signed.payload == (
        b'{"peer":"56475aa75463474c0285df5dbf2bcab73da65135","incarnation":"00000000000000ab","role":"stage",'
        b'"host":"10.0.0.7","port":4000,"ttl_s":10.0,"sequence":12,"stage":1,"step":5,"state":"serving","ballot":3}'
    )
    assert signed.signature.hex() == (
        "367c864baef34482eefba2c7ef4a189de58cf41195f10fe4d979588af9ec5c14"
        "83df183c945f26cd7dc44fbce3c01b69fe91091da0e0a56122313d658cd2f10f"
    )


def test_a_signed_record_comes_back_as_it_was():
    plain = record(stage=-1, step=-1, state="", ballot=0)
    signed = sign_record(PRIVATE, KEY, plain)
    assert b"stage" not in signed.payload.replace(b'"role":"stage"', b""), "defaults are not sent"
    assert verify_record(KEY, signed) == plain
    assert signed.peer == PEER


def test_a_minor_version_may_add_fields():
    payload = json.dumps({**record().model_dump(), "colour": "blue"}).encode()
    assert verify_record(KEY, resigned(payload)) == record()


def resigned(payload: bytes, key: str = KEY) -> SignedRecord:
    return SignedRecord(PUBLIC, payload, PRIVATE.sign(b"swarm record\0" + key.encode() + b"\0" + payload))


def refusal(key: str, signed: SignedRecord) -> str:
    with pytest.raises(RecordRefused) as caught:
        verify_record(key, signed)
    assert isinstance(caught.value, RemoteProtocolError)
    return caught.value.reason


def test_a_signature_holds_for_its_own_key_payload_and_signer_only():
    signed = sign_record(PRIVATE, KEY, record())
    other_key = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()
    assert refusal("another key", signed) == "forged"
    assert refusal(KEY, dataclasses.replace(signed, payload=signed.payload.replace(b"4000", b"4001"))) == "forged"
    assert refusal(KEY, dataclasses.replace(signed, signature=bytes(64))) == "forged"
    assert refusal(KEY, dataclasses.replace(signed, public_key=other_key)) == "forged"
    assert refusal(KEY, dataclasses.replace(signed, public_key=b"\xff" * 32)) == "forged"
    assert refusal(KEY, dataclasses.replace(signed, public_key=bytes(31))) == "malformed"
    assert refusal(KEY, dataclasses.replace(signed, signature=b"")) == "malformed"


def test_nobody_speaks_for_another_peer():
    with pytest.raises(ValueError, match="only by the peer it names"):
        sign_record(PRIVATE, KEY, record(peer="0" * 40))
    assert refusal(KEY, resigned(json.dumps(record(peer="0" * 40).model_dump()).encode())) == "forged"


@pytest.mark.parametrize(
    "change",
    [
        {"ttl_s": 0},
        {"ttl_s": MAX_TTL_S + 1},
        {"ttl_s": 1e999},
        {"port": 0},
        {"port": 65536},
        {"sequence": -1},
        {"sequence": 2**63},
        {"stage": 1024},
        {"step": -2},
        {"ballot": -1},
        {"role": "king"},
        {"host": ""},
        {"host": "h" * 256},
        {"peer": "A" * 40},
        {"incarnation": "0"},
        {"state": "s" * 33},
    ],
)
def test_values_out_of_range_are_malformed(change):
    payload = json.dumps({**record().model_dump(), **change}).encode()
    assert refusal(KEY, resigned(payload)) == "malformed"


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b"{", b"\xff", b"[" * 900])
def test_payloads_that_are_no_record_are_malformed(payload):
    assert refusal(KEY, resigned(payload)) == "malformed"


def test_over_long_records_and_keys_are_refused_naming_key_and_size():
    with pytest.raises(ValueError, match=rf"{KEY}.* has 1\d\d\d bytes, the limit is {MAX_RECORD_BYTES}"):
        sign_record(PRIVATE, KEY, record(host="ü" * 255))
    with pytest.raises(ValueError, match=f"kkk.* has {MAX_KEY_BYTES + 1} bytes, the limit is {MAX_KEY_BYTES}"):
        sign_record(PRIVATE, "k" * (MAX_KEY_BYTES + 1), record())
    assert refusal(KEY, resigned(b"{" + b" " * MAX_RECORD_BYTES)) == "oversize"
    long_key = "k" * (MAX_KEY_BYTES + 1)
    assert refusal(long_key, resigned(json.dumps(record().model_dump()).encode(), long_key)) == "oversize"


@settings(max_examples=60, deadline=None)
@given(st.builds(SignedRecord, st.binary(max_size=40), st.binary(max_size=200), st.binary(max_size=70)))
def test_noise_is_refused_and_nothing_else_happens(noise):
    refusal(KEY, noise)
