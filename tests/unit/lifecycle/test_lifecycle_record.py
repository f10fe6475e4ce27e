"""The decision that ends a step: promise 1 is checked before it, and its numbers are those of one PyTorch process."""

from __future__ import annotations

import math

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.base.errors import InternalError
from swarm.base.ids import Ballot
from swarm.lifecycle.commit_record import (
    FIRST_LOSS_SCALE,
    MAX_FAULTY_STEPS,
    SCALE_GROWTH_STEPS,
    checkpoint_writers,
    clip_coefficient,
    decide,
    fault_of,
    genesis_record,
    genesis_version_id,
    is_faulty,
    restoring_record,
    version_id_of,
)
from swarm.lifecycle.coverage import torn_tie
from swarm.wire.messages import Attempt, CommitRecord, Member, StageResult

RUN = "1" * 64
CONFIG = RunConfig(num_stages=2, micro_batch_size=1, target_batch_size=4, max_grad_norm=1.0)
BALLOT = Ballot(3, "a" * 40)
MEMBERS = ((Member(peer="a" * 40, incarnation="b" * 16, host="h", port=1),),) * 2
GENESIS = genesis_record(CONFIG, RUN, BALLOT, MEMBERS)


def result(digit: str = "d", **changes: object) -> StageResult:
    values: dict[str, object] = {
        "attempt": Attempt(),
        "average_digest": digit * 64,
        "sum_squares": 1.0,
        "num_tickets": 4,
        "tokens": 10,
        "loss_sum": 0.0,
    }
    return StageResult(**{**values, **changes})


def decided(
    *results: StageResult, config: RunConfig = CONFIG, previous: CommitRecord = GENESIS, **changes: object
) -> CommitRecord:
    values: dict[str, object] = {"ballot": BALLOT, "members": MEMBERS, "learning_rate": 0.1}
    return decide(config, previous, results, **{**values, **changes})  # type: ignore[arg-type]


HEAD_ARGUMENTS = ("1" * 64, 5, ("a" * 64, "b" * 64), 0.5, False)


@pytest.mark.parametrize(
    ("position", "other"),
    [
        (0, "2" * 64),
        (1, 6),
        (2, ("a" * 64, "c" * 64)),
        (2, ("b" * 64, "a" * 64)),
        (2, ("a" * 64,)),
        (3, math.nextafter(0.5, 1)),
        (4, True),
    ],
)
def test_a_version_depends_on_every_input(position: int, other: object) -> None:
    changed = list(HEAD_ARGUMENTS)
    changed[position] = other
    assert version_id_of(*HEAD_ARGUMENTS) == version_id_of(*HEAD_ARGUMENTS)
    assert version_id_of(*changed) != version_id_of(*HEAD_ARGUMENTS)
    assert len(version_id_of(*HEAD_ARGUMENTS)) == 64


def test_the_genesis_version_depends_on_the_run() -> None:
    assert genesis_version_id("1" * 64) != genesis_version_id("2" * 64)
    assert (GENESIS.step, GENESIS.version_id, GENESIS.results) == (-1, genesis_version_id(RUN), ())


def test_a_record_follows_the_one_before() -> None:
    first = decided(result("d"), result("e", loss_sum=25.0))
    second = decided(result("d"), result("e"), previous=first)
    assert (first.step, first.previous_version_id, first.tokens, first.loss) == (0, GENESIS.version_id, 10, 2.5)
    assert (second.step, second.previous_version_id) == (1, first.version_id)
    assert second.version_id != first.version_id


def test_the_version_names_the_model_and_not_who_decided() -> None:
    """Two coordinators that decide on the same averages name the same version."""
    one = decided(result("d"), result("e"))
    other = decided(result("d"), result("e"), ballot=Ballot(9, "f" * 40), members=((), ()), reopened=4)
    assert one.version_id == other.version_id
    assert decided(result("d"), result("f")).version_id != one.version_id


@pytest.mark.parametrize("num_tickets", [0, 3, 5])
@pytest.mark.parametrize("stage", [0, 1])
def test_exactly_once_no_step_is_decided_on_another_number_of_tickets(stage: int, num_tickets: int) -> None:
    results = [result("d"), result("e")]
    results[stage] = result("d", num_tickets=num_tickets)
    with pytest.raises(InternalError, match=f"stage {stage}: {num_tickets} tickets instead of 4"):
        decided(*results)


def test_exactly_once_no_step_is_decided_if_stages_disagree_on_tokens() -> None:
    with pytest.raises(InternalError, match=r"disagree on tokens: \[10, 11\]"):
        decided(result(), result(tokens=11))


@pytest.mark.parametrize("scale", [1e-6, 0.01, 0.999, 1.0, 1.001, 7.0, 1e6])
@pytest.mark.parametrize("max_grad_norm", [0.25, 1.0])
def test_clipping_equals_clip_grad_norm_of_the_whole_model(scale: float, max_grad_norm: float) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 11)]
    tokens = 10
    whole = torch.cat(parts)
    parts = [part / whole.norm() * scale * tokens for part in parts]  # the mean gradient's norm is `scale`
    parameters = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part / tokens
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    record = decided(
        *(result(digit, sum_squares=float(part.square().sum())) for digit, part in zip("de", parts, strict=True)),
        config=CONFIG.model_copy(update={"max_grad_norm": max_grad_norm}),
    )
    assert record.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert record.clip_coefficient <= 1.0
    assert not record.skipped
    for parameter, part in zip(parameters, parts, strict=True):
        torch.testing.assert_close(part / tokens * record.clip_coefficient, parameter.grad, rtol=1e-12, atol=0.0)


def test_a_small_gradient_is_not_touched() -> None:
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(2.0, 1.0) == pytest.approx(0.5, rel=1e-5)


def test_a_step_is_skipped_on_overflow() -> None:
    clean = decided(result("d"), result("e"))
    record = decided(result("d"), result("e", num_overflow=1))
    assert (record.skipped, record.clip_coefficient, clean.skipped) == (True, 1.0, False)
    assert record.version_id != clean.version_id


def test_stages_may_disagree_on_tokens_of_a_skipped_step() -> None:
    """The ticket that overflowed at one stage only is not in that stage's count."""
    assert decided(result("d", tokens=7, num_overflow=1), result("e", tokens=10)).skipped


def test_a_step_without_tokens_is_skipped_and_divides_by_nothing() -> None:
    record = decided(result("d", tokens=0, sum_squares=0.0), result("e", tokens=0, sum_squares=0.0))
    assert (record.skipped, record.grad_norm, record.loss) == (True, 0.0, None)
    assert not is_faulty(record), "there was nothing to learn, and nothing wrong"


def test_a_step_whose_norm_is_not_finite_is_skipped() -> None:
    """Each stage's sum of squares is finite, their sum is not."""
    record = decided(result("d", sum_squares=1.7e308), result("e", sum_squares=1.7e308))
    assert (record.skipped, record.clip_coefficient) == (True, 1.0)
    assert is_faulty(record)


def test_a_skipped_step_has_no_loss_and_is_faulty_where_no_loss_scale_is_to_blame() -> None:
    record = decided(result("d"), result("e", num_overflow=1))
    assert (record.loss, is_faulty(record)) == (None, True)
    clean = decided(result("d"), result("e"))
    assert (clean.loss, is_faulty(clean)) == (pytest.approx(clean.loss_sum / clean.tokens), False)


# ---------------------------------------------------------------------------------------------------- the loss scale

HALF = CONFIG.model_copy(update={"precision": "fp16"})


def test_only_half_precision_has_a_loss_scale() -> None:
    assert GENESIS.loss_scale == 1.0
    assert decided(result("d", num_overflow=1), result("e")).loss_scale == 1.0
    assert genesis_record(HALF, RUN, BALLOT, MEMBERS).loss_scale == FIRST_LOSS_SCALE


def test_an_overflow_halves_the_loss_scale_down_to_one() -> None:
    record = genesis_record(HALF, RUN, BALLOT, MEMBERS)
    scales = []
    for _ in range(20):
        record = decided(result("d", num_overflow=1), result("e"), config=HALF, previous=record)
        scales.append(record.loss_scale)
        assert record.skipped
    assert scales == [max(1.0, FIRST_LOSS_SCALE / 2**n) for n in range(1, 21)]


@pytest.mark.parametrize("first_scale", [FIRST_LOSS_SCALE, 2.0**24])
@pytest.mark.parametrize("delay_steps", [0, 1])
def test_what_fp16_skips_until_its_loss_scale_fits_stops_no_run(first_scale: float, delay_steps: int) -> None:
    """Each skip at a scale above 1 is the scale's; with delayed updates one more comes from before the last halving."""
    record = genesis_record(HALF, RUN, BALLOT, MEMBERS).model_copy(update={"loss_scale": first_scale})
    faulty = most = 0
    for _ in range(int(math.log2(first_scale)) + delay_steps):
        record = decided(result("d", num_overflow=1), result("e"), config=HALF, previous=record)
        faulty = faulty + 1 if is_faulty(record) else 0
        most = max(most, faulty)
    assert record.loss_scale == 1.0
    assert most < MAX_FAULTY_STEPS
    for _ in range(MAX_FAULTY_STEPS):  # nothing is left to halve
        record = decided(result("d", num_overflow=1), result("e"), config=HALF, previous=record)
        faulty += is_faulty(record)
    assert faulty >= MAX_FAULTY_STEPS


def test_the_loss_scale_doubles_after_enough_good_steps_in_a_row() -> None:
    record = genesis_record(HALF, RUN, BALLOT, MEMBERS)
    for _ in range(SCALE_GROWTH_STEPS - 1):
        record = decided(result("d"), result("e"), config=HALF, previous=record)
    assert record.loss_scale == FIRST_LOSS_SCALE
    interrupted = decided(result("d", num_overflow=1), result("e"), config=HALF, previous=record)
    interrupted = decided(result("d"), result("e"), config=HALF, previous=interrupted)
    assert interrupted.loss_scale == FIRST_LOSS_SCALE / 2, "the count starts again"
    record = decided(result("d"), result("e"), config=HALF, previous=record)
    assert record.loss_scale == 2 * FIRST_LOSS_SCALE
    assert decided(result("d"), result("e"), config=HALF, previous=record).loss_scale == 2 * FIRST_LOSS_SCALE


def test_a_restoring_record_names_the_same_version_in_the_next_era() -> None:
    record = decided(result("d"), result("e"))
    restored = restoring_record(record, era=record.era + 1, ballot=Ballot(9, "f" * 40), members=MEMBERS)
    assert (restored.version_id, restored.step, restored.previous_version_id) == (
        record.version_id,
        record.step,
        record.previous_version_id,
    )
    assert restored.era == record.era + 1
    following = decided(result("d"), result("f"), previous=restored)
    assert following.era == restored.era, "what comes after stays in the era"


def test_a_record_names_the_newest_checkpoint_that_every_stage_has() -> None:
    first = decided(result("d", saved=(2, 4)), result("e", saved=(4, 6)))
    assert first.saved == 4
    assert decided(result("d", saved=(6,)), result("e"), previous=first).saved == 4, "whoever has it may be away"
    assert decided(result("d", saved=(2,)), result("e", saved=(2,)), previous=first).saved == 4
    assert decided(result("d", saved=(4, 8)), result("e", saved=(8,)), previous=first).saved == 8


def test_all_write_where_those_who_were_to_write_could_not() -> None:
    config = CONFIG.model_copy(update={"checkpoint_every": 5, "checkpoint_copies": 1})
    four = tuple(
        Member(peer=digit * 40, incarnation="b" * 16, host="h", port=1, ready=digit != "a", keeps_checkpoints=digit != "b")
        for digit in "abcd"
    )
    due = decided(result("d"), result("e"), members=(four, four)).model_copy(update={"step": 19})
    assert checkpoint_writers(config, due.model_copy(update={"saved": 10}), 0) == four[2:3]
    assert checkpoint_writers(config, due.model_copy(update={"saved": 5}), 0) == four[2:]
    last_only = config.model_copy(update={"checkpoint_every": 0})
    assert checkpoint_writers(last_only, due, 1) == four[2:3]


def test_averages_that_disagree_on_a_tied_sum_are_never_decided_on() -> None:
    """They are of different attempts; copies of the parameter would part for ever."""
    one, same, other = (result("d", tied=(("embedding", digit * 64),)) for digit in "aab")
    assert torn_tie([one, result("e"), same]) == ""
    assert torn_tie([one, result("e"), other]) == "embedding"
    record = decided(one, same)
    assert fault_of(CONFIG, record) == ""
    with pytest.raises(InternalError, match="different sums of the tied parameter embedding"):
        decided(one, other)
    assert "tied parameter embedding" in fault_of(CONFIG, record.model_copy(update={"results": (one, other)}))


def test_records_have_one_order_on_every_peer() -> None:
    """By era, step, smaller head and ballot; what differs in nothing else than the ballot is one version of the model."""
    base = decided(result("d"), result("e"))
    ascending = [
        base.model_copy(
            update={"era": era, "step": step, "version_id": (version_id + str(step)) * 32, "ballot": Ballot(counter, "a" * 40)}
        )
        for era in (0, 1)
        for step in (3, 4)
        for version_id in "ba"
        for counter in (1, 2)
    ]
    for i, older in enumerate(ascending):
        assert older.newer_than(None)
        assert not older.newer_than(older)
        for newer in ascending[i + 1 :]:
            assert newer.newer_than(older)
            assert not older.newer_than(newer)
            assert newer.relists(older) == (
                (newer.era, newer.version_id, newer.step) == (older.era, older.version_id, older.step)
            )
    assert not base.relists(None)
