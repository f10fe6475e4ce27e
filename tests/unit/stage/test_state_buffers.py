"""Which buffers are part of a stage's state, what one ticket does to them, and what is refused."""

from __future__ import annotations

import pytest
import torch

from models.causal_lm import CausalLMFactory
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.stage.compute import StageCompute
from swarm.stage.layout import Layout
from swarm.stage.module import Tensors
from swarm.stage.moments import Moments
from swarm.stage.optimizers.choice import optimizer_of
from swarm.stage.state_buffers import applied, changing, stage_layout
from swarm.stage.versions import Version, make_version
from swarm.wire.messages import CommitRecord

torch.set_num_threads(1)

WIDTH = 3
RECORD = CommitRecord(run="1" * 64, step=-1, version_id="2" * 64, ballot=ZERO_BALLOT, members=((),), loss_scale=8.0)


class Counting(torch.nn.Module):
    """Buffers of all kinds: assigned anew, changed in place, shared, counted; constant; and one that no checkpoint holds."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(trained)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(WIDTH))
            self.linear.bias.zero_()
        self.register_buffer("table", torch.arange(100_000.0))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False, dtype=torch.float64)
        self.again = torch.nn.Module()
        self.again.register_buffer("shared", self.norm.running_var)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        x = self.linear(inputs["x"])
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)  # with its graph
            self.calls += 2
        self.cache += 1
        x = self.norm(x) * self.again.shared.detach()
        return {"loss_sum": x.square().sum(), "tokens": torch.tensor(len(x))}


class Exemplified(Counting):
    def example(self, num_samples: int, sequence_length: int) -> tuple[Tensors, Tensors | None]:
        return {"x": torch.zeros(num_samples, WIDTH)}, None


CHANGING = {"mean", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "calls"}


class One:
    """A factory of one stage."""

    num_stages = 1

    def __init__(self, make: type[torch.nn.Module] = Exemplified, **options: bool) -> None:
        self._make, self._options = make, options

    def build(self, stage: int) -> torch.nn.Module:
        return self._make(**self._options)


def computed(factory: One) -> tuple[StageCompute, Version]:
    compute = StageCompute(factory, 0, precision="fp64", seed=0)
    return compute, make_version(RECORD, compute.layout, compute.initial_masters(), compute.dtype)


def inputs(num_rows: int = 5) -> Tensors:
    return {"x": torch.randn(num_rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(num_rows)) + 2.0}


def added(compute: StageCompute, version: Version, *, keep_graph: bool, num_rows: int = 5) -> dict[str, torch.Tensor | None]:
    """What one ticket adds, by name, with the loss scale divided out again."""
    activation = compute.forward(version, Ticket(0, 0), inputs(num_rows), None, keep_graph=keep_graph)
    if not keep_graph:
        activation.drop()
        activation.take(inputs(num_rows), None)
    result = compute.backward(activation, None)
    pairs = zip(compute.layout.names, result.parameters, strict=True)
    return {name: None if part is None else part / RECORD.loss_scale for name, part in pairs}


def test_what_changes_in_the_example_is_state_and_what_does_not_costs_nothing() -> None:
    module = Exemplified()
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if name != "cache"}
    assert changing(module).keys() == CHANGING
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers() if name != "cache")
    layout = stage_layout(One(), module)
    assert set(layout.buffers) == CHANGING
    assert layout.num_elements == layout.num_trained + 3 * WIDTH + 2
    assert Moments(layout, dtype=torch.float64, device="cpu").zero().num_bytes == 2 * 8 * layout.num_trained


def test_without_an_example_all_that_a_checkpoint_holds_is_state() -> None:
    assert changing(Counting()).keys() == CHANGING | {"table"}


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_language_models_have_none(model_type: str) -> None:
    """Their rotary tables are in no checkpoint, and routers' corrections do not change."""
    options = {"model_type": model_type, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    options |= {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1} if "deep" in model_type else {}
    factory = CausalLMFactory(RunConfig(num_stages=2), options)
    for stage in range(2):
        assert stage_layout(factory, factory.build(stage)) == Layout.of(factory.outline(stage))


@pytest.mark.parametrize("keep_graph", [True, False])
def test_exactly_once_a_ticket_adds_its_distance_however_often_its_forward_runs(keep_graph: bool) -> None:
    compute, version = computed(One())
    before = {name: value.clone() for name, value in version.buffers.items()}
    for _ in range(2):  # a ticket that is computed and counts nowhere leaves no trace
        found = added(compute, version, keep_graph=keep_graph)
    assert all(torch.equal(value, before[name]) for name, value in version.buffers.items())
    x = inputs()["x"]
    torch.testing.assert_close(found["mean"], -5 * 0.5 * x.mean(0), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found["norm.running_mean"], -5 * 0.1 * x.mean(0), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found["norm.running_var"], -5 * 0.1 * (x.var(0) - 1.0), rtol=1e-12, atol=1e-12)
    assert (float(found["calls"]), float(found["norm.num_batches_tracked"])) == (-10.0, -5.0)


def test_a_stage_that_trains_nothing_still_has_its_buffers() -> None:
    compute, version = computed(One(trained=False))
    assert (compute.layout.num_trained, version.parameters) == (0, {})
    for keep_graph in (True, False):
        activation = compute.forward(version, Ticket(0, 0), {"x": inputs()["x"]}, None, keep_graph=keep_graph)
        activation.inputs = {name: tensor.detach() for name, tensor in activation.inputs.items()}
        if not keep_graph:
            activation.outputs, activation.buffers = None, {}
        result = compute.backward(activation, None, tokens=5)
        found = dict(zip(compute.layout.names, result.parameters, strict=True))
        torch.testing.assert_close(found["mean"], -8.0 * 5 * 0.5 * inputs()["x"].mean(0), rtol=1e-12, atol=0.0)


def test_a_commit_takes_the_mean_weighted_by_tokens_and_counts_once() -> None:
    compute, version = computed(One())
    config = RunConfig(precision="fp64", weight_decay=0.0)
    optimizer = optimizer_of(config, compute.layout, dtype=torch.float64, device="cpu")
    total = torch.zeros_like(version.masters)
    for num_rows in (5, 3):
        for name, part in added(compute, version, keep_graph=True, num_rows=num_rows).items():
            compute.layout.named(total)[name].add_(0.0 if part is None else part)
    record = RECORD.model_copy(update={"step": 0, "tokens": 8, "learning_rate": 0.1, "clip_coefficient": 1e-3})
    masters, _ = applied(optimizer, version, version, total, optimizer.moments.zero(), record)
    after = make_version(record, compute.layout, masters, torch.float64)
    means = [inputs(num_rows)["x"].mean(0) for num_rows in (5, 3)]
    torch.testing.assert_close(after.buffers["mean"], 0.5 * (5 * means[0] + 3 * means[1]) / 8, rtol=1e-12, atol=0.0)
    assert after.buffers["calls"].dtype == torch.int32
    assert (int(after.buffers["calls"]), int(after.buffers["norm.num_batches_tracked"])) == (2, 1)
    evaluated = compute.evaluate(after, inputs(), None)
    assert float(evaluated["loss_sum"]) != float(compute.evaluate(version, inputs(), None)["loss_sum"])
    assert int(after.buffers["calls"]) == 2


def test_counters_stay_whole_in_fp32() -> None:
    compute, version = computed(One())
    layout = compute.layout
    optimizer = optimizer_of(RunConfig(), layout, dtype=torch.float32, device="cpu")
    masters, state = version.masters.float(), optimizer.moments.zero()
    total = torch.zeros_like(masters)
    layout.named(total)["calls"].sub_(2 * 999_983)
    for step in range(1000):
        record = RECORD.model_copy(update={"step": step, "tokens": 999_983, "learning_rate": 0.1})
        newest = make_version(record, layout, masters, torch.float32)
        masters, state = applied(optimizer, newest, newest, total, state, record)
    assert float(layout.named(masters)["calls"]) == 2000.0


class Growing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        self.seen = torch.cat([self.seen, torch.ones(1)])
        return {"loss_sum": self.linear(inputs["x"]).sum(), "tokens": torch.tensor(1)}


class GrowingByExample(Growing):
    example = Exemplified.example


class Late(Exemplified):
    """Its example does not show all."""

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        if len(inputs["x"]) > 2:
            self.table += 1
        return super().forward(inputs, labels)


class Complex(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    grows = r"^the forward changes buffer seen from \(0,\) of torch.float32 to \(1,\) of torch.float32: what is averaged"
    with pytest.raises(ConfigError, match=grows):
        computed(One(GrowingByExample))
    compute, version = computed(One(Growing))
    with pytest.raises(ConfigError, match=grows):
        compute.forward(version, Ticket(0, 0), inputs(), None, keep_graph=True)
    compute, version = computed(One(Late))
    with pytest.raises(ConfigError, match=r"^the forward changes buffer table, which counts as constant"):
        compute.forward(version, Ticket(0, 0), inputs(), None, keep_graph=True)
    with pytest.raises(ConfigError, match=r"^buffer phase is of torch\.complex64: only real numbers"):
        computed(One(Complex))
