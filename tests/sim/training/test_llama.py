"""The real model and the real text in virtual time: promise 2 for a Llama, and an export that transformers loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.feed.feed import open_feed
from swarm.policy.schedule import learning_rate
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import add_gradients
from swarm.testing.virtual_time import run_virtual

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


def llama_config(**changes):
    base = {
        "num_stages": 3,
        "model_options": SMALL,
        "sequence_length": 32,
        "micro_batch_size": 4,
        "target_batch_size": 16,
        "compression": "none",
        "eval_samples": 0,
        "checkpoint_every": 0,
        "warmup_steps": 2,
    }
    return RunConfig(**{**base, **changes})


def plain_loop(*parts):
    """One process, the whole model, torch's own AdamW and clip_grad_norm_.

    Args:
        parts: (configuration, first step, end), one after another; the first one's model, precision and optimizer.

    Returns:
        Losses and parameters.
    """
    config = parts[0][0]
    model = factory_of(config).build_whole()
    if config.precision == "fp64":
        model = model.double()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
    losses = []
    for config, first, end in parts:
        feed = open_feed(config, None, None, None)
        for step in range(first, end):
            optimizer.zero_grad()
            loss_sum, tokens = add_gradients([model], feed, config, step)
            for parameter in model.parameters():
                parameter.grad /= tokens
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.step()
            losses.append(loss_sum / tokens)
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def evaluations_of(config, feed, state_dir):
    """What the trainer of a whole run evaluated; checkpoints are in `state_dir`."""

    async def main():
        simulation = Simulation(config, seed=2, factory=factory_of(config), feed=feed, state_dir=state_dir)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        evaluations = list(simulation.nodes["trainer0"].evaluations)
        await simulation.close()
        return evaluations

    return run_virtual(main())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-8)])
def test_same_as_one_process_for_a_llama_on_real_text(precision, tolerance):
    """20 steps of 3 stages x 2 peers."""
    torch.set_num_threads(1)
    config = llama_config(precision=precision, total_steps=20)
    feed = open_feed(config, None, None, None)
    losses, parameters = plain_loop((config, 0, config.total_steps))

    async def main():
        simulation = Simulation(config, seed=1, factory=factory_of(config), feed=feed)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        found = {}
        for stage in range(config.num_stages):
            peer = simulation.stage_peers(stage)[0]
            found |= peer.stage_context.compute.layout.named(peer.committed.versions.newest.masters)
        served = [p.micro_batches.phases["accumulated"] for p in simulation.stage_peers()]
        result = simulation.records(), found
        await simulation.close()
        assert all(served), f"a peer served nothing: {served}"
        return result

    swarm_losses, swarm_parameters = run_virtual(main())
    assert swarm_losses == pytest.approx(losses, rel=tolerance)
    assert set(swarm_parameters) == set(parameters)
    if precision == "fp64":
        names = sorted(parameters)
        theirs = torch.cat([swarm_parameters[n].reshape(-1) for n in names])
        mine = torch.cat([parameters[n].reshape(-1) for n in names])
        assert float((theirs - mine).norm() / mine.norm()) < tolerance


def test_more_experts_than_samples_in_a_micro_batch_are_trained():
    """What the routers count has a row for each expert: 8 of them, 2 samples, over 3 stages."""
    torch.set_num_threads(1)
    experts = {
        "model_type": "mixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "output_router_logits": True,
    }
    config = llama_config(model="causal-lm", model_options=experts, micro_batch_size=2, target_batch_size=4, total_steps=2)
    feed = open_feed(config, None, None, None)
    losses, _ = plain_loop((config, 0, config.total_steps))

    async def main():
        simulation = Simulation(config, seed=1, factory=factory_of(config), feed=feed)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.finish()
        found = simulation.records(), [report.retries for report in simulation.nodes["trainer0"].reports]
        await simulation.close()
        return found

    swarm_losses, retries = run_virtual(main())
    assert swarm_losses == pytest.approx(losses, rel=1e-5)
    assert retries == [0, 0]


def test_an_exported_run_loads_with_transformers_and_evaluates_alike(tmp_path):
    """Its loss on the held-out text equals the swarm's own evaluation (raw wire) to 1e-4."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    config = llama_config(total_steps=4, eval_samples=24, precision="fp32")
    feed = open_feed(config, None, None, None)
    (evaluation,) = evaluations_of(config, feed, tmp_path)
    assert evaluation.step == config.total_steps
    checkpoints = find_complete([tmp_path])
    assert [c.record.version_id for c in checkpoints] == [evaluation.version_id] * 3
    parameters = {}
    for checkpoint in checkpoints:
        parameters |= checkpoint.parameters()
    factory_of(config).save_pretrained(parameters, tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    loss_sum, tokens = 0.0, 0
    for batch in feed.eval_batches():
        logits = model(torch.from_numpy(batch.inputs["input_ids"])).logits
        labels = torch.from_numpy(np.ascontiguousarray(batch.labels["labels"]))
        loss_sum += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        tokens += labels.numel()
    assert loss_sum / tokens == pytest.approx(evaluation.loss, abs=1e-4)


def test_the_checkpoint_of_the_lowest_evaluation_is_kept(tmp_path):
    """At a learning rate that is too high the loss rises again after a few steps."""
    torch.set_num_threads(1)
    config = llama_config(
        total_steps=6,
        eval_samples=16,
        eval_every=1,
        checkpoint_every=0,
        checkpoint_keep=1,
        precision="fp32",
        learning_rate=0.3,
        warmup_steps=3,
    )
    feed = open_feed(config, None, None, None)
    evaluations = evaluations_of(config, feed, tmp_path)
    assert [e.step for e in evaluations] == [1, 2, 3, 4, 5, 6]
    best = min(evaluations, key=lambda e: e.loss)
    assert best.step < 6, "or the newest is the best, which is kept anyhow"
    assert {(c.record.version_id, c.best_loss) for c in find_complete([tmp_path], best=True)} == {(best.version_id, best.loss)}
    assert {c.record.step + 1 for c in find_complete([tmp_path])} == {6}
