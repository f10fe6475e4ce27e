"""Promises 1 to 3 for parameters of which two stages hold copies: a head tied to an embedding (CASES 17)."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch
from test_llama import llama_config, plain_loop

from models.registry import factory_of
from swarm.feed.feed import open_feed
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.simulation.schedules import Schedule, run_schedule
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import one_process, small_config
from swarm.testing.virtual_time import run_virtual

NUM_SCHEDULES = 6


def test_tied_copies_are_bit_equal_over_20_steps_and_losses_those_of_one_process(tmp_path):
    """A Llama whose head is its embedding, in fp64: 3 stages x 2 peers; what is exported loads in transformers."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    options = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    }
    config = llama_config(
        precision="fp64", total_steps=20, model_options=options, sequence_length=8, target_batch_size=8, learning_rate=1e-3
    )
    feed = open_feed(config, None, None, None)
    factory = factory_of(config)
    losses, parameters = plain_loop((config, 0, config.total_steps))
    assert "lm_head.weight" not in parameters, "the single process has one tensor"
    copies = []

    async def main():
        simulation = Simulation(config, seed=1, factory=factory, feed=feed, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        for stage, name in factory.ties[0].places:
            peer = simulation.stage_peers(stage)[0]

            def note(record, peer=peer, name=name):
                named = peer.stage_context.compute.layout.named(peer.committed.versions.newest.masters)
                copies.append((record.step, named[name]))

            peer.committed.on_commit.append(note)
        await simulation.finish()
        found = {}
        for stage in range(config.num_stages):
            peer = simulation.stage_peers(stage)[0]
            found |= peer.stage_context.compute.layout.named(peer.committed.versions.newest.masters)
        norms = [simulation.commits[step].grad_norm for step in range(config.total_steps)]
        result = simulation.records(), found, simulation.copies(factory.ties[0]), norms
        await simulation.close()
        return result

    swarm_losses, found, last, norms = run_virtual(main())
    assert swarm_losses == pytest.approx(losses, rel=1e-8)
    assert min(norms) > 0
    by_step = {}
    for step, copy in copies:
        by_step.setdefault(step, []).append(copy)
    assert sorted(by_step) == list(range(-1, config.total_steps))
    for step, (one, other) in by_step.items():
        assert torch.equal(one, other), f"step {step}"
    assert len(last) == 4
    assert all(torch.equal(last[0], other) for other in last)
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)
    saved = {n: v for checkpoint in find_complete([tmp_path]) for n, v in checkpoint.parameters().items()}
    factory.save_pretrained(saved, tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert torch.equal(model.lm_head.weight, last[0])
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("delay_steps", [0, 1])
@pytest.mark.parametrize("peers", [1, 3])
def test_the_norm_counts_tied_sums_once(peers, delay_steps):
    """Clipping would tell: `max_grad_norm` is far below the norms."""
    config = small_config(total_steps=6, delay_steps=delay_steps, model_options={"tied": True})
    plain = one_process(config)

    async def main():
        simulation = Simulation(config, seed=3)
        await simulation.start(peers_per_stage=peers, trainers=1)
        await simulation.finish()
        check(simulation)
        norms = [simulation.commits[step].grad_norm for step in range(config.total_steps)]
        await simulation.close()
        return norms

    assert run_virtual(main()) == pytest.approx(plain.grad_norms, rel=1e-8)
    assert min(plain.grad_norms) > config.max_grad_norm


def test_tied_copies_survive_random_faults():
    """Kills, cuts, hangs, partitions and restarts: copies of all peers are the same bits, losses those of one process."""
    faults = [run_schedule(Schedule.draw(seed, tied=True)) for seed in range(1000, 1000 + NUM_SCHEDULES)]
    assert sum(map(Counter.total, faults)) > 3 * NUM_SCHEDULES


def test_a_run_goes_on_from_checkpoints_with_its_copies(tmp_path):
    """All processes are gone after some steps; the same directories, and the losses of an uninterrupted run."""
    config = small_config(total_steps=6, checkpoint_every=2, model_options={"tied": True})

    async def begin():
        simulation = Simulation(config, seed=5, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        while max(simulation.commits, default=-1) < 3:
            await simulation.began()
            await asyncio.sleep(0.05)
        await simulation.abandon()

    async def go_on():
        simulation = Simulation(config, seed=5, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        first, *others = simulation.copies(simulation.factory.ties[0])
        assert all(torch.equal(first, other) for other in others)
        losses = {step: record.loss for step, record in simulation.commits.items() if step >= 0}
        parameters = simulation.parameters()
        await simulation.close()
        return losses, parameters

    run_virtual(begin())
    losses, parameters = run_virtual(go_on())
    plain = one_process(config)
    assert min(losses) >= 1, "it began anew"
    for step, loss in losses.items():
        assert loss == pytest.approx(plain.losses[step], rel=1e-8)
    assert float((parameters - plain.parameters).norm() / plain.parameters.norm()) < 1e-8
