"""The commit record: names of versions, the genesis record, and the pure decision that ends a step."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence

from swarm.base.config import RunConfig
from swarm.base.errors import InternalError
from swarm.base.ids import Ballot, RunId, VersionId
from swarm.lifecycle.coverage import torn_tie
from swarm.lifecycle.order import is_stopped
from swarm.wire.messages import CommitRecord, Member, Move, StageResult

Members = tuple[tuple[Member, ...], ...]


def computing(members: Iterable[Member]) -> tuple[Member, ...]:
    """Return the members of a stage that tickets go to: those that are ready, and are to compute."""
    return tuple(x for x in members if x.ready and x.role != "aggregate")


def version_id_of(previous: VersionId, step: int, digests: Sequence[str], clip_coefficient: float, skipped: bool) -> VersionId:
    """Return the name of a version of the whole model: a hash over the name before and what this step did to it."""
    content = [previous, step, list(digests), clip_coefficient.hex(), skipped]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def genesis_version_id(run: RunId) -> VersionId:
    """Return the name of the initial version, which is a function of the configuration alone."""
    return hashlib.sha256(b"genesis\0" + run.encode()).hexdigest()


#: Of fp16: the first loss scale, and the steps without overflow after which it doubles.
FIRST_LOSS_SCALE = 2.0**14
SCALE_GROWTH_STEPS = 200


def genesis_record(config: RunConfig, run: RunId, ballot: Ballot, members: Members) -> CommitRecord:
    """Return the record with which a run begins."""
    scale = FIRST_LOSS_SCALE if config.precision == "fp16" else 1.0
    return CommitRecord(run=run, step=-1, version_id=genesis_version_id(run), ballot=ballot, members=members, loss_scale=scale)


def restoring_record(record: CommitRecord, *, era: int, ballot: Ballot, members: Members) -> CommitRecord:
    """Return a record that sets the run back to `record.version_id`: the same version in the next era, with who holds it."""
    return record.model_copy(update={"era": era, "ballot": ballot, "members": members, "moves": ()})


def is_checkpoint_due(config: RunConfig, record: CommitRecord) -> bool:
    """Tell whether the state that `record` made is to be written to disk."""
    num_commits, every = record.step + 1, config.checkpoint_every
    if num_commits == 0:
        return False
    regular = num_commits == config.total_steps or (every > 0 and num_commits % every == 0)
    return regular or record.order.paused or is_stopped(record)


def is_replayable(config: RunConfig, step: int) -> bool:
    """Tell whether the tickets of `step` use parameters that stay known: the initial ones, or those of a regular checkpoint."""
    base, every = config.base_step(step), config.checkpoint_every
    return config.mode == "sync" and (base == 0 or (every > 0 and base % every == 0))


def checkpoint_writers(config: RunConfig, record: CommitRecord, stage: int) -> tuple[Member, ...]:
    """Return the members of `stage` that write the checkpoint: of those with a directory the first `checkpoint_copies`.

    All members with a directory write, if not even the last checkpoint but one is on every stage's disk: the first ones may not
    be able to.
    """
    able = tuple(x for x in record.members[stage] if x.ready and x.keeps_checkpoints)
    is_late = 0 < 2 * config.checkpoint_every < record.step + 1 - record.saved
    return able if is_late else able[: config.checkpoint_copies]


def clip_coefficient(grad_norm: float, max_grad_norm: float) -> float:
    """Compute the factor by which gradients are clipped, as `torch.nn.utils.clip_grad_norm_` does."""
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


def decide(
    config: RunConfig,
    previous: CommitRecord,
    results: Sequence[StageResult],
    *,
    ballot: Ballot,
    members: Members,
    learning_rate: float,
    reopened: int = 0,
    moves: tuple[Move, ...] = (),
) -> CommitRecord:
    """Return the record after `previous`.

    Its `version_id` is a hash of that of `previous`, the step, the sums and the clipping. The learning rate need not be in
    it: it follows from the step.

    Raises:
        InternalError: if a stage does not cover exactly the step's tickets, or the stages disagree on tokens or on
            tied sums (promise 1 is checked here, before anything is decided).
    """
    step = previous.step + 1
    for stage, result in enumerate(results):
        if result.num_tickets != config.tickets_per_step:
            raise InternalError(f"step {step}, stage {stage}: {result.num_tickets} tickets instead of {config.tickets_per_step}")
    torn = torn_tie(results)
    if torn:
        raise InternalError(f"step {step}: stages hold different sums of the tied parameter {torn}")
    overflow = any(result.num_overflow for result in results)
    tokens = results[-1].tokens
    if not overflow and any(result.tokens != tokens for result in results):
        raise InternalError(f"step {step}: stages disagree on tokens: {[result.tokens for result in results]}")
    norm = math.sqrt(sum(result.sum_squares for result in results)) / tokens if tokens else 0.0
    skipped = overflow or tokens == 0 or not math.isfinite(norm)
    is_clipped = config.mode == "sync" and not skipped  # local updates are clipped where they are made
    coefficient = clip_coefficient(norm, config.max_grad_norm) if is_clipped else 1.0
    scale, age = previous.loss_scale, previous.scale_age + 1
    if config.precision == "fp16" and overflow:
        scale, age = max(1.0, scale / 2), 0
    elif config.precision == "fp16" and age >= SCALE_GROWTH_STEPS:
        scale, age = min(2.0**24, scale * 2), 0
    digests = [result.sum_digest for result in results]
    return CommitRecord(
        run=previous.run,
        step=step,
        version_id=version_id_of(previous.version_id, step, digests, coefficient, skipped),
        previous_version_id=previous.version_id,
        ballot=ballot,
        members=members,
        results=tuple(results),
        tokens=tokens,
        loss_sum=results[-1].loss_sum,
        grad_norm=norm if math.isfinite(norm) else 0.0,
        clip_coefficient=coefficient,
        learning_rate=learning_rate,
        skipped=skipped,
        era=previous.era,
        loss_scale=scale,
        scale_age=age if config.precision == "fp16" else 0,
        reopened=reopened,
        moves=moves,
        saved=max(previous.saved, max(saved_by_all(results), default=0)),
    )


#: Faulty steps in a row after which a run does not go on. The first of them may be due to the last loss scale above 1, and
#: with `delay_steps` the second too.
MAX_FAULTY_STEPS = 3


def is_faulty(record: CommitRecord) -> bool:
    """Tell whether the step was skipped for numbers that are not finite, and no smaller loss scale will help.

    A step that fp16 skips until its loss scale fits is not faulty, nor is one that had no tokens to learn from.
    """
    has_overflow = any(result.num_overflow for result in record.results)
    return record.skipped and (record.loss_scale == 1.0 if has_overflow else record.tokens > 0)


def saved_by_all(results: Sequence[StageResult]) -> set[int]:
    """Return the numbers of commits of the checkpoints that some member of every stage has on disk."""
    return set.intersection(*(set(result.saved) for result in results)) if results else set()


def fault_of(config: RunConfig, record: CommitRecord) -> str:
    """Tell what makes `record` one that no coordinator of the run can have written, or ""; checked before it is handed on."""
    if len(record.members) != config.num_stages:
        return f"members of {len(record.members)} stages"
    if record.step == -1:
        return (
            ""
            if record.version_id == genesis_version_id(record.run) and not record.results
            else "a genesis record with another version"
        )
    if record.step >= config.total_steps:
        return f"step {record.step} of {config.total_steps}"
    if len(record.results) != config.num_stages:
        return f"results of {len(record.results)} stages"
    if any(result.num_tickets != config.tickets_per_step for result in record.results):
        return "a stage without all tickets"
    if torn_tie(record.results):
        return f"different sums of the tied parameter {torn_tie(record.results)}"
    if not record.skipped and not record.tokens:
        return "no tokens, and not skipped"
    if any(max(move.source, move.target) >= config.num_stages for move in record.moves):
        return "a move to or from no stage"
    digests = [result.sum_digest for result in record.results]
    if record.version_id != version_id_of(
        record.previous_version_id, record.step, digests, record.clip_coefficient, record.skipped
    ):
        return "the version does not follow from the averages"
    return ""
