"""Golden bytes of the wire: a peer of the same major version must always read and write exactly these.

A change that breaks one of them is a new major version, unless it only adds an optional field (then the header grows).
"""

from __future__ import annotations

import json
import typing

import pytest

from swarm.base.ids import Ballot, Ticket
from swarm.wire import messages
from swarm.wire.framing import Frame, decode, encode
from swarm.wire.messages import (
    Claim,
    Commit,
    CommitRecord,
    Heartbeat,
    Hop,
    Member,
    Refusal,
    StageResult,
    TensorSpec,
    Term,
    Train,
    Trained,
)

PEER, OTHER = "11" * 20, "22" * 20
INCARNATION = "ab" * 8
RUN, HEAD, DIGEST = "cc" * 32, "dd" * 32, "ee" * 32
MEMBER = Member(peer=PEER, incarnation=INCARNATION, host="10.0.0.1", port=7000)
OTHER_MEMBER = Member(peer=OTHER, incarnation=INCARNATION, host="fe80::1", port=7001, ready=False)

GENESIS = CommitRecord(
    run=RUN, step=-1, head=HEAD, ballot=Ballot(1, PEER), members=((MEMBER,), (OTHER_MEMBER, MEMBER)), learning_rate=0.003
)
RESULT = StageResult(
    attempt=Term(ballot=Ballot(1, PEER), n=2),
    average_digest=DIGEST,
    sum_squares=0.1,
    num_tickets=8,
    tokens=4096,
    loss_sum=12345.678,
    holders=(MEMBER,),
)
STEP = GENESIS.model_copy(
    update={"step": 0, "previous_head": HEAD, "results": (RESULT,), "tokens": 4096, "loss_sum": 1e-7, "reopened": 1}
)

_MEMBER = '{"peer":"%s","incarnation":"%s","host":"10.0.0.1","port":7000,"ready":true}' % (PEER, INCARNATION)
_OTHER = '{"peer":"%s","incarnation":"%s","host":"fe80::1","port":7001,"ready":false}' % (OTHER, INCARNATION)


def _record(middle: str) -> str:
    return (
        '{"tensors":[],"kind":"commit","record":{"run":"%s",' % RUN
        + middle.replace("MEMBERS", f'"members":[[{_MEMBER}],[{_OTHER},{_MEMBER}]]')
        + "}}"
    )


GOLDEN = {
    "heartbeat": (Frame(Heartbeat(counter=7)), "", '{"tensors":[],"kind":"heartbeat","counter":7}', b""),
    "refusal": (
        Frame(Refusal(code="busy", reason="go elsewhere: größer", stage=2)),
        "",
        '{"tensors":[],"kind":"refusal","code":"busy","reason":"go elsewhere: größer","stage":2}',
        b"",
    ),
    "train": (
        Frame(
            Train(
                tensors=(
                    TensorSpec(name="hidden", dtype="float32", shape=(2, 3), codec="8bit"),
                    TensorSpec(name="labels", dtype="int64", shape=(2,), role="label"),
                ),
                run=RUN,
                ticket=Ticket(3, 14),
                head=HEAD,
                stage=1,
                route=((MEMBER, OTHER_MEMBER), (OTHER_MEMBER,)),
            ),
            (bytes(range(10)), b"\xff" * 16),
        ),
        "",
        '{"tensors":[{"name":"hidden","dtype":"float32","shape":[2,3],"codec":"8bit","role":"input"},'
        '{"name":"labels","dtype":"int64","shape":[2],"codec":"raw","role":"label"}],"kind":"train",'
        f'"run":"{RUN}","mode":"train","ticket":[3,14],"head":"{HEAD}","stage":1,'
        f'"route":[[{_MEMBER},{_OTHER}],[{_OTHER}]]}}',
        bytes(range(10)) + b"\xff" * 16,
    ),
}
