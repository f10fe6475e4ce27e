"""Buffers that forward changes are part of the state: a ResNet with BatchNorm against one process that keeps the same rule."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from launch.export import main as export
from launch.recut import main as recut
from swarm.base.config import parse_config_bytes
from swarm.base.errors import ConfigError
from swarm.base.ids import Address, Ticket
from swarm.feed.feed import open_feed
from swarm.peer.joining import fetch_run
from swarm.peer.stage.live_state import fetch_parameters
from swarm.policy.schedule import learning_rate
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.memory_transport import MemoryTransport
from swarm.testing.simulation.phases import committed
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import plain_optimizer, small_config
from swarm.testing.virtual_time import run_virtual
from tests.unit.models.resnet import factory

torch.set_num_threads(1)

MODEL, DATA = "tests.unit.models.resnet:factory", "tests.unit.models.resnet:dataset"
QUIET = ("--quiet", "--allow-import")


def resnet_config(**changes):
    fields = {"model": MODEL, "total_steps": 3, "target_batch_size": 16, "learning_rate": 0.02}
    return small_config(**fields | {"max_grad_norm": 1.0, "weight_decay": 0.0, "eval_samples": 4} | changes)


@dataclass
class Plain:
    """What one process came to: of each step the loss and what `clip_grad_norm_` returned; the evaluation loss; state by name."""

    losses: list[float]
    grad_norms: list[float]
    evaluation: float
    state: dict[str, torch.Tensor]


def loss_of(stages, batch):
    boundary = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    labels = {name: torch.from_numpy(array) for name, array in batch.labels.items()}
    for stage in stages:
        boundary = stage(boundary, labels if stage is stages[-1] else None)
    return boundary["loss_sum"], int(boundary["tokens"])


@cache
def one_process(config_bytes):
    """Each micro-batch starts from the buffers that the step started from; the step ends with their mean, weighted by tokens."""
    config = parse_config_bytes(config_bytes)
    feed = open_feed(config, DATA, None, None)
    stages = [factory(config).build(stage) for stage in range(3)]
    parameters = [p for stage in stages for p in stage.parameters()]
    named = {name: b for stage in stages for name, b in stage.named_buffers()}
    optimizer = plain_optimizer(config, parameters)
    losses, grad_norms, history = [], [], []
    for step in range(config.total_steps):
        now = [t.detach().clone() for t in (*parameters, *named.values())]
        history.append(now)
        used = history[config.base_step(step)]
        sums = {name: torch.zeros_like(b, dtype=torch.float64) for name, b in named.items()}
        optimizer.zero_grad()
        loss_sum = tokens = 0
        for index in range(config.tickets_per_step):
            with torch.no_grad():
                for tensor, value in zip((*parameters, *named.values()), used, strict=True):
                    tensor.copy_(value)
            loss, count = loss_of(stages, feed.batch(Ticket(step, index)))
            loss.backward()
            loss_sum, tokens = loss_sum + float(loss.detach()), tokens + count
            for name, buffer in named.items():
                sums[name] += buffer * count
        with torch.no_grad():
            for tensor, value in zip(parameters, now, strict=False):
                tensor.copy_(value)
                tensor.grad /= tokens
            for (name, buffer), before in zip(named.items(), now[len(parameters) :], strict=True):
                buffer.copy_(sums[name] / tokens if buffer.is_floating_point() else before + 1)
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        losses.append(loss_sum / tokens)
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        parts = [loss_of(stages, batch) for batch in feed.eval_batches()]
    evaluation = sum(float(loss) for loss, _ in parts) / sum(count for _, count in parts)
    state = {name: t.detach() for stage in stages for name, t in (*stage.named_parameters(), *stage.named_buffers())}
    return Plain(losses, grad_norms, evaluation, state)


def simulation_of(config, **options):
    return Simulation(config, factory=factory(config), feed=open_feed(config, DATA, None, None), **options)


def state_of(peer):
    compute = peer.stage_context.compute
    return compute.layout.named(peer.committed.versions.newest.masters)


def evaluation_of(peers, feed):
    """The loss of these peers, one of each stage, on the run's evaluation data."""
    loss_sum = tokens = 0
    for batch in feed.eval_batches():
        boundary = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        labels = {name: torch.from_numpy(array) for name, array in batch.labels.items()}
        for peer in peers:
            compute = peer.stage_context.compute
            boundary = compute.evaluate(peer.committed.versions.newest, boundary, labels if compute.last else None)
        loss_sum, tokens = loss_sum + float(boundary["loss_sum"]), tokens + int(boundary["tokens"])
    return loss_sum / tokens


def compare(simulation, plain, *, tolerance=1e-8):
    """Losses, state and evaluations equal those of one process; all peers of a stage hold the same bits."""
    assert simulation.records() == pytest.approx(plain.losses, rel=tolerance)
    for stage in range(3):
        first, *others = simulation.stage_peers(stage)
        assert len({p.committed.state_digest for p in (first, *others)}) == 1, f"stage {stage}"
        for other in others:
            assert torch.equal(first.committed.versions.newest.masters, other.committed.versions.newest.masters)
        for name, value in state_of(first).items():
            torch.testing.assert_close(value, plain.state[name].to(value.dtype), rtol=tolerance, atol=tolerance, msg=name)
    columns = zip(*(simulation.stage_peers(stage) for stage in range(3)), strict=False)
    evaluations = {evaluation_of(peers, simulation.feed) for peers in columns}
    assert len(evaluations) == 1, "the evaluation depends on who answers"
    assert evaluations.pop() == pytest.approx(plain.evaluation, rel=tolerance)


def run(config, act=None, *, peers=2, tolerance=1e-8, look=lambda simulation: None, **options):
    async def main():
        simulation = simulation_of(config, seed=3, **options)
        await simulation.start(peers_per_stage=peers, trainers=1)
        if act is not None:
            await act(simulation)
        await simulation.finish()
        await asyncio.sleep(5.0)
        compare(simulation, one_process(config.to_bytes()), tolerance=tolerance)
        look(simulation)
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_same_as_one_process_and_whoever_answers(delay_steps):
    config = resnet_config(delay_steps=delay_steps)

    def look(simulation):
        state = state_of(simulation.stage_peers(0)[0])
        name = "layers.stem.1.running_mean"
        assert float(state[name].norm()) > 0.1, "it moved"
        counts = {float(value) for n, value in state.items() if n.endswith("num_batches_tracked")}
        assert counts == {float(config.total_steps)}, "a counter counts committed steps"
        norms = [simulation.commits[step].grad_norm for step in range(config.total_steps)]
        assert norms == pytest.approx(one_process(config.to_bytes()).grad_norms, rel=1e-8), "they are no gradients"
        assert min(norms) > config.max_grad_norm, "gradients were clipped, buffers not"
        [evaluation] = [e for node in simulation.nodes.values() for e in node.evaluations]
        assert evaluation.loss == pytest.approx(one_process(config.to_bytes()).evaluation, rel=1e-8)

    run(config, look=look)


def test_exactly_once_when_a_peer_dies_one_recomputes_and_replies_are_lost():
    """A ticket that was computed and not counted leaves no trace; a forward that is computed twice counts once."""

    async def act(simulation):
        small = await simulation.add_stage_peer("stage1.2", 1, memory_limit_bytes=40_000)
        await committed(simulation, 1)
        lost = iter(range(2))
        simulation.lose_reply.append(lambda call: type(call.message).__name__ == "Train" and next(lost, None) is not None)
        await asyncio.sleep(0.05)
        await simulation.kill("stage1.0")
        await committed(simulation, 4)
        act.small = small

    def look(simulation):
        assert act.small.stage_peer.micro_batches.recomputed > 0
        assert any(report.retries for report in simulation.nodes["trainer0"].reports)

    run(resnet_config(total_steps=5), act, look=look)


def test_a_joiner_a_checkpoint_and_an_export_have_the_buffers(tmp_path):
    async def act(simulation):
        await committed(simulation, 1)
        await simulation.add_stage_peer("stage0.9", 0)

    def look(simulation):
        assert len(simulation.stage_peers(0)) == 3
        found = find_complete([tmp_path])
        saved = {name: value for each in found for name, value in each.parameters().items()}
        held = {name: value for stage in range(3) for name, value in state_of(simulation.stage_peers(stage)[0]).items()}
        assert saved.keys() == held.keys()
        assert all(torch.equal(saved[name], value) for name, value in held.items())
        assert export(["--checkpoints", str(tmp_path), "--out", str(tmp_path / "exported"), *QUIET]) == 0
        exported = torch.load(tmp_path / "exported" / "resnet.pt")
        for stage in range(3):
            module = factory(config).build(stage)
            own = module.state_dict()
            assert all(exported[name].dtype == value.dtype for name, value in own.items())
            module.load_state_dict({name: exported[name] for name in own})
            assert all(torch.equal(value.double(), held[name]) for name, value in module.state_dict().items())
        new = tmp_path / "new"
        assert recut(["--checkpoints", str(tmp_path), "--out", str(new), "--learning-rate", "0.01", "--steps", "9", *QUIET]) == 0
        forked = {name: value for each in find_complete([new]) for name, value in each.parameters().items()}
        assert forked.keys() == saved.keys()
        assert all(torch.equal(forked[name], value) for name, value in saved.items())
        shutil.rmtree(new)

    config = resnet_config(total_steps=4, checkpoint_every=2)
    run(config, act, look=look, peers=2, state_dir=tmp_path)

    async def again():
        """All have gone; the run goes on at its checkpoint, and somebody who is no peer asks for the model."""
        simulation = simulation_of(config, seed=4, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        compare_state = one_process(config.to_bytes()).state
        transport = MemoryTransport(simulation.network, Address("10.9.9.9", 1))
        info = await fetch_run(transport, simulation.nodes["backbone0"].address, deadline_s=5.0)
        _, exported = await fetch_parameters(
            transport, info, config, simulation.factory, deadline_s=60.0, rng=random.Random(1), directory=tmp_path
        )
        assert exported.keys() == compare_state.keys()
        for name, value in exported.items():
            torch.testing.assert_close(value, compare_state[name].double(), rtol=1e-8, atol=1e-8, msg=name)
        await transport.close()
        await simulation.close()

    run_virtual(again())


@pytest.mark.parametrize(
    "changes",
    [
        {"average_compression": "fp16"},
        {"average_compression": "powersgd", "powersgd_rank": 64},
        {"aggregation": "centered_clip", "clip_radius": 1000.0},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_buffers_travel_as_they_are_beside_a_compressed_average(changes):
    """Only what the compression makes of the gradients is lost, so after one step the buffers are one process's."""
    config = resnet_config(total_steps=1, precision="fp32", **changes)

    async def main():
        simulation = simulation_of(config, seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        plain = one_process(config.to_bytes())
        for stage in range(3):
            peers = simulation.stage_peers(stage)
            assert len({p.committed.state_digest for p in peers}) == 1
            layout = peers[0].stage_context.compute.layout
            for name in layout.buffers:
                torch.testing.assert_close(state_of(peers[0])[name], plain.state[name].float(), rtol=1e-5, atol=1e-6, msg=name)
        await simulation.close()

    run_virtual(main())


def test_local_updates_keep_the_rule():
    """The peers' own copies part; the buffers of an outer step are the mean over its tickets all the same."""
    config = resnet_config(mode="local", inner_batch_size=8, total_steps=2)

    async def main():
        simulation = simulation_of(config, seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        for stage in range(3):
            first, other = simulation.stage_peers(stage)
            assert torch.equal(first.committed.versions.newest.masters, other.committed.versions.newest.masters)
            state = state_of(first)
            counts = {float(value) for name, value in state.items() if name.endswith("num_batches_tracked")}
            assert counts == {2.0}
        stem = state_of(simulation.stage_peers(0)[0])["layers.stem.1.running_var"]
        assert bool((stem > 0).all())
        await simulation.close()

    run_virtual(main())


def test_a_buffer_that_changes_its_shape_ends_its_peer_with_its_name():
    """Which ends a launcher with that line, and with code 2."""

    class Growing(torch.nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage = stage
            if stage == 1:
                self.register_buffer("seen", torch.zeros(0))

        def forward(self, inputs, labels=None):
            if self.stage == 1:
                self.seen = torch.cat([self.seen, inputs["x"].mean().view(1)])
            return self.stage_module(inputs, labels)

    config = resnet_config()
    plain = factory(config)

    class Factory:
        num_stages = 3

        def build(self, stage):
            module = Growing(stage)
            module.stage_module = plain.build(stage)
            return module

    async def main():
        simulation = Simulation(config, seed=3, factory=Factory(), feed=open_feed(config, DATA, None, None))
        await simulation.start(peers_per_stage=1, trainers=1)
        node = simulation.nodes["stage1.0"]
        with pytest.raises(ConfigError, match=r"^the forward changes buffer seen from \(0,\)"):
            await asyncio.wait_for(node.running, 60.0)
        await simulation.abandon()

    run_virtual(main())
