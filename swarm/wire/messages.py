"""THE protocol: every message and every reply code, a sentence each. Owns shapes and bounds; moves no bytes.

A request is answered by a stream of `Heartbeat` frames and one result: the reply named beside the request, or `Refusal`.
Unknown fields are ignored, so that a minor version may add optional ones. Tensor bytes follow the header of a frame in
the order of `tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, Union

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, TypeAdapter, model_validator

from swarm.base.ids import MAX_TICKETS, ZERO_BALLOT, Ballot, Ticket

PROTOCOL_MAJOR = 2
PROTOCOL_MINOR = 0

#: Elements that share one scale in the codes that count in steps; those of a sub-block share one step in the 8-bit ones.
BLOCK_SIZE = 4096
SUB_BLOCK_SIZE = 64
#: Kept elements that share one 16-bit scale in the sparse code.
BUCKET_SIZE = 128
MAX_DIMS = 8
MAX_TENSORS = 4096
MAX_MEMBERS = 4096
MAX_TIES = 64
MAX_PHASES = 64
MAX_AUXILIARIES = 64
#: A sparse tensor takes 32 times its payload in memory.
MAX_SPARSE_ELEMENTS = 2**22

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
Codec = Literal["raw", "fp16", "bf16", "rotated8", "scaled8", "int8", "scaled16", "uniform8", "sparse4"]

PeerIdField = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
IncarnationField = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
DigestField = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RunIdField = DigestField
StageField = Annotated[int, Field(ge=0, lt=1024)]
StepField = Annotated[int, Field(ge=0, lt=2**40)]
IndexField = Annotated[int, Field(ge=0, lt=MAX_TICKETS)]
NameField = Annotated[str, StringConstraints(min_length=1, max_length=256)]
#: What kind of device computed: `cpu`, `cuda`, or `cuda-tf32` with shortened fp32 products.
KindField = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,32}$")]
TextField = Annotated[str, StringConstraints(max_length=2000)]
Indexes = Annotated[tuple[IndexField, ...], FailFast(), Field(max_length=MAX_TICKETS)]


def num_scaled_bytes(num_elements: int) -> int:
    """Bytes of so many elements in the 8-bit codes, see `scaled.py`."""
    return num_elements + math.ceil(num_elements / SUB_BLOCK_SIZE) + 2 * math.ceil(num_elements / BLOCK_SIZE)


#: Codec -> bytes of so many elements, of which a sparse code keeps so many. Raw ones are as long as their dtype says.
CODEC_BYTES: dict[Codec, Callable[[int, int], int]] = {
    "fp16": lambda n, kept: 2 * n,
    "bf16": lambda n, kept: 2 * n,
    "rotated8": lambda n, kept: num_scaled_bytes(n),
    "scaled8": lambda n, kept: num_scaled_bytes(n),
    "int8": lambda n, kept: n + 4 * math.ceil(n / BLOCK_SIZE),
    "scaled16": lambda n, kept: 2 * n + 4 * math.ceil(n / BLOCK_SIZE),
    "uniform8": lambda n, kept: n + 4 * 256 if n else 0,
    "sparse4": lambda n, kept: math.ceil(n / 8) + math.ceil(kept / 2) + 2 * math.ceil(kept / BUCKET_SIZE),
}
#: Codecs that keep the largest elements only, see `sparse.py`.
SPARSE_CODECS: frozenset[Codec] = frozenset({"sparse4"})


class Piece(BaseModel):
    """Base of everything inside a message.

    An alias is the name that the wire and files keep for a field that has another name here.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True)


class TensorSpec(Piece):
    """One tensor of a frame's body: logical dtype and shape, and how its bytes are coded."""

    name: NameField
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], FailFast(), Field(max_length=MAX_DIMS)]
    codec: Codec = "raw"
    #: "input" feeds the stage and needs a gradient if floating; "label" travels unchanged to the last stage.
    role: Literal["input", "label", "grad", "state"] = "input"
    #: Elements that the sparse code keeps; the others are 0.
    num_kept: Annotated[int, Field(ge=0, lt=2**40)] | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of this tensor in the frame's body."""
        if self.codec == "raw":
            return self.num_elements * DTYPE_BYTES[self.dtype]
        return CODEC_BYTES[self.codec](self.num_elements, self.num_kept or 0)

    @property
    def is_sparse(self) -> bool:
        """Only `num_kept` elements travel."""
        return self.codec in SPARSE_CODECS

    @model_validator(mode="after")
    def _floats_only(self) -> TensorSpec:
        if self.codec != "raw" and self.dtype not in ("float64", "float32", "float16", "bfloat16"):
            raise ValueError(f"codec {self.codec} is for floating tensors, not {self.dtype}")
        if self.is_sparse and self.num_elements > MAX_SPARSE_ELEMENTS:
            raise ValueError(f"{self.num_elements} elements are too many for a sparse code")
        if self.is_sparse != (self.num_kept is not None) or (self.num_kept or 0) > self.num_elements:
            raise ValueError(f"{self.num_kept} of {self.num_elements} elements are kept in codec {self.codec}")
        return self


class Member(Piece):
    """One peer in one incarnation, and where it listens. `ready` members hold the stage's state and may be routed to.

    A record says what each does at its stage: who only aggregates gets no tickets, and who only computes no slice to reduce.
    """

    peer: PeerIdField
    incarnation: IncarnationField
    host: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=0, le=65535)]
    ready: bool = True
    #: It has a directory for checkpoints.
    keeps_checkpoints: bool = True
    role: Literal["both", "compute", "aggregate"] = "both"

    @property
    def key(self) -> tuple[str, str]:
        """The key of this peer in this incarnation."""
        return (self.peer, self.incarnation)


class Attempt(Piece):
    """Orders the leaders of one stage within a step: (ballot, n); the record's first ready member leads at the zero attempt."""

    ballot: Ballot = Ballot(0, "")
    n: Annotated[int, Field(ge=0)] = 0

    @property
    def order(self) -> tuple[int, str, int]:
        """The number that attempts of one step and stage are compared by."""
        return (self.ballot.counter, self.ballot.coordinator, self.n)


MAX_SAVED = 16
#: Numbers of commits of the newest checkpoints that were written in this era and are still on disk, ascending.
SavedSteps = Annotated[tuple[Annotated[int, Field(ge=0)], ...], FailFast(), Field(max_length=MAX_SAVED)]


class Seal(Piece):
    """A peer's frozen ledger for one attempt: what its accumulator of a step holds."""

    member: Member
    ledger: Indexes = ()
    #: Tickets seen with a non-finite gradient: ledgered, not added.
    overflow: Indexes = ()
    tokens: Annotated[int, Field(ge=0)] = 0
    loss_sum: float = 0.0
    #: Name of the newest version that this peer holds, and the digest of parameters and optimizer state at it.
    version_id: DigestField = Field(alias="head")
    state_digest: str = ""
    saved: SavedSteps = ()


#: Name of each tie, and digest of its sum over stages.
TiedDigests = Annotated[tuple[tuple[NameField, DigestField], ...], FailFast(), Field(max_length=MAX_TIES)]


class StageResult(Piece):
    """One stage's part of a commit record."""

    attempt: Attempt
    sum_digest: DigestField = Field(alias="average_digest")
    #: Sum of squares of the summed gradient, before division by the token total (fp64).
    sum_squares: Annotated[float, Field(ge=0)]
    num_tickets: Annotated[int, Field(ge=0)]
    #: Tickets among these whose gradient was not finite; any of them makes the step a skipped one.
    num_overflow: Annotated[int, Field(ge=0)] = 0
    tokens: Annotated[int, Field(ge=0)]
    loss_sum: float = 0.0
    #: Members that hold the sum, best source first.
    holders: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()
    #: Name and digest of the sum over stages of each tied parameter that this stage holds a copy of.
    tied: TiedDigests = ()
    #: Checkpoints that all its members have.
    saved: SavedSteps = ()


class Move(Piece):
    """A member goes to another stage: it serves `source` in the next step, and is listed at `target` from then on."""

    member: Member
    source: StageField
    target: StageField


class Load(Piece):
    """The work of a member at its stage so far, counted by itself; who compares two of them learns its pace and load."""

    member: Member
    #: Seconds of its own clock since it took up the stage.
    elapsed_s: Annotated[float, Field(ge=0)] = 0.0
    #: Micro-batches that went through it, and what they took: compute, waiting for the compute thread, and bytes in the
    #: busier direction of its link.
    num_tickets: Annotated[int, Field(ge=0)] = 0
    busy_s: Annotated[float, Field(ge=0)] = 0.0
    queue_s: Annotated[float, Field(ge=0)] = 0.0
    num_bytes: Annotated[int, Field(ge=0)] = 0
    #: Bytes per second that its link was measured to carry in the slower direction; 0 if it was not measured.
    bandwidth: Annotated[float, Field(ge=0)] = 0.0
    #: What its link showed in each direction in the newest round; 0 if nothing.
    upload: Annotated[float, Field(ge=0)] = 0.0
    download: Annotated[float, Field(ge=0)] = 0.0
    #: Bytes of one average as it travels, if it does in one exchange; else 0.
    average_bytes: Annotated[int, Field(ge=0)] = 0
    #: Bytes of its stage's parameters and optimizer state, and of memory that is left for another stage's; -1: not known.
    state_bytes: Annotated[int, Field(ge=0)] = 0
    room_bytes: Annotated[int, Field(ge=-1)] = -1
    #: Speed of its device in a short benchmark, whatever the model; 0 if not known.
    flops_per_s: Annotated[float, Field(ge=0)] = 0.0


class Order(Piece):
    """An operator's wish for the run: to wait after a commit, or to end once that many steps have committed."""

    paused: bool = False
    stop_at: Annotated[int, Field(ge=1, le=2**40)] | None = None


class CommitRecord(Piece):
    """The decision that ended a step; nothing after it aborts. The genesis record has step -1 and no results.

    Records are ordered by (era, step, smaller `version_id`, ballot): a peer takes over the newest that it sees. A record that
    restores an older version has the next era, and the results of the record that it repeats. Two coordinators may decide on
    one version, each with its own list of members: the list of the higher ballot holds.
    """

    run: RunIdField
    #: How often the run was set back to an older version.
    era: Annotated[int, Field(ge=0)] = 0
    step: Annotated[int, Field(ge=-1)]
    version_id: DigestField = Field(alias="head")
    previous_version_id: str = Field("", alias="previous_head")
    ballot: Ballot
    #: Next members of each stage, its leader first.
    members: tuple[Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)], ...]
    results: tuple[StageResult, ...] = ()
    tokens: Annotated[int, Field(ge=0)] = 0
    loss_sum: float = 0.0
    grad_norm: float = 0.0
    clip_coefficient: float = 1.0
    learning_rate: float = 0.0
    skipped: bool = False
    #: The losses of this version's tickets are multiplied with it before the backward (1 except for fp16).
    loss_scale: Annotated[float, Field(gt=0)] = 1.0
    #: Steps since the loss scale last changed.
    scale_age: Annotated[int, Field(ge=0)] = 0
    #: Attempts beyond the first that this step needed.
    reopened: Annotated[int, Field(ge=0)] = 0
    #: Members that go to another stage; the next record carries it out. See `lifecycle/PROTOCOL.md`, "Moves".
    moves: Annotated[tuple[Move, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()
    #: The operator's order from here on; a new coordinator takes it over.
    order: Order = Order()
    #: Number of commits of the newest checkpoint that every stage is known to have on disk; 0 if none is.
    saved: Annotated[int, Field(ge=0)] = 0

    @property
    def loss(self) -> float | None:
        """Mean loss per token in nats; None of a step that was skipped: not all of its numbers are known."""
        return None if self.skipped else self.loss_sum / self.tokens if self.tokens else 0.0

    def newer_than(self, other: CommitRecord | None) -> bool:
        """Whether this record replaces `other`. It is the same on every peer, so two lineages that meet become one."""
        if other is None:
            return True
        if (self.era, self.step) != (other.era, other.step):
            return (self.era, self.step) > (other.era, other.step)
        return self.version_id < other.version_id or (self.version_id == other.version_id and self.ballot > other.ballot)

    def relists(self, other: CommitRecord | None) -> bool:
        """Whether this is the version of `other`, decided by another coordinator: then only its members may be others."""
        return other is not None and (self.era, self.version_id) == (other.era, other.version_id)


class Norms(Piece):
    """Euclidean norms of what one stage computed for a micro-batch, as it was before it was coded for the wire.

    A norm is None where there is no such thing, or where it is not finite.
    """

    #: The norm of its outputs; the last stage has the loss instead.
    output: float | None = None
    #: The norm of its inputs' gradients.
    gradient: float | None = None
    #: The norm of its parameters' gradients, without the loss scale.
    parameters: float | None = None


class Hop(Piece):
    """The work of one stage for a micro-batch; times in seconds, bytes as sent on the wire."""

    stage: StageField
    peer: PeerIdField
    accumulated: bool
    queue_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    #: From the request to the next stage until its answer was there, without what the stages from there on took.
    transfer_s: float = 0.0
    num_bytes: Annotated[int, Field(ge=0)] = 0
    #: On the way from the stage before and back: seconds in which bytes moved. The rest of that way's time is latency.
    moving_s: Annotated[float, Field(ge=0)] | None = None
    recomputed: bool = False
    #: Candidates of this stage that failed before this peer, with the reason.
    failed: Annotated[tuple[tuple[PeerIdField, TextField], ...], FailFast(), Field(max_length=64)] = ()
    #: Candidates among them that were waited for until nothing had advanced for `stall_s`.
    stalled: Annotated[tuple[PeerIdField, ...], FailFast(), Field(max_length=64)] = ()
    #: Present if the request asked for norms; and the kind of device that computed them.
    norms: Norms | None = None
    computed_on: KindField | None = None


Route = Annotated[tuple[Annotated[tuple[Member, ...], FailFast(), Field(max_length=64)], ...], FailFast(), Field(max_length=1024)]


class Message(Piece):
    """Base of every message; `tensors` describes the body."""

    tensors: Annotated[tuple[TensorSpec, ...], FailFast(), Field(max_length=MAX_TENSORS)] = ()


# ------------------------------------------------------------------------------------------------ any request


class Heartbeat(Message):
    """The answer is not ready yet: `counter` advances with compute jobs, downstream heartbeats and bytes moved."""

    kind: Literal["heartbeat"] = "heartbeat"
    counter: int = 0


REFUSAL_CODES = {
    "bad_request": "the request is no valid message, or does not fit this peer",
    "wrong_run": "the request belongs to another run",
    "wrong_stage": "this peer serves another stage",
    "not_member": "the sender is not a member that may ask this",
    "lower_ballot": "a coordinator with a higher ballot was accepted",
    "wrong_state": "the step is not in a state in which this can be done",
    "busy": "a bound is reached: go elsewhere or come back",
    "behind": "this peer lacks the version that the request names",
    "ahead": "this peer is past the version that the request names",
    "stale": "the step is sealed or committed; nothing was accumulated",
    "no_candidate": "no candidate of the named stage could take the micro-batch",
    "failed_everywhere": "the computation failed on every candidate of the named stage: model or data are at fault",
    "failed": "the computation failed on this peer",
    "unknown": "this peer does not know what is asked for",
}


class Refusal(Message):
    """The request is refused, with a code of `REFUSAL_CODES`, a reason for people, and the newest record where that helps."""

    kind: Literal["refusal"] = "refusal"
    code: Annotated[str, StringConstraints(max_length=32)]
    reason: TextField = ""
    stage: StageField | None = None
    record: CommitRecord | None = None
    #: The ballot that was accepted, with `lower_ballot`: a candidate can stand above it.
    ballot: Ballot | None = None


class Ack(Message):
    """The request is done."""

    kind: Literal["ack"] = "ack"


class Hello(Message):
    """A newcomer asks any peer for the run: answered by `RunInfo`."""

    kind: Literal["hello"] = "hello"


class RunInfo(Message):
    """The run's configuration verbatim, DHT contacts, the coordinator as far as known, and the newest record."""

    kind: Literal["run_info"] = "run_info"
    config: Annotated[str, StringConstraints(max_length=262144)]
    contacts: Annotated[tuple[tuple[str, int], ...], FailFast(), Field(max_length=64)] = ()
    coordinator: Member | None = None
    record: CommitRecord | None = None
    #: The address this peer saw the newcomer come from.
    seen_host: Annotated[str, StringConstraints(max_length=255)] = ""


class Status(Message):
    """Asks any peer how it is: answered by `StatusReply`."""

    kind: Literal["status"] = "status"


class StatusReply(Message):
    """The state of a peer for an operator; `detail` is flat and for display, and other peers read in it what jobs take."""

    kind: Literal["status_reply"] = "status_reply"
    role: Literal["stage", "trainer", "backbone"]
    member: Member
    #: Steps that have committed; -1: it does not know of any yet.
    step: int = -1
    #: The version of a stage peer's own state, which may lag; for other roles that of the newest record. Empty: none.
    version_id: str = Field("", alias="head")
    state: Annotated[str, StringConstraints(max_length=64)] = ""
    detail: Annotated[dict[str, str | int | float | bool], Field(max_length=128)] = {}
    stages: tuple[Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)], ...] = ()
    #: The stage that it serves; -1 for other roles.
    stage: Annotated[int, Field(ge=-1, lt=1024)] = -1
    #: Counter of the ballot with which it coordinates the run; -1 if it does not.
    ballot: Annotated[int, Field(ge=-1)] = -1


# ------------------------------------------------------------------------------------------------ micro-batches


class Train(Message):
    """Run one micro-batch through this stage and those after it; `route[0]` is this stage's candidates, me first.

    Answered by `Trained`, whose body is the gradient of the inputs (none for stage 0 or `mode = "eval"`).
    """

    kind: Literal["train"] = "train"
    run: RunIdField
    mode: Literal["train", "eval"] = "train"
    ticket: Ticket
    version_id: DigestField = Field(alias="head")
    stage: StageField
    route: Route
    #: Every stage tells the norms of what it computes.
    with_norms: bool | None = None


class Trained(Message):
    """The result of a micro-batch: hops from this stage to the last, loss sum over tokens, token count."""

    kind: Literal["trained"] = "trained"
    hops: Annotated[tuple[Hop, ...], FailFast(), Field(max_length=1024)]
    loss_sum: float
    tokens: Annotated[int, Field(ge=0)]
    overflow: bool = False


class SeenLine(Message):
    """A trainer tells a stage peer what tickets showed of its line, and why it got none of the newest step: answered by `Ack`."""

    kind: Literal["seen_line"] = "seen_line"
    run: RunIdField
    stage: StageField
    trainer: PeerIdField
    #: In the busier direction; 0: not known.
    bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    #: Empty if it gets tickets.
    reason: TextField = ""


# ------------------------------------------------------------------------------------------------ claims and step


class Claim(Message):
    """A member asks its stage's leader for permission to accumulate tickets of `step`: answered by `Claimed`."""

    kind: Literal["claim"] = "claim"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    member: Member
    indexes: Indexes


class Claimed(Message):
    """The granted tickets; each one asked for and missing here is denied."""

    kind: Literal["claimed"] = "claimed"
    attempt: Attempt = Field(alias="term")
    granted: Indexes
    reason: TextField = ""


class Revoke(Message):
    """The leader takes an unused claim back: answered by `Revoked`."""

    kind: Literal["revoke"] = "revoke"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    index: IndexField


class Revoked(Message):
    """`held` is true if the ticket is already in the ledger, so that the claim stays."""

    kind: Literal["revoked"] = "revoked"
    held: bool


class Gather(Message):
    """The coordinator makes a member the leader of its stage for `attempt` and has it collect every ledger.

    With `freeze` the ledgers are sealed for the attempt `attempt`; without, the step is (re)opened. Unused claims are void
    either way. Answered by `Gathered`.
    """

    kind: Literal["gather"] = "gather"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    freeze: bool
    members: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    excluded: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = Field((), alias="struck")


class Gathered(Message):
    """The seals of all members that answered, those that did not (excluded for this step), and what each has done so far."""

    kind: Literal["gathered"] = "gathered"
    seals: Annotated[tuple[Seal, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    excluded: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = Field((), alias="struck")
    loads: Annotated[tuple[Load, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()


class Collect(Message):
    """A leader collects one member's ledger and voids its unused claims; `freeze` seals it. Answered by `Collected`."""

    kind: Literal["collect"] = "collect"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    freeze: bool
    leader: Member


class Collected(Message):
    """One member's seal, its work so far, and what its link was measured to carry (bytes per second; None: not yet)."""

    kind: Literal["collected"] = "collected"
    seal: Seal
    upload: Annotated[float, Field(gt=0)] | None = None
    download: Annotated[float, Field(gt=0)] | None = None
    load: Load | None = None


#: The attempt of every stage.
StageAttempts = Annotated[tuple[Attempt, ...], FailFast(), Field(max_length=1024)]


class AllReduce(Message):
    """The coordinator has a stage's leader average the sealed contributions of `attempt`: answered by `AllReduced`."""

    kind: Literal["average"] = "average"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    seals: Annotated[tuple[Seal, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    #: The attempt of each stage, in order, at the same time: stages that hold copies of one parameter exchange its sums.
    attempts: StageAttempts = Field((), alias="terms")


class AllReduced(Message):
    """The stage is prepared, or `suspects` names the ends of the transfers that failed."""

    kind: Literal["averaged"] = "averaged"
    result: StageResult | None = None
    suspects: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()
    reason: TextField = ""


class Assist(Message):
    """A stage's leader asks an aggregator to reduce slices of the averages of attempt `attempt`: answered by `Assisting`.

    It holds no replica and knows no model: `vector` says how many elements the average has, and how they travel.
    """

    kind: Literal["assist"] = "assist"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    vector: TensorSpec
    #: Members that may send their chunks.
    num_members: Annotated[int, Field(ge=1, le=MAX_MEMBERS)]


class Assisting(Message):
    """The aggregator keeps memory for the attempt; who it is now, and what it may carry for one stage.

    `bandwidth` is in bytes per second each way (None: not known). `is_limit`: it was seen to carry no more; else it was
    never asked to.
    """

    kind: Literal["assisting"] = "assisting"
    member: Member
    bandwidth: Annotated[float, Field(gt=0)] | None = None
    is_limit: bool = False


class Reduce(Message):
    """A leader starts the all-reduce of an attempt at one peer: a member answers by `Reduced` once it holds the average.

    So does an auxiliary, without a digest, once it has reduced its slice.
    """

    kind: Literal["reduce"] = "reduce"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    seals: Annotated[tuple[Seal, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    #: The sizes of slices: how many elements each of them reduces, in this order, and then each of `auxiliaries`.
    shares: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()
    #: The largest slice of a member travels in about so many chunks.
    num_chunks: Annotated[int, Field(ge=1, le=128)] = 16
    #: As in `AllReduce`.
    attempts: StageAttempts = Field((), alias="terms")
    #: Aggregators that only reduce: they have no seal, no contribution and no use for the result.
    auxiliaries: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_AUXILIARIES)] = ()


class Reduced(Message):
    """This peer has done what was asked, a member holds the average with this digest; or what failed is said in `reason`.

    Then `suspects` names whom it could not exchange slices with.
    """

    kind: Literal["reduced"] = "reduced"
    sum_digest: str = Field("", alias="average_digest")
    sum_squares: float = 0.0
    tied: TiedDigests = ()
    suspects: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()
    reason: TextField = ""


class Slice(Message):
    """One chunk of a slice of a member's gradient sum, for the peer that reduces it: answered by `ReducedSlice`.

    The body is chunk `number` of the slice, or empty if the sender's ledger is.
    """

    kind: Literal["slice"] = "slice"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    member: Member
    number: Annotated[int, Field(ge=0, lt=2**31)] = 0
    #: The exchange of the round that it belongs to: a compressor may need several, and so do groups of groups.
    phase: Annotated[int, Field(ge=0, lt=MAX_PHASES)] = 0


class ReducedSlice(Message):
    """The sum of all members' chunks."""

    kind: Literal["reduced_slice"] = "reduced_slice"


class FetchTied(Message):
    """A member of a stage that holds a copy of one of this stage's parameters asks for the parameter's summed gradient.

    It is the sum of this stage's attempt `attempt`, without other stages' parts. Answered by `SumCopy`.
    """

    kind: Literal["fetch_tied"] = "fetch_tied"
    run: RunIdField
    stage: StageField
    step: StepField
    attempt: Attempt = Field(alias="term")
    #: The name of the tie.
    name: NameField
    offset: Annotated[int, Field(ge=0)] = 0
    length: Annotated[int, Field(ge=1)] = 2**24


class Holdings(Message):
    """The coordinator asks which versions a stage peer could go on from: answered by `Held`."""

    kind: Literal["holdings"] = "holdings"
    run: RunIdField
    stage: StageField


class Held(Message):
    """Records whose versions this peer holds in memory or on disk, newest first, and if it can make the initial values."""

    kind: Literal["held"] = "held"
    member: Member
    records: Annotated[tuple[CommitRecord, ...], FailFast(), Field(max_length=64)] = ()
    #: Whether it can make the initial values: not where they lie in files that it does not have.
    initial: bool = True
    #: It has a checkpoint on disk that is damaged, or that someone is changing.
    damaged: bool = False
    #: The newest record known to it that asked for a checkpoint, whether or not it holds that.
    checkpoint_record: CommitRecord | None = Field(None, alias="milestone")


class FetchSum(Message):
    """A peer one commit behind copies the average that a record names: answered by `SumCopy`."""

    kind: Literal["fetch_average"] = "fetch_average"
    run: RunIdField
    stage: StageField
    step: StepField
    digest: DigestField
    offset: Annotated[int, Field(ge=0)] = 0
    length: Annotated[int, Field(ge=1)] = 2**24


class SumCopy(Message):
    """Elements `offset : offset + length` of the flat average, or of one parameter's sum; `total` is its length."""

    kind: Literal["average_copy"] = "average_copy"
    total: Annotated[int, Field(ge=0)]


class Commit(Message):
    """Hands on a commit record: answered by `Ack` once it is taken over (the optimizer may still run)."""

    kind: Literal["commit"] = "commit"
    record: CommitRecord


# ------------------------------------------------------------------------------------------------ coordinator


class Join(Message):
    """A stage peer asks the coordinator to be listed in the next record: answered by `Joining` or `Refusal`.

    `version_id` is the newest version that it holds; `member.ready` says that it holds the stage's state there. One that is
    `leaving` is left out once its gradients are committed; those of `lost` are not and go with it.
    """

    kind: Literal["join"] = "join"
    run: RunIdField
    stage: StageField
    member: Member
    version_id: DigestField | None = Field(None, alias="head")
    leaving: bool = False
    lost: Annotated[tuple[Ticket, ...], FailFast(), Field(max_length=MAX_TICKETS)] = ()


class Joining(Message):
    """The coordinator will list it, or leave it out; `waiting_for` is what the run waits for meanwhile, in words."""

    kind: Literal["joining"] = "joining"
    waiting_for: TextField = ""


class Operate(Message):
    """An operator pauses, resumes or stops the run: answered by `Operated`. Heard from the coordinator's own machine only."""

    kind: Literal["operate"] = "operate"
    run: RunIdField
    action: Literal["pause", "resume", "stop"]
    #: Steps after which to stop; without it at once.
    at_step: Annotated[int, Field(ge=1, le=2**40)] | None = None


class Operated(Message):
    """Steps committed so far, and what happens now, in words."""

    kind: Literal["operated"] = "operated"
    step: StepField
    text: TextField


class Place(Message):
    """A newcomer asks the coordinator which stage it should serve: answered by `Placed`."""

    kind: Literal["place"] = "place"
    run: RunIdField
    member: Member
    #: As in `Load`.
    flops_per_s: Annotated[float, Field(ge=0)] = 0.0
    room_bytes: Annotated[int, Field(ge=-1)] = -1
    bandwidth: Annotated[float, Field(ge=0)] = 0.0


class Placed(Message):
    """The stage where the newcomer raises predicted throughput most; none if no stage's state fits into its memory."""

    kind: Literal["placed"] = "placed"
    stage: StageField | None = None
    reason: TextField = ""


class Elect(Message):
    """A candidate asks to be accepted as coordinator with this ballot: answered by `Elected`, or `lower_ballot`."""

    kind: Literal["elect"] = "elect"
    run: RunIdField
    ballot: Ballot
    coordinator: Member


class Elected(Message):
    """The candidate is accepted; the newest record, the highest attempt seen, and the prepared attempts of the step after it."""

    kind: Literal["elected"] = "elected"
    stage: StageField
    member: Member
    record: CommitRecord | None = None
    attempt: Attempt = Field(Attempt(), alias="term")
    prepared: Annotated[tuple[tuple[StepField, StageResult], ...], FailFast(), Field(max_length=16)] = ()


class Lease(Message):
    """A trainer reports and asks for work; held open until there is some: answered by `Leased`."""

    kind: Literal["lease"] = "lease"
    run: RunIdField
    trainer: Member
    data_digest: Annotated[str, StringConstraints(max_length=128)] = ""
    #: Step, era, version and ballot of the newest record that it has (-2: none, not even genesis).
    known_step: Annotated[int, Field(ge=-2)] = -2
    known_era: Annotated[int, Field(ge=0)] = 0
    known_version_id: Annotated[str, StringConstraints(max_length=64)] = Field("", alias="known_head")
    known_ballot: Ballot = ZERO_BALLOT
    #: Tickets finished since the last call, with whether every stage said it accumulated them.
    done: Annotated[tuple[tuple[Ticket, bool], ...], FailFast(), Field(max_length=MAX_TICKETS)] = ()
    holding: Annotated[tuple[Ticket, ...], FailFast(), Field(max_length=MAX_TICKETS)] = ()
    want: Annotated[int, Field(ge=0, le=MAX_TICKETS)] = 0
    retries: Annotated[int, Field(ge=0)] = 0
    #: Result of an evaluation it was asked for: (step, loss sum, tokens).
    evaluated: tuple[int, float, int] | None = None
    leaving: bool = False


class Evaluated(Message):
    """A trainer tells members the mean loss on the held-out samples at `version_id`: the best checkpoint stays.

    Answered by `Ack`.
    """

    kind: Literal["evaluated"] = "evaluated"
    run: RunIdField
    step: StepField
    version_id: DigestField = Field(alias="head")
    loss: float


class Leased(Message):
    """Work for a trainer, and every record since `known_step` that the coordinator still has.

    `evaluate` asks this trainer to evaluate the newest version. `finished`: the last step has committed.
    """

    kind: Literal["leased"] = "leased"
    ballot: Ballot
    tickets: Annotated[tuple[Ticket, ...], FailFast(), Field(max_length=MAX_TICKETS)] = ()
    #: How many of them were leased before, to anyone: their trainer fell silent, or a stage lost what it held of them.
    again: Annotated[int, Field(ge=0, le=MAX_TICKETS)] = 0
    #: Peers that said that a ticket overflowed, for each such ticket: others are asked first.
    avoid: Annotated[tuple[tuple[Ticket, tuple[PeerIdField, ...]], ...], FailFast(), Field(max_length=MAX_TICKETS)] = ()
    records: Annotated[tuple[CommitRecord, ...], FailFast(), Field(max_length=256)] = ()
    evaluate: bool = False
    finished: bool = False
    waiting_for: TextField = ""


# ------------------------------------------------------------------------------------------------ state transfer


class StateOffer(Message):
    """A newcomer asks a member for its state: answered by `StateManifest`, which pins one snapshot for a while.

    With `release` it asks for nothing, and lets the snapshot of that version go: answered by `Ack`.
    """

    kind: Literal["state_offer"] = "state_offer"
    run: RunIdField
    stage: StageField
    #: Only a snapshot of this step or newer is of use.
    min_step: Annotated[int, Field(ge=-1)] = -1
    release: DigestField | None = None
    #: The peer that asks: a member serves a few at a time.
    reader: IncarnationField | None = None


class StateManifest(Message):
    """The pinned snapshot: its record, and name, dtype, length and digest of each flat tensor.

    With `delay_steps = 1` it also holds the parameters of the version before, whose record is `previous`.
    """

    kind: Literal["state_manifest"] = "state_manifest"
    record: CommitRecord
    previous: CommitRecord | None = None
    entries: Annotated[tuple[tuple[NameField, str, int, str], ...], FailFast(), Field(max_length=MAX_TENSORS)]
    #: Optimizer steps taken so far.
    num_updates: Annotated[int, Field(ge=0)] = 0


class StateRange(Message):
    """Asks for elements `offset : offset + length` of one entry of the snapshot at `version_id`: answered by `StateChunk`."""

    kind: Literal["state_range"] = "state_range"
    run: RunIdField
    stage: StageField
    version_id: DigestField = Field(alias="head")
    name: NameField
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=1)]
    reader: IncarnationField | None = None


class StateChunk(Message):
    """The elements asked for."""

    kind: Literal["state_chunk"] = "state_chunk"


AnyMessage = Annotated[
    Union[
        Heartbeat,
        Refusal,
        Ack,
        Hello,
        RunInfo,
        Status,
        StatusReply,
        Train,
        Trained,
        SeenLine,
        Claim,
        Claimed,
        Revoke,
        Revoked,
        Gather,
        Gathered,
        Collect,
        Collected,
        AllReduce,
        AllReduced,
        Assist,
        Assisting,
        Reduce,
        Reduced,
        Slice,
        ReducedSlice,
        FetchTied,
        Holdings,
        Held,
        FetchSum,
        SumCopy,
        Commit,
        Join,
        Joining,
        Place,
        Placed,
        Operate,
        Operated,
        Elect,
        Elected,
        Lease,
        Leased,
        Evaluated,
        StateOffer,
        StateManifest,
        StateRange,
        StateChunk,
    ],
    Field(discriminator="kind"),
]
MESSAGE_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)
#: Kinds that ask for something; all others are replies.
REQUEST_KINDS = frozenset(
    {
        "hello",
        "status",
        "train",
        "seen_line",
        "claim",
        "revoke",
        "gather",
        "collect",
        "average",
        "assist",
        "reduce",
        "slice",
        "fetch_tied",
        "holdings",
        "fetch_average",
        "commit",
        "join",
        "place",
        "operate",
        "elect",
        "lease",
        "evaluated",
        "state_offer",
        "state_range",
    }
)
