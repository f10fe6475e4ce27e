"""Forward and backward of one stage equal plain autograd, and a recomputation is the same computation."""

from __future__ import annotations

import contextlib

import pytest
import torch

from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.stage.compute import Activation, Gradients, StageCompute
from swarm.stage.executor import Executor
from swarm.stage.module import ParameterSlots, StageFactory, Tensors
from swarm.stage.versions import Version, make_version
from swarm.wire.messages import CommitRecord

torch.set_num_threads(1)

VOCABULARY, WIDTH, CLASSES = 7, 6, 5
TICKET = Ticket(3, 2)


class First(torch.nn.Module):
    """Token ids in: nothing of its input needs a gradient."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.drop = torch.nn.Dropout(dropout)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        x = self.drop(self.embedding(inputs["ids"]))
        return {"x": torch.tanh(self.linear(x)), "mask": inputs["mask"]}


class Middle(torch.nn.Module):
    """One dropout called twice, one parameter that nothing uses, one that is frozen, and one that is tied."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.tied = self.linear
        self.drop = torch.nn.Dropout(dropout)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        x = self.drop(torch.nn.functional.gelu(self.linear(inputs["x"])))
        x = self.drop(self.tied(x) * self.frozen)
        return {"x": x * inputs["mask"].unsqueeze(-1), "mask": inputs["mask"]}


class Last(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(dropout)
        self.version_id = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        assert labels is not None
        logits = self.version_id(self.drop(inputs["x"]))
        loss = torch.nn.functional.cross_entropy(logits, labels["y"], reduction="sum", ignore_index=-100)
        return {"loss_sum": loss, "tokens": (labels["y"] != -100).sum()}


class Factory(StageFactory):
    def __init__(self, dropout: float = 0.0) -> None:
        self.num_stages = 3
        self.dropout = dropout

    def build(self, stage: int) -> torch.nn.Module:
        module = (First, Middle, Last)[stage](self.dropout).double()
        generator = torch.Generator().manual_seed(stage)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return module


def version_of(compute: StageCompute) -> Version:
    record = CommitRecord(run="1" * 64, step=-1, version_id="2" * 64, ballot=ZERO_BALLOT, members=((), (), ()))
    return make_version(record, compute.layout, compute.initial_masters(), compute.dtype)


def made(stage: int, dropout: float = 0.0, seed: int = 0) -> tuple[StageCompute, Version]:
    compute = StageCompute(Factory(dropout), stage, precision="fp64", seed=seed)
    return compute, version_of(compute)


def inputs_of(stage: int, num_rows: int = 4) -> Tensors:
    generator = torch.Generator().manual_seed(100 + stage)
    mask = torch.arange(num_rows) != 1
    if stage == 0:
        return {"ids": torch.randint(VOCABULARY, (num_rows,), generator=generator), "mask": mask}
    return {"x": torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64), "mask": mask}


def labels_of(stage: int, num_rows: int = 4) -> Tensors | None:
    if stage != 2:
        return None
    target = torch.arange(num_rows) % CLASSES
    target[2] = -100
    return {"y": target}


def output_gradients_of(stage: int, num_rows: int = 4) -> Tensors | None:
    if stage == 2:
        return None
    generator = torch.Generator().manual_seed(200 + stage)
    return {"x": torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)}


def run(
    compute: StageCompute, version: Version, *, keep_graph: bool, ticket: Ticket = TICKET, disturb: bool = False
) -> tuple[Activation, Gradients]:
    stage = compute.stage
    activation = compute.forward(version, ticket, inputs_of(stage), labels_of(stage), keep_graph=keep_graph)
    if disturb:  # other tickets, evaluations and draws come in between
        torch.rand(5)
        compute.forward(version, Ticket(9, 9), inputs_of(stage, 6), labels_of(stage, 6), keep_graph=True)
        compute.evaluate(version, inputs_of(stage), labels_of(stage))
    return activation, compute.backward(activation, output_gradients_of(stage))


def assert_same(one: Gradients, other: Gradients) -> None:
    assert one.inputs.keys() == other.inputs.keys()
    for name, gradient in one.inputs.items():
        assert torch.equal(gradient, other.inputs[name]), name
    for mine, theirs in zip(one.parameters, other.parameters, strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


@STAGES
@pytest.mark.parametrize("keep_graph", [True, False])
def test_equals_plain_autograd(stage: int, keep_graph: bool) -> None:
    plain = Factory().build(stage)
    inputs = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in inputs_of(stage).items()}
    outputs = plain(inputs, labels_of(stage))
    seeds = output_gradients_of(stage)
    (outputs["loss_sum"] if seeds is None else (outputs["x"] * seeds["x"]).sum()).backward()

    compute, version = made(stage)
    activation = compute.forward(version, TICKET, inputs_of(stage), labels_of(stage), keep_graph=keep_graph)
    assert activation.outputs is not None
    for name, expected in outputs.items():
        assert torch.equal(activation.outputs[name].detach(), expected.detach()), name
    if not keep_graph:
        activation.drop()
        held = [activation.inputs, activation.labels, activation.outputs, activation.lease]
        assert held == [{}, None, None, None], "what came over the wire takes less memory"
        activation.take(inputs_of(stage), labels_of(stage))
    gradients = compute.backward(activation, output_gradients_of(stage))
    assert activation.outputs is None, "outputs hold the graph and must be let go"
    assert activation.recomputed is not keep_graph

    trainable = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    assert compute.layout.names == tuple(trainable)
    for (name, parameter), gradient in zip(trainable.items(), gradients.parameters, strict=True):
        if parameter.grad is None:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14, msg=name)
    assert gradients.inputs.keys() == {n for n, t in inputs.items() if t.is_floating_point()}
    for name, gradient in gradients.inputs.items():
        torch.testing.assert_close(gradient, inputs[name].grad, rtol=1e-12, atol=1e-14)


@STAGES
def test_recomputation_equals_the_kept_graph_with_dropout(stage: int) -> None:
    compute, version = made(stage, dropout=0.4)
    kept, with_graph = run(compute, version, keep_graph=True)
    dropped, without = run(compute, version, keep_graph=False, disturb=True)
    assert (kept.recomputed, dropped.recomputed) == (False, True)
    assert_same(with_graph, without)


@STAGES
def test_recomputed_twice_is_the_same_again(stage: int) -> None:
    """The answer got lost and the ticket comes back."""
    compute, version = made(stage, dropout=0.4)
    activation, first = run(compute, version, keep_graph=True)
    for _ in range(2):
        torch.rand(3)
        assert_same(first, compute.backward(activation, output_gradients_of(stage)))
    assert activation.recomputed


@STAGES
def test_another_peer_draws_the_same_masks(stage: int) -> None:
    ours, theirs = made(stage, dropout=0.4), made(stage, dropout=0.4)
    torch.manual_seed(123)
    _, first = run(*ours, keep_graph=True)
    torch.manual_seed(321)
    _, second = run(*theirs, keep_graph=True, disturb=True)
    assert_same(first, second)


def masks_differ(one: Gradients, other: Gradients) -> bool:
    pairs = zip(one.parameters, other.parameters, strict=True)
    return any(a is not None and not torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("ticket", [Ticket(3, 3), Ticket(4, 2), Ticket(2, 3)])
def test_another_ticket_draws_other_masks(ticket: Ticket) -> None:
    compute, version = made(1, dropout=0.4)
    _, one = run(compute, version, keep_graph=True)
    _, other = run(compute, version, keep_graph=True, ticket=ticket)
    assert masks_differ(one, other)


def test_another_seed_draws_other_masks() -> None:
    _, one = run(*made(1, dropout=0.4, seed=0), keep_graph=True)
    _, other = run(*made(1, dropout=0.4, seed=1), keep_graph=True)
    assert masks_differ(one, other)


def test_two_calls_of_one_layer_draw_two_masks() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
            ones = torch.ones(1000, dtype=torch.float64) * self.scale
            return {"one": self.drop(ones), "two": self.drop(ones)}

    class TwiceFactory(StageFactory):
        num_stages = 2

        def build(self, stage: int) -> torch.nn.Module:
            return Twice()

    compute = StageCompute(TwiceFactory(), 0, precision="fp64", seed=0)
    outputs = compute.forward(version_of(compute), TICKET, {}, None, keep_graph=False).outputs
    assert outputs is not None
    assert not torch.equal(outputs["one"], outputs["two"])
    assert float((outputs["one"] != 0).double().mean()) == pytest.approx(0.5, abs=0.1)


def test_a_backward_uses_the_version_its_forward_used() -> None:
    """A commit in between: a new version, as separate tensors."""
    compute, old = made(1)
    _, expected = run(compute, old, keep_graph=True)
    for keep_graph in (True, False):
        activation = compute.forward(old, TICKET, inputs_of(1), None, keep_graph=keep_graph)
        new = make_version(old.record, compute.layout, old.masters + 1.0, torch.float64)
        _, other = run(compute, new, keep_graph=True)
        assert masks_differ(expected, other)
        assert_same(expected, compute.backward(activation, output_gradients_of(1)))


@STAGES
def test_an_evaluation_has_no_dropout_and_no_graph(stage: int) -> None:
    compute, version = made(stage, dropout=0.9)
    exact, exact_version = made(stage)
    expected = exact.evaluate(exact_version, inputs_of(stage), labels_of(stage))
    outputs = compute.evaluate(version, inputs_of(stage), labels_of(stage))
    for name, tensor in outputs.items():
        assert torch.equal(tensor, expected[name])
        assert not tensor.requires_grad


def test_an_evaluation_in_between_does_not_switch_dropout_off() -> None:
    compute, version = made(1, dropout=0.4)
    _, first = run(compute, version, keep_graph=True)
    compute.evaluate(version, inputs_of(1), None)
    _, second = run(compute, version, keep_graph=False)
    assert_same(first, second)


@STAGES
def test_the_bytes_of_a_graph_are_measured(stage: int) -> None:
    compute, version = made(stage, dropout=0.4)
    assert compute.graph_bytes_like(inputs_of(stage)) == 0
    first, _ = run(compute, version, keep_graph=True)
    again, _ = run(compute, version, keep_graph=True)
    assert first.graph_bytes > 0
    assert again.graph_bytes == first.graph_bytes == compute.graph_bytes_like(inputs_of(stage))
    larger = compute.forward(version, TICKET, inputs_of(stage, 40), labels_of(stage, 40), keep_graph=True)
    assert larger.graph_bytes > 5 * first.graph_bytes
    assert compute.graph_bytes_like(inputs_of(stage)) == first.graph_bytes, "each shape has its own measure"


def test_without_a_graph_no_bytes_are_held() -> None:
    compute, version = made(1)
    activation = compute.forward(version, TICKET, inputs_of(1), None, keep_graph=False)
    assert activation.graph_bytes == 0
    assert activation.outputs is not None
    assert not any(t.requires_grad for t in activation.outputs.values())


class Wide(torch.nn.Module):
    """Saves its input, its weight, and one activation of 10 * 300 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(200, 300, bias=False, dtype=torch.float64)

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        return {"x": torch.tanh(self.linear(inputs["x"]))}


class WideFactory(StageFactory):
    num_stages = 2

    def build(self, stage: int) -> torch.nn.Module:
        return Wide()


def test_parameters_are_no_part_of_a_graphs_bytes() -> None:
    compute = StageCompute(WideFactory(), 0, precision="fp64", seed=0)
    x = torch.ones(10, 200, dtype=torch.float64)
    activation = compute.forward(version_of(compute), TICKET, {"x": x}, None, keep_graph=True)
    assert 10 * 300 * 8 <= activation.graph_bytes < 200 * 300 * 8


def test_frozen_parameters_are_no_part_of_a_graphs_bytes() -> None:
    """They are there once, not for each micro-batch: with adapters, nearly everything is frozen."""
    compute = StageCompute(WideFactory(), 0, precision="fp64", seed=0, frozen=["linear.*"])
    x = torch.ones(10, 200, dtype=torch.float64)
    activation = compute.forward(version_of(compute), TICKET, {"x": x}, None, keep_graph=True)
    assert activation.graph_bytes == 10 * 300 * 8


def test_inputs_are_no_part_of_a_graphs_bytes() -> None:
    """The input is held in any case, and counted where it came in: counted twice, half the memory stays unused."""
    compute = StageCompute(WideFactory(), 0, precision="fp64", seed=0)
    x = torch.ones(10, 200, dtype=torch.float64)
    activation = compute.forward(version_of(compute), TICKET, {"x": x}, None, keep_graph=True)
    assert activation.graph_bytes == 10 * 300 * 8


def test_the_callers_tensors_are_not_touched() -> None:
    compute, version = made(1)
    inputs = inputs_of(1)
    before = {n: t.clone() for n, t in inputs.items()}
    compute.backward(compute.forward(version, TICKET, inputs, None, keep_graph=True), output_gradients_of(1))
    assert not inputs["x"].requires_grad
    assert all(torch.equal(inputs[n], t) for n, t in before.items())
    assert all(p.grad is None for p in version.parameters.values())


def test_a_gradient_for_an_output_that_does_not_exist_is_ignored() -> None:
    compute, version = made(1)
    _, expected = run(compute, version, keep_graph=True)
    activation = compute.forward(version, TICKET, inputs_of(1), None, keep_graph=True)
    seeds = {**output_gradients_of(1), "nonsense": torch.ones(3)}  # type: ignore[dict-item]
    assert_same(expected, compute.backward(activation, seeds))


def test_an_input_that_is_not_used_gets_a_zero_gradient() -> None:
    compute, version = made(1)
    inputs = {**inputs_of(1), "extra": torch.ones(2, dtype=torch.float64)}
    gradients = compute.backward(compute.forward(version, TICKET, inputs, None, keep_graph=True), output_gradients_of(1))
    assert gradients.inputs["extra"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("precision", "dtype", "masters"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
    ],
)
def test_precision_is_that_of_the_compute_copy(precision: str, dtype: torch.dtype, masters: torch.dtype) -> None:
    compute = StageCompute(Factory(), 0, precision=precision, seed=0)
    assert (compute.dtype, compute.master_dtype, compute.initial_masters().dtype) == (dtype, masters, masters)
    version = version_of(compute)
    gradients = compute.backward(compute.forward(version, TICKET, inputs_of(0), None, keep_graph=False), output_gradients_of(0))
    assert {g.dtype for g in gradients.parameters if g is not None} == {dtype}


def test_the_loss_scale_multiplies_every_gradient_of_the_last_stage() -> None:
    compute, version = made(2, dropout=0.4)
    _, plain = run(compute, version, keep_graph=True)
    scaled_record = version.record.model_copy(update={"loss_scale": 1024.0})
    scaled_version = make_version(scaled_record, compute.layout, version.masters, torch.float64)
    for keep_graph in (True, False):
        activation, scaled = run(compute, scaled_version, keep_graph=keep_graph)
        assert activation.recomputed is not keep_graph
        assert torch.equal(scaled.inputs["x"], plain.inputs["x"] * 1024.0)
        for mine, theirs in zip(scaled.parameters, plain.parameters, strict=True):
            assert torch.equal(mine, theirs * 1024.0)  # type: ignore[arg-type, operator]


def test_every_layer_shows_progress() -> None:
    class Counting(Executor):
        ticks = 0
        finished = 0

        @staticmethod
        def now() -> float:
            raise NotImplementedError

        def tick(self) -> None:
            self.ticks += 1

        async def run(self, job, priority, kind=None):
            raise NotImplementedError

        def close(self) -> None:
            raise NotImplementedError

    compute, version = made(0)
    executor = Counting()
    compute.show_progress(executor)
    activation = compute.forward(version, TICKET, inputs_of(0), None, keep_graph=True)
    assert executor.ticks == 2, "the embedding and the linear layer"
    gradients = {n: torch.ones_like(t) for n, t in (activation.outputs or {}).items() if t.requires_grad}
    compute.backward(activation, gradients)
    assert executor.ticks == 4, "and as many on the way back"
    compute.forward(version, TICKET, inputs_of(0), None, keep_graph=False)
    assert executor.ticks == 6


def test_the_initial_values_are_those_of_the_factory() -> None:
    compute, _ = made(1)
    module = Factory().build(1)
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])
    assert torch.equal(compute.initial_masters(), flat)


def test_other_tensors_stand_in_the_places_of_a_tied_parameter_for_one_call() -> None:
    module = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "other": torch.nn.Linear(2, 2)})
    module["other"].weight = module["one"].weight
    before = dict(module.named_parameters())
    value = torch.zeros(2, 2)
    places = ParameterSlots(module)
    with contextlib.suppress(ArithmeticError), places.holding({"one.weight": value}):
        assert module["one"].weight is value
        assert module["other"].weight is value
        assert module["other"].bias is before["other.bias"]
        raise ArithmeticError
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    assert module["other"].weight is module["one"].weight
