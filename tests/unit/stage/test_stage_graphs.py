"""CUDA graphs of a stage: the same gradients as its kernels started one by one, whoever is under way beside whom.

Without a GPU calls are recorded by a stand-in, which has the same fixed places.
"""

from __future__ import annotations

import _thread
import gc
import threading
import warnings

import pytest
import torch

from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import LARGEST, Accumulator
from swarm.stage.compute import Activation, Gradients, StageCompute
from swarm.stage.device import KnownNumbers
from swarm.stage.gpu import graphs
from swarm.stage.gpu.kernels import MAX_TOGETHER, survey
from swarm.stage.memory_budget import MemoryBudget
from swarm.stage.module import Tensors
from swarm.stage.versions import Version, make_version
from swarm.wire.messages import CommitRecord
from tests.unit.stage.recorded_calls import install

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

SAMPLES, T, VOCAB, HIDDEN = 2, 12, 256, 96
NUM_STAGES = 3
RECORD = CommitRecord(run="1" * 64, step=-1, version_id="2" * 64, ballot=ZERO_BALLOT, members=((),) * NUM_STAGES, loss_scale=4.0)


@pytest.fixture(autouse=True)
def _pays_always(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        install(monkeypatch)
    monkeypatch.setattr(graphs, "_PAY", float("inf"))


def config_of(**changes: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": "llama-tiny",
            "num_stages": NUM_STAGES,
            "precision": "fp64",
            "sequence_length": T,
            "micro_batch_size": SAMPLES,
            "target_batch_size": 4 * SAMPLES,
            **changes,
        }
    )


def stage_of(stage: int, *, budget: MemoryBudget | None, **changes: object) -> tuple[StageCompute, list[Version]]:
    """A stage on the GPU with two versions; with a budget it has tried graphs."""
    config = config_of(**changes)
    factory = factory_of(config)
    compute = StageCompute(factory, stage, precision=config.precision, seed=3, device=DEVICE, budget=budget)
    masters = compute.initial_masters()
    versions = [make_version(RECORD, compute.layout, masters * scale, compute.dtype) for scale in (1.0, 1.5)]
    if budget is not None:
        try_graphs(compute, versions[0])
    return compute, versions


def try_graphs(compute: StageCompute, version: Version) -> None:
    inputs, labels, _ = drawn(compute, 0)
    compute.try_graphs(version, inputs, labels)


def hidden_of(compute: StageCompute) -> int:
    sizes = (shape[-1] for name, shape in zip(compute.layout.names, compute.layout.shapes, strict=True) if "norm" in name)
    return next(sizes, HIDDEN)


def drawn(compute: StageCompute, seed: int, *, samples: int = SAMPLES) -> tuple[Tensors, Tensors | None, Tensors | None]:
    """Inputs, labels and the gradients of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (samples, T), generator=generator).to(DEVICE)
    shape = samples, T, hidden_of(compute)
    hidden, gradient = (torch.randn(shape, generator=generator, dtype=compute.dtype).to(DEVICE) for _ in range(2))
    inputs = {"input_ids": ids} if compute.stage == 0 else {"hidden_states": hidden}
    return inputs, {"labels": ids} if compute.last else None, None if compute.last else {"hidden_states": gradient}


def kept(gradients: Gradients) -> list[torch.Tensor]:
    return [g.clone() for g in [*gradients.inputs.values(), *gradients.parameters] if g is not None]


def forward(compute: StageCompute, version: Version, seed: int, **options: int) -> Activation:
    inputs, labels, _ = drawn(compute, seed, **options)
    return compute.forward(version, Ticket(0, seed), inputs, labels, keep_graph=True)


def backward(compute: StageCompute, activation: Activation, seed: int, **options: int) -> list[torch.Tensor]:
    return kept(compute.backward(activation, drawn(compute, seed, **options)[2]))


def require_like(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert float((one - other).norm()) <= 1e-12 * float(other.norm())


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_graphs_give_the_gradients_of_launches_for_interleaved_micro_batches_of_two_versions(stage: int) -> None:
    plain, versions = stage_of(stage, budget=None)
    compute, own = stage_of(stage, budget=MemoryBudget(2**30))
    expected = {}
    for seed in range(8):
        activation = forward(plain, versions[seed % 2], seed)
        outputs = {n: t.detach().clone() for n, t in (activation.outputs or {}).items()}
        expected[seed] = outputs, backward(plain, activation, seed)
    under_way: dict[int, Activation] = {}
    for event in ("f0", "f1", "f2", "b1", "f3", "b0", "b3", "f4", "f5", "f6", "b6", "b2", "f7", "b7", "b4", "b5"):
        seed = int(event[1])
        if event[0] == "f":
            activation = under_way[seed] = forward(compute, own[seed % 2], seed)
            assert activation.lease is not None
            for name, value in (activation.outputs or {}).items():
                require_like([value.double()], [expected[seed][0][name].double()])
        else:
            require_like(backward(compute, under_way.pop(seed), seed), expected[seed][1])
    assert compute._captured is not None
    assert len(compute._captured.free) == 4, "as many calls as micro-batches were under way at once, all free again"


@pytest.mark.parametrize("shape", [(1, 1, HIDDEN), (HIDDEN,), (SAMPLES, T, 1), None])
def test_a_gradient_of_a_wrong_shape_is_refused_as_without_graphs(shape: tuple[int, ...] | None) -> None:
    plain, versions = stage_of(1, budget=None)
    compute, own = stage_of(1, budget=MemoryBudget(2**30))
    given = {} if shape is None else {"hidden_states": torch.ones(shape, dtype=torch.float64, device=DEVICE)}
    for stage, version in ((plain, versions[0]), (compute, own[0])):
        activation = forward(stage, version, 1)
        with pytest.raises(RuntimeError):
            stage.backward(activation, given)
        assert (activation.outputs, activation.lease) == (None, None)
    assert compute._captured is not None
    assert len(compute._captured.free) == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="the stand-in can be told to fail")
def test_a_later_call_that_cannot_be_captured_leaves_the_budget_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(2**30)
    compute, versions = stage_of(1, budget=budget)
    first, before = forward(compute, versions[0], 1), budget.used_bytes

    def fail(stage: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(graphs, "_CapturedCall", fail)
    assert forward(compute, versions[0], 2).lease is None
    assert budget.used_bytes == before
    assert backward(compute, first, 1)
    assert forward(compute, versions[0], 3).lease is not None


@pytest.mark.skipif(DEVICE != "cpu", reason="the stand-in can be told to fail")
def test_memory_that_is_short_before_the_first_capture_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "Stream", fail)
    budget = MemoryBudget(2**30)
    compute, _ = stage_of(1, budget=budget)
    assert (compute._captured, budget.used_bytes) == (None, 0)


def test_an_error_of_the_first_capture_leaves_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: object) -> None:
        raise ValueError("only when captured")

    monkeypatch.setattr(graphs, "_CapturedCall", fail)
    budget = MemoryBudget(2**30)
    compute, versions = stage_of(1, budget=budget)
    assert (compute._captured, budget.used_bytes) == (None, 0)
    assert backward(compute, forward(compute, versions[0], 1), 1)


def test_what_has_other_shapes_is_launched() -> None:
    plain, versions = stage_of(1, budget=None)
    compute, own = stage_of(1, budget=MemoryBudget(2**30))
    activation = forward(compute, own[0], 5, samples=1)
    assert activation.lease is None
    expected = backward(plain, forward(plain, versions[0], 5, samples=1), 5, samples=1)
    require_like(backward(compute, activation, 5, samples=1), expected)


def test_a_graph_that_was_dropped_is_computed_again_and_one_that_nobody_wants_is_free() -> None:
    plain, versions = stage_of(2, budget=None)
    compute, own = stage_of(2, budget=MemoryBudget(2**30))
    activation = forward(compute, own[0], 1)
    activation.drop()
    activation.take(*drawn(compute, 1)[:2])
    assert compute._captured is not None
    assert len(compute._captured.free) == 1
    require_like(backward(compute, activation, 1), backward(plain, forward(plain, versions[0], 1), 1))
    assert activation.recomputed
    del activation
    for seed in range(5):
        forward(compute, own[0], seed)
    assert len(compute._captured.free) == 1, "a request that is given up gives its call back"


def test_a_budget_without_room_is_left_alone() -> None:
    budget = MemoryBudget(2**12)
    compute, _ = stage_of(1, budget=budget)
    assert (compute._captured, budget.used_bytes) == (None, 0)


def test_what_is_captured_counts_in_the_budget_until_it_is_let_go_and_never_takes_more_than_half() -> None:
    budget = MemoryBudget(2**30)
    compute, versions = stage_of(1, budget=budget)
    assert compute._captured is not None
    shared = sum(t.nbytes for t in versions[0].parameters.values())
    each = budget.used_bytes - shared
    assert each == compute._captured.free[0].num_bytes > 0
    compute.let_go()
    assert budget.used_bytes == 0

    budget = MemoryBudget(2 * (shared + 2 * each))
    compute, versions = stage_of(1, budget=budget)
    inputs = drawn(compute, 1)[0]
    assert compute.graph_bytes_like(inputs) == 0, "a call is free"
    first = forward(compute, versions[0], 1)
    assert 0 < compute.graph_bytes_like(inputs) <= each
    second = forward(compute, versions[0], 2)
    assert budget.used_bytes == shared + 2 * each
    third = forward(compute, versions[0], 3)
    assert third.lease is None
    assert 0 < third.graph_bytes <= each
    assert backward(compute, third, 3)
    assert backward(compute, first, 1)
    assert forward(compute, versions[0], 4).lease is not None
    compute.let_go()
    assert budget.used_bytes == 0
    assert backward(compute, second, 2), "a micro-batch that is under way goes on"
    assert forward(compute, versions[0], 1).lease is None


def test_gradients_that_wait_for_the_sum_are_not_written_to_by_the_next_micro_batches() -> None:
    plain, versions = stage_of(1, budget=None)
    compute, own = stage_of(1, budget=MemoryBudget(2**30))
    sums = [Accumulator(0, compute.layout, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    for seed in range(6):
        for stage, version, total in ((plain, versions[seed % 2], sums[0]), (compute, own[seed % 2], sums[1])):
            found = stage.backward(forward(stage, version, seed), drawn(stage, seed)[2])
            total.ledger.grant(seed, total.ledger.attempt)
            valid = survey(found.parameters, LARGEST, DEVICE).is_valid
            numbers = KnownNumbers(LedgerEntry(1, 0.0), is_finite=True)
            assert total.add_unseen(seed, numbers, valid, found.parameters, borrowed=found.borrowed)
    assert compute._captured is not None
    del found
    assert len(compute._captured.free) == MAX_TOGETHER - 2, "two gradients wait: their calls are in use"
    expected, contribution = (total.contribution() for total in sums)
    assert contribution is not None
    assert expected is not None
    require_like([contribution], [expected])
    assert len(compute._captured.free) == MAX_TOGETHER, "never more than may wait at once"


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_a_call_keeps_its_gradients_whatever_other_calls_compute(stage: int) -> None:
    size = 1024 if DEVICE != "cpu" else HIDDEN  # torch has other memory for tensors of less than a MiB
    options = {"hidden_size": size, "intermediate_size": 3 * size, "vocab_size": VOCAB}
    compute, versions = stage_of(stage, budget=MemoryBudget(2**33), model_options=options)

    def trained(activation: Activation, seed: int) -> tuple[Gradients, list[torch.Tensor]]:
        assert activation.lease is not None
        found = compute.backward(activation, drawn(compute, seed)[2])
        return found, [g.clone() for g in found.parameters if g is not None]

    waiting: list[tuple[Gradients, list[torch.Tensor]]] = []
    for seed in range(0, 12, 3):
        under_way = [forward(compute, versions[0], seed + i) for i in range(3)]
        waiting += [trained(activation, seed + i) for i, activation in enumerate(under_way)]
        for found, as_it_was in waiting:
            ours = [g for g in found.parameters if g is not None]
            assert all(torch.equal(one, other) for one, other in zip(ours, as_it_was, strict=True))
        del found, ours, waiting[:2]
    assert compute._captured is not None
    assert len(compute._captured.free) < 6, "calls are used again"


def test_gradients_are_wanted_back_where_memory_for_another_micro_batch_is_short() -> None:
    budget = MemoryBudget(2**30)
    compute, versions = stage_of(1, budget=budget)
    assert compute._captured is not None
    parameter_bytes = sum(t.nbytes for t in versions[0].parameters.values())
    each = budget.used_bytes - parameter_bytes
    compute.let_go()
    compute, versions = stage_of(1, budget=MemoryBudget(2 * (parameter_bytes + 2 * each)))
    first, second = forward(compute, versions[0], 1), forward(compute, versions[0], 2)
    found = compute.backward(first, drawn(compute, 1)[2])
    assert found.borrowed
    assert forward(compute, versions[0], 3).lease is None
    del found
    assert forward(compute, versions[0], 3).lease is not None
    assert not compute.backward(second, drawn(compute, 2)[2]).borrowed, "another call is free"


def test_graphs_that_do_not_pay_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_PAY", 0.0)
    budget = MemoryBudget(2**30)
    compute, _ = stage_of(1, budget=budget)
    assert (compute._captured, budget.used_bytes) == (None, 0)


@NEEDS_CUDA
def test_a_capture_that_cuda_ends_leaves_stream_allocator_and_generator_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "run_and_tell_if_it_waits", lambda call: False)
    budget = MemoryBudget(2**30)
    compute, versions = stage_of(1, budget=None)
    compute._budget, compute._may_capture = budget, True
    compute._module.blocks[0].register_forward_pre_hook(lambda module, args: int((args[0] > 0).sum()) and None)  # type: ignore[union-attr,index]
    torch.manual_seed(5)
    expected = torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)
    torch.manual_seed(5)
    torch.rand(8, device=DEVICE)
    try_graphs(compute, versions[0])
    assert (compute._captured, budget.used_bytes) == (None, 0)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.rand(8, device=DEVICE), expected[1])
    torch.manual_seed(5)
    assert torch.equal(torch.rand(8, device=DEVICE), expected[0])
    other = torch.cuda.Stream()

    def used_by_two_streams() -> int:
        for _ in range(64):
            torch.empty(2**20, device=DEVICE).record_stream(other)
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    before = used_by_two_streams()
    assert [used_by_two_streams() for _ in range(8)][-1] <= before, "such memory is used again"


@NEEDS_CUDA
def test_compiled_blocks_are_captured() -> None:
    """What was compiled for launches serves the recording: a compilation within it would end it."""
    plain, versions = stage_of(1, budget=None)
    config = config_of()
    compute = StageCompute(
        factory_of(config), 1, precision=config.precision, seed=3, device=DEVICE, compile=True, budget=MemoryBudget(2**30)
    )
    compute.warm_up(versions[0], num_samples=SAMPLES, sequence_length=T)
    try_graphs(compute, versions[0])
    for seed in range(3):
        activation = forward(compute, versions[seed % 2], seed)
        assert activation.lease is not None
        require_like(backward(compute, activation, seed), backward(plain, forward(plain, versions[seed % 2], seed), seed))


@NEEDS_CUDA
def test_a_module_that_asks_the_device_is_launched() -> None:
    plain, versions = stage_of(1, budget=None)
    budget = MemoryBudget(2**30)
    asked: list[int] = []
    compute, _ = stage_of(1, budget=None)
    compute._budget, compute._may_capture = budget, True
    compute._module.blocks[0].register_forward_pre_hook(lambda module, args: asked.append(int((args[0] > 0).sum())))  # type: ignore[union-attr,index]
    try_graphs(compute, versions[0])
    assert (compute._captured, budget.used_bytes) == (None, 0)
    gc.collect()
    for seed in range(3):
        activation = forward(compute, versions[0], seed)
        require_like(backward(compute, activation, seed), backward(plain, forward(plain, versions[0], seed), seed))
    assert asked


@pytest.mark.skipif(DEVICE != "cpu", reason="the warnings are torch's own there")
@pytest.mark.parametrize("who", ["this thread", "torch's own", "another", "nobody"])
def test_only_what_this_thread_asks_the_device_for_counts(who: str) -> None:
    def asks() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=2)

    def compute() -> None:
        if who == "this thread":
            asks()
        elif who == "another":
            other = threading.Thread(target=asks)
            other.start()
            other.join()
        elif who == "torch's own":  # no thread that Python began
            ended = threading.Lock()
            ended.acquire()
            _thread.start_new_thread(lambda: (asks(), ended.release()), ())
            ended.acquire()
        warnings.warn("something else", stacklevel=2)

    with pytest.warns(UserWarning, match="something else") as said:
        assert graphs.run_and_tell_if_it_waits(compute) is (who in ("this thread", "torch's own"))
    assert len(said) == 1


@NEEDS_CUDA
def test_what_draws_at_random_is_launched() -> None:
    """A mask is a function of the ticket, which a graph does not know."""
    options = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 3, "vocab_size": VOCAB, "resid_pdrop": 0.1}
    compute, _ = stage_of(1, budget=MemoryBudget(2**30), model="causal-lm", model_options=options)
    assert compute._captured is None
