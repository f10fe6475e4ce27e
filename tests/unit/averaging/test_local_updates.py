"""Local updates: the outer step's oracles, and one peer's copy against plain loops."""

from __future__ import annotations

import pytest
import torch

from swarm.averaging.compressors.choice import compressor_of
from swarm.averaging.local_updates import LocalAccumulator, OwnCopy
from swarm.base.config import RunConfig
from swarm.base.ids import ZERO_BALLOT
from swarm.lifecycle.commit_record import genesis_record
from swarm.lifecycle.step import LedgerEntry
from swarm.policy.schedule import learning_rate
from swarm.stage.device import KnownNumbers
from swarm.stage.layout import Layout
from swarm.stage.moments import OptimizerState
from swarm.stage.optimizers.choice import inner_optimizer_of, optimizer_of
from swarm.stage.optimizers.interface import Optimizer
from swarm.stage.versions import Version, make_version
from swarm.wire.messages import Attempt

LAYOUT = Layout.of(torch.nn.Linear(3, 2))


def config_of(**changes: object) -> RunConfig:
    base: dict[str, object] = {
        "mode": "local",
        "micro_batch_size": 4,
        "inner_batch_size": 8,
        "target_batch_size": 32,
        "compression": "none",
        "warmup_steps": 0,
        "max_grad_norm": 1e9,
    }
    return RunConfig(**{**base, **changes})  # type: ignore[arg-type]


def outer_of(config: RunConfig, masters: torch.Tensor) -> Version:
    record = genesis_record(config, "a" * 64, ZERO_BALLOT, ((),) * config.num_stages)
    return make_version(record, LAYOUT, masters, torch.float32)


def outer_optimizer(config: RunConfig) -> Optimizer:
    return optimizer_of(config, LAYOUT, dtype=torch.float32, device="cpu")


def own_of(config: RunConfig, optimizer: type[Optimizer] | None = None) -> OwnCopy:
    inner = inner_optimizer_of(config, outer_optimizer(config))
    if optimizer is not None:
        inner = optimizer(config, inner.moments)
    return OwnCopy(inner, torch.float32, compressor_of(config, LAYOUT))


class Sgd(Optimizer):
    """Plain descent."""

    def update(self, masters, total, state, *, step, learning_rate, factor=1.0):  # type: ignore[no-untyped-def]
        return masters - learning_rate * factor * total, state


def at_rest(num_elements: int) -> OptimizerState:
    return OptimizerState({"first": torch.zeros(num_elements), "second": torch.zeros(num_elements)}, 0)


def accumulator_of(own: OwnCopy, step: int = 0) -> LocalAccumulator:
    return LocalAccumulator(step, own, dtype=torch.float32, device="cpu")


def add(accumulator: LocalAccumulator, index: int, gradient: torch.Tensor, tokens: int = 2) -> str:
    accumulator.ledger.grant(index, accumulator.ledger.attempt)
    return accumulator.add(index, LedgerEntry(tokens, 0.0), list(LAYOUT.views(gradient)))


def test_the_oracle_of_the_outer_step() -> None:
    """theta = 1, delta = .3 -> .601, then delta = .1 -> .2979."""
    config = config_of()
    masters, state = torch.ones(1), at_rest(1)
    masters, state = outer_optimizer(config).update(masters, torch.tensor([0.9]), state, step=0, learning_rate=0.0, factor=1 / 3)
    assert float(masters) == pytest.approx(0.601)
    masters, state = outer_optimizer(config).update(masters, torch.tensor([0.1]), state, step=1, learning_rate=0.0, factor=1.0)
    assert float(masters) == pytest.approx(0.2979)


def test_the_outer_step_is_torchs_sgd_with_nesterov_momentum() -> None:
    config = config_of(outer_learning_rate=0.3, outer_momentum=0.8)
    theta = torch.randn(9)
    plain = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([plain], lr=0.3, momentum=0.8, nesterov=True)
    state = at_rest(9)
    for step in range(5):
        difference = torch.randn(9)
        plain.grad = difference.clone()
        sgd.step()
        theta, state = outer_optimizer(config).update(theta, difference, state, step=step, learning_rate=0.0, factor=1.0)
    assert torch.allclose(theta, plain.detach(), atol=1e-6)


def test_with_rate_one_and_no_momentum_it_is_plain_averaging() -> None:
    config = config_of(outer_learning_rate=1.0, outer_momentum=0.0)
    outer, copies = torch.randn(8), [torch.randn(8) for _ in range(3)]
    total = sum(outer - x for x in copies)
    averaged, _ = outer_optimizer(config).update(outer, total, at_rest(8), step=0, learning_rate=0.0, factor=1 / 3)
    assert torch.allclose(averaged, sum(copies) / 3, atol=1e-6)


def test_only_the_fragment_whose_turn_it_is_moves() -> None:
    config = config_of(fragments=3)
    outer = torch.zeros(8)
    moved, state = outer_optimizer(config).update(outer, torch.ones(8), at_rest(8), step=1, learning_rate=0.0, factor=1.0)
    assert moved.nonzero().flatten().tolist() == state.tensors["first"].nonzero().flatten().tolist() == [1, 4, 7]


def test_a_copy_moves_alike_by_gradients_whose_memory_is_only_borrowed() -> None:
    config, theta = config_of(), torch.randn(8)
    plain, borrowed = (accumulator_of(own_of(config)) for _ in range(2))
    place = torch.empty(8)
    for accumulator in (plain, borrowed):
        accumulator.version_for(outer_of(config, theta), 0)
    for index in range(4):
        gradient = torch.randn(8)
        add(plain, index, gradient)
        borrowed.ledger.grant(index, borrowed.ledger.attempt)
        place.copy_(gradient)
        numbers = KnownNumbers(LedgerEntry(2, 0.0), is_finite=True)
        assert borrowed.add_unseen(index, numbers, torch.ones(1, dtype=torch.int32), list(LAYOUT.views(place)), borrowed=True)
    place.zero_()
    for accumulator in (plain, borrowed):
        accumulator.freeze(Attempt(n=1))
    assert torch.equal(plain.contribution(), borrowed.contribution())


def test_with_one_inner_step_of_sgd_it_is_data_parallel_sgd() -> None:
    """Peers with unequal shares of the batch; H = 1, outer rate 1, no momentum."""
    config = config_of(inner_batch_size=32, outer_learning_rate=1.0, outer_momentum=0.0)
    theta = torch.randn(8)
    gradients = torch.randn(8, 8)
    accumulators = [accumulator_of(own_of(config, Sgd)) for _ in range(3)]
    for index in range(8):
        accumulator = accumulators[[0, 0, 0, 0, 1, 1, 2, 1][index]]
        accumulator.version_for(outer_of(config, theta), index)
        add(accumulator, index, gradients[index])
    total = torch.zeros(8)
    for accumulator in accumulators:
        accumulator.freeze(Attempt(n=1))
        total += accumulator.contribution()
    averaged, _ = outer_optimizer(config).update(theta, total, at_rest(8), step=0, learning_rate=0.0, factor=1 / 16)
    assert torch.allclose(averaged, theta - learning_rate(config, 0) * gradients.sum(0) / 16, atol=1e-6)


def test_a_copy_moves_as_torchs_adamw_does_and_moments_go_on_after_the_commit() -> None:
    config = config_of(max_grad_norm=0.5)
    own, theta = own_of(config), torch.randn(8)
    plain = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.AdamW(
        [plain], betas=(config.beta1, config.beta2), eps=config.epsilon, weight_decay=config.weight_decay
    )
    for step in range(2):
        accumulator = accumulator_of(own, step)
        accumulator.version_for(outer_of(config, theta), 0)
        with torch.no_grad():
            plain.copy_(theta)
        for index in range(5):  # two inner steps of two tickets, and what is left
            gradient = torch.randn(8)
            add(accumulator, index, gradient)
            plain.grad = gradient if plain.grad is None else plain.grad + gradient
            if index % 2 == 1 or index == 4:
                plain.grad /= 4 if index % 2 else 2
                torch.nn.utils.clip_grad_norm_([plain], 0.5)
                optimizer.param_groups[0]["lr"] = learning_rate(config, step)
                optimizer.step()
                plain.grad = None
        accumulator.freeze(Attempt(n=1))
        contribution = accumulator.contribution()
        assert contribution is not None
        assert torch.allclose(contribution, (theta - plain.detach()) * 10, atol=1e-5)
        accumulator.committed()
        theta = plain.detach().clone()
    assert own.inner is not None
    assert own.inner.num_updates == 6


def test_tickets_compute_with_the_newest_copy() -> None:
    config = config_of()
    accumulator, outer = accumulator_of(own_of(config)), outer_of(config, torch.zeros(8))
    assert accumulator.version_for(outer, 0) is outer
    add(accumulator, 0, torch.ones(8))
    assert accumulator.version_for(outer, 0) is outer
    add(accumulator, 1, torch.ones(8))
    moved = accumulator.version_for(outer, 0)
    assert (moved.masters != 0).all()
    assert moved.version_id == outer.version_id


def test_an_attempt_that_is_opened_again_goes_on_from_the_copy() -> None:
    config = config_of()
    accumulator, outer = accumulator_of(own_of(config)), outer_of(config, torch.zeros(8))
    accumulator.version_for(outer, 0)
    add(accumulator, 0, torch.ones(8))
    accumulator.freeze(Attempt(n=1))
    first = accumulator.contribution()
    accumulator.ledger.collect(Attempt(n=2), freeze=False)
    add(accumulator, 1, torch.ones(8))
    accumulator.freeze(Attempt(n=3))
    second = accumulator.contribution()
    assert first is not None
    assert second is not None
    assert (second.abs() > first.abs()).all()


@pytest.mark.parametrize("how", ["discarded", "spoilt"])
def test_what_does_not_count_has_not_moved_the_copy(how: str) -> None:
    config = config_of(inner_batch_size=4)
    own = own_of(config)
    accumulator, outer = accumulator_of(own), outer_of(config, torch.zeros(8))
    accumulator.version_for(outer, 0)
    add(accumulator, 0, torch.ones(8))
    if how == "discarded":
        accumulator.discard()
    else:  # each is finite, and their sum is not; it comes with what the last update left over
        accumulator._per_update = 9
        add(accumulator, 1, torch.full((8,), 2.0**60))
        add(accumulator, 2, torch.full((8,), 2.0**60))
        accumulator.freeze(Attempt(n=1))
        assert not accumulator.ledger.entries
    assert accumulator.contribution() is None
    assert accumulator.version_for(outer, 0) is outer
    assert own.inner is None


def test_what_was_not_sent_stays_in_the_copy() -> None:
    config = config_of(fragments=2)
    own = own_of(config)
    own.compressor.residual = torch.full((8,), 0.5)
    assert torch.equal(accumulator_of(own).version_for(outer_of(config, torch.ones(8)), 0).masters, torch.full((8,), 0.5))
    own.forget()
    assert torch.equal(accumulator_of(own).version_for(outer_of(config, torch.ones(8)), 0).masters, torch.ones(8))


class Rates(Sgd):
    """Plain descent that notes its learning rates."""

    seen: list[float]

    def update(self, masters, total, state, *, step, learning_rate, factor=1.0):  # type: ignore[no-untyped-def]
        self.seen.append(learning_rate)
        return super().update(masters, total, state, step=step, learning_rate=learning_rate, factor=factor)


def rates_of(config: RunConfig, num_peers: int, steps: int = 2) -> list[list[float]]:
    """The learning rate of each update of each peer; tickets go to the peers in turn."""
    owns = [own_of(config, Rates) for _ in range(num_peers)]
    for own in owns:
        own.optimizer.seen = []  # type: ignore[attr-defined]
    for step in range(steps):
        accumulators = [accumulator_of(own, step) for own in owns]
        for index in range(config.tickets_per_step):
            accumulator = accumulators[index % num_peers]
            accumulator.version_for(outer_of(config, torch.zeros(8)), index)
            add(accumulator, index, torch.ones(8))
        for accumulator in accumulators:
            accumulator.freeze(Attempt(n=1))
    return [own.optimizer.seen for own in owns]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_peers", [1, 2, 4])
def test_each_peer_takes_the_inner_steps_however_many_there_are_and_the_schedule_counts_them(num_peers: int) -> None:
    config = config_of(inner_batch_size=0, inner_steps=4, target_batch_size=64, warmup_steps=3, total_steps=2)
    expected = [learning_rate(config, step, inner) for step in range(2) for inner in range(4)]
    assert expected[:3] == pytest.approx([config.learning_rate * part / 3 for part in (1, 2, 3)])
    assert learning_rate(config, 1) == expected[4]
    assert rates_of(config, num_peers) == [expected] * num_peers


def test_samples_of_a_peers_own_leave_inner_steps_to_the_number_of_peers() -> None:
    config = config_of(inner_batch_size=8, target_batch_size=64, warmup_steps=1, total_steps=2)
    assert [len(seen) for seen in rates_of(config, 2)] == [8, 8]
    assert [len(seen) for seen in rates_of(config, 4)] == [4, 4, 4, 4]
    assert rates_of(config, 4)[0] == [learning_rate(config, 0)] * 2 + [learning_rate(config, 1)] * 2


def test_an_inner_step_waits_for_micro_batches_that_have_begun_but_not_for_ever() -> None:
    """Of the first inner step 0 and 2 come here, and 2 is late: it counts in the next one."""
    config = config_of(inner_batch_size=0, inner_steps=2, target_batch_size=32)
    accumulator, outer = accumulator_of(own_of(config)), outer_of(config, torch.zeros(8))
    accumulator.version_for(outer, 0)
    accumulator.version_for(outer, 2)
    add(accumulator, 0, torch.ones(8))
    assert accumulator.version_for(outer, 4) is outer, "2 may still come"
    add(accumulator, 4, torch.ones(8))
    moved = accumulator.version_for(outer, 6)
    assert (moved.masters != 0).all(), "4 is of the second inner step: the first is over"
    add(accumulator, 2, torch.ones(8))
    accumulator.freeze(Attempt(n=1))
    assert len(accumulator.ledger.entries) == 3
    assert accumulator._inner is not None
    assert accumulator._inner.num_updates == 2
