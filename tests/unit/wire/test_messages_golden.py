"""Golden bytes of the wire: peers of one major version read and write exactly these.

A change that breaks one is a new major version, unless it only adds an optional field (then the header grows by it).
"""

from __future__ import annotations

import typing

import pytest

from swarm.base.ids import Ballot, Ticket
from swarm.wire import messages
from swarm.wire.framing import Frame, decode, encode
from swarm.wire.messages import Ack, Commit, CommitRecord, Heartbeat, Hop, Member, Refusal, TensorSpec, Train, Trained

PEER, OTHER = "11" * 20, "22" * 20
INCARNATION = "ab" * 8
RUN, HEAD = "cc" * 32, "dd" * 32
MEMBER = Member(peer=PEER, incarnation=INCARNATION, host="10.0.0.1", port=7000)
OTHER_MEMBER = Member(peer=OTHER, incarnation=INCARNATION, host="fe80::1", port=7001, ready=False)
MEMBER_JSON = (
    f'{{"peer":"{PEER}","incarnation":"{INCARNATION}","host":"10.0.0.1","port":7000,"ready":true,"keeps_checkpoints":true,'
    '"role":"both"}'
)
OTHER_JSON = (
    f'{{"peer":"{OTHER}","incarnation":"{INCARNATION}","host":"fe80::1","port":7001,"ready":false,"keeps_checkpoints":true,'
    '"role":"both"}'
)

GENESIS = CommitRecord(
    run=RUN, step=-1, version_id=HEAD, ballot=Ballot(1, PEER), members=((MEMBER,), (OTHER_MEMBER, MEMBER)), learning_rate=0.003
)
TRAIN = Train(
    tensors=(
        TensorSpec(name="hidden", dtype="float32", shape=(2, 3), codec="scaled8"),
        TensorSpec(name="labels", dtype="int64", shape=(2,), role="label"),
    ),
    run=RUN,
    ticket=Ticket(3, 14),
    version_id=HEAD,
    stage=1,
    route=((MEMBER, OTHER_MEMBER), (OTHER_MEMBER,)),
)
TRAINED = Trained(
    hops=(Hop(stage=1, peer=PEER, accumulated=True, queue_s=0.25, num_bytes=9, failed=((OTHER, "busy"),)),),
    loss_sum=1.5,
    tokens=16,
)

#: name -> (message, fixed part in hex, header, body)
GOLDEN: dict[str, tuple[messages.Message, str, str, bytes]] = {
    "ack": (Ack(), "5357524d02000000 0000001b 0000000000000000", '{"tensors":[],"kind":"ack"}', b""),
    "heartbeat": (
        Heartbeat(counter=7),
        "5357524d02000000 0000002d 0000000000000000",
        '{"tensors":[],"kind":"heartbeat","counter":7}',
        b"",
    ),
    "refusal": (
        Refusal(code="busy", reason="go elsewhere: größer", stage=2),
        "5357524d02000000 00000059 0000000000000000",
        '{"tensors":[],"kind":"refusal","code":"busy","reason":"go elsewhere: größer","stage":2}',
        b"",
    ),
    "train": (
        TRAIN,
        "5357524d02000000 00000379 0000000000000019",
        '{"tensors":[{"name":"hidden","dtype":"float32","shape":[2,3],"codec":"scaled8","role":"input"},'
        '{"name":"labels","dtype":"int64","shape":[2],"codec":"raw","role":"label"}],"kind":"train",'
        f'"run":"{RUN}","mode":"train","ticket":[3,14],"head":"{HEAD}","stage":1,'
        f'"route":[[{MEMBER_JSON},{OTHER_JSON}],[{OTHER_JSON}]]}}',
        bytes(range(9)) + b"\xff" * 16,
    ),
    "trained": (
        TRAINED,
        "5357524d02000000 00000153 0000000000000000",
        f'{{"tensors":[],"kind":"trained","hops":[{{"stage":1,"peer":"{PEER}","accumulated":true,"queue_s":0.25,'
        '"forward_s":0.0,"backward_s":0.0,"transfer_s":0.0,"num_bytes":9,"recomputed":false,'
        f'"failed":[["{OTHER}","busy"]],"stalled":[]}}],"loss_sum":1.5,"tokens":16,"overflow":false}}',
        b"",
    ),
    "commit of a genesis record": (
        Commit(record=GENESIS),
        "5357524d02000000 000003ec 0000000000000000",
        f'{{"tensors":[],"kind":"commit","record":{{"run":"{RUN}","era":0,"step":-1,"head":"{HEAD}","previous_head":"",'
        f'"ballot":[1,"{PEER}"],"members":[[{MEMBER_JSON}],[{OTHER_JSON},{MEMBER_JSON}]],"results":[],"tokens":0,'
        '"loss_sum":0.0,"grad_norm":0.0,"clip_coefficient":1.0,"learning_rate":0.003,"skipped":false,"loss_scale":1.0,"scale_age":0,"reopened":0,'
        '"moves":[],"order":{"paused":false},"saved":0}}',
        b"",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_a_message_stay_what_they_are(name: str) -> None:
    message, fixed, header, body = GOLDEN[name]
    golden = bytes.fromhex(fixed) + header.encode() + body
    buffers = []
    for spec in message.tensors:
        buffers.append(body[: spec.num_bytes])
        body = body[spec.num_bytes :]
    assert encode(Frame(message, tuple(buffers))) == golden
    frame = decode(golden)
    assert frame.message == message
    assert [bytes(buffer) for buffer in frame.buffers] == buffers


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    header = b'{"kind":"heartbeat","counter":1,"mood":"fine"}'
    data = bytes.fromhex("5357524d02090000") + len(header).to_bytes(4, "big") + bytes(8) + header
    assert decode(data).message == Heartbeat(counter=1)


def test_every_message_has_its_own_kind_and_is_a_request_or_a_reply() -> None:
    union = typing.get_args(typing.get_args(messages.AnyMessage)[0])
    kinds = [message.model_fields["kind"].default for message in union]
    assert len(set(kinds)) == len(kinds)
    defined = {cls for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, messages.Message)}
    assert defined - {messages.Message} == set(union), "a message class is missing from AnyMessage"
    assert set(kinds) >= messages.REQUEST_KINDS


def test_every_message_says_in_a_sentence_what_it_is() -> None:
    for message in typing.get_args(typing.get_args(messages.AnyMessage)[0]):
        assert message.__doc__, f"{message.__name__} has no docstring"
        assert message.__doc__.strip().split("\n")[0].endswith("."), f"{message.__name__}: no sentence"
