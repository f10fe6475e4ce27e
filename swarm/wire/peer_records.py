"""Signed DHT records: what a peer says of itself, bound to its key, numbered, short-lived. Owns their bytes and limits.

The life of a record is a length, never a point in time: each receiver counts it down on its own monotonic clock.
Must not know where records are kept or how they travel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, peer_id_of
from swarm.wire.messages import IncarnationField, PeerIdField

#: A record with key and signature must fit a datagram with room for the RPC around it.
MAX_RECORD_BYTES = 1000
#: A DHT key in UTF-8; it travels beside the record that is signed for it.
MAX_KEY_BYTES = 160
MAX_TTL_S = 3600.0
#: A hint: whoever has a higher one says this.
MAX_RECORD_BALLOT = 2**63 - 1

#: Why a record is no good in itself; receivers count refusals by these words.
RefusalReason = Literal["oversize", "forged", "malformed"]


class RecordRefused(RemoteProtocolError):
    """A record that no receiver keeps; `reason` is for counters, the text for people."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class PeerRecord(BaseModel):
    """The announcement of one peer under one key."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    peer: PeerIdField
    incarnation: IncarnationField
    role: Literal["stage", "trainer", "backbone", "coordinator"]
    host: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)]
    ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S)]
    #: Rises with every publish of this identity, over restarts too (kept with the identity).
    sequence: Annotated[int, Field(ge=0, lt=2**63)]
    stage: Annotated[int, Field(ge=-1, lt=1024)] = -1
    step: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    state: Annotated[str, StringConstraints(max_length=32)] = ""
    ballot: Annotated[int, Field(ge=0, le=MAX_RECORD_BALLOT)] = 0


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """`payload` is a `PeerRecord` as JSON, signed together with the DHT key it is stored under."""

    public_key: bytes
    payload: bytes
    signature: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the record as it is stored."""
        return len(self.public_key) + len(self.payload) + len(self.signature)

    @property
    def peer(self) -> PeerId:
        """The id of who signed it."""
        return peer_id_of(self.public_key)


def _signed_bytes(key: str, payload: bytes) -> bytes:
    return b"swarm record\0" + key.encode() + b"\0" + payload


def sign_record(private_key: Ed25519PrivateKey, key: str, record: PeerRecord) -> SignedRecord:
    """Sign `record` for `key`.

    Raises:
        ValueError: record or key is over its limit, naming key and size; or the record's peer is not the signing key's.
    """
    public_key = private_key.public_key().public_bytes_raw()
    if record.peer != peer_id_of(public_key):
        raise ValueError("a record can be signed only by the peer it names")
    payload = json.dumps(record.model_dump(exclude_defaults=True), separators=(",", ":")).encode()
    signed = SignedRecord(public_key, payload, private_key.sign(_signed_bytes(key, payload)))
    if (oversize := _oversize(key, signed)) is not None:
        raise ValueError(oversize)
    return signed


def verify_record(key: str, signed: SignedRecord) -> PeerRecord:
    """Check size, signature, schema and that the id belongs to the key; the cheap checks come first.

    Raises:
        RecordRefused: saying which of these failed.
    """
    if (oversize := _oversize(key, signed)) is not None:
        raise RecordRefused("oversize", oversize)
    if len(signed.public_key) != 32 or len(signed.signature) != 64:
        raise RecordRefused("malformed", "record's public key or signature has the wrong length")
    try:
        public_key = Ed25519PublicKey.from_public_bytes(signed.public_key)
        public_key.verify(signed.signature, _signed_bytes(key, signed.payload))
    except (InvalidSignature, ValueError):
        raise RecordRefused("forged", "record's signature is not valid for its key") from None
    try:
        record = PeerRecord.model_validate_json(signed.payload)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise RecordRefused("malformed", f"record: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if record.peer != peer_id_of(signed.public_key):
        raise RecordRefused("forged", "record names a peer that its key does not belong to")
    return record


def _oversize(key: str, signed: SignedRecord) -> str | None:
    if (num_bytes := len(key.encode())) > MAX_KEY_BYTES:
        return f"key {key[:64]!r}... has {num_bytes} bytes, the limit is {MAX_KEY_BYTES}"
    if signed.num_bytes > MAX_RECORD_BYTES:
        return f"record for key {key!r} has {signed.num_bytes} bytes, the limit is {MAX_RECORD_BYTES}"
    return None
