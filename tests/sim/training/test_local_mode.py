"""Local updates and compressors with state, in whole swarms: exactly once, identical replicas, and one process's numbers."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.policy.schedule import learning_rate
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.schedules import Faults, Schedule
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import SmallFeed, SmallStage, add_gradients, small_config
from swarm.testing.virtual_time import run_virtual

COCKTAIL = {
    "average_compression": "cocktail",
    "cocktail_top": 0.3,
    "fragments": 2,
    "outer_learning_rate": 1.0,
    "outer_momentum": 0.0,
}
THIN_DIFFERENCES = {"inner_batch_size": 0, "inner_steps": 4, "average_compression": "powersgd", "powersgd_rank": 1}
POWERSGD = {"mode": "sync", "inner_batch_size": 0, "average_compression": "powersgd", "powersgd_rank": 1, "learning_rate": 0.02}


def local_config(**changes):
    return small_config(
        **{"mode": "local", "inner_batch_size": 8, "precision": "fp32", "total_steps": 5, "learning_rate": 0.005, **changes}
    )


def replicas(simulation):
    """States, stage by stage, of those that hold the last step."""
    last = simulation.version_ids[simulation.config.total_steps - 1]
    peers = [[p.committed for p in simulation.stage_peers(stage)] for stage in range(simulation.config.num_stages)]
    return [{x.state_digest for x in xs if x.versions.newest.version_id in last and x.state_digest} for xs in peers]


def one_process_diloco(config, num_steps):
    """In plain torch: AdamW steps from the shared parameters, and Nesterov's outer step; clipped stage by stage."""
    stages = [SmallStage(k, config.num_stages, torch.float64) for k in range(config.num_stages)]
    optimizers = [
        torch.optim.AdamW(
            s.parameters(), betas=(config.beta1, config.beta2), eps=config.epsilon, weight_decay=config.weight_decay
        )
        for s in stages
    ]
    outer = [
        torch.optim.SGD(s.parameters(), lr=config.outer_learning_rate, momentum=config.outer_momentum, nesterov=True)
        for s in stages
    ]
    feed, losses = SmallFeed(config), []
    for step in range(num_steps):
        before = [[p.detach().clone() for p in s.parameters()] for s in stages]
        in_all = [0.0, 0]
        per_update = config.tickets_per_step // config.inner_steps
        for h in range(config.inner_steps):
            loss_sum, tokens = add_gradients(stages, feed, config, step, range(h * per_update, (h + 1) * per_update))
            in_all = [in_all[0] + loss_sum, in_all[1] + tokens]
            for stage, inner in zip(stages, optimizers, strict=True):
                for p in stage.parameters():
                    p.grad /= tokens
                torch.nn.utils.clip_grad_norm_(stage.parameters(), config.max_grad_norm)
                inner.param_groups[0]["lr"] = learning_rate(config, step, h)
                inner.step()
                inner.zero_grad()
        losses.append(in_all[0] / in_all[1])
        for stage, sgd, old in zip(stages, outer, before, strict=True):
            for p, o in zip(stage.parameters(), old, strict=True):
                p.grad = o - p.detach()
                with torch.no_grad():
                    p.copy_(o)
            sgd.step()
            for p in stage.parameters():
                p.grad = None
    return losses, torch.cat([p.detach().reshape(-1) for s in stages for p in s.parameters()])


@pytest.mark.parametrize("inner_steps", [1, 4])
def test_one_peer_is_diloco_of_one_process(inner_steps):
    config = local_config(precision="fp64", inner_batch_size=0, inner_steps=inner_steps, warmup_steps=6)
    losses, parameters = one_process_diloco(config, config.total_steps)

    async def main():
        simulation = Simulation(config)
        await simulation.start(peers_per_stage=1, trainers=0)
        await simulation.add_trainer("trainer0", in_flight=1)
        await simulation.finish()
        result = simulation.records(), simulation.parameters()
        await simulation.close()
        return result

    swarm_losses, swarm_parameters = run_virtual(main())
    assert swarm_losses == pytest.approx(losses, rel=1e-8)
    assert float((swarm_parameters - parameters).norm() / parameters.norm()) < 1e-8


@pytest.mark.parametrize(
    "changes",
    [{}, {"fragments": 3}, {"average_compression": "fp16"}, COCKTAIL, THIN_DIFFERENCES, POWERSGD, {**POWERSGD, "delay_steps": 1}],
    ids=lambda c: "-".join(map(str, c.values())) or "diloco",
)
def test_replicas_are_identical_and_the_loss_falls(changes):
    config = local_config(total_steps=8, **changes)

    async def main():
        simulation = Simulation(config, seed=1)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        result = simulation.records(), replicas(simulation)
        await simulation.close()
        return result

    losses, found = run_virtual(main())
    assert all(len(stage) == 1 for stage in found), found
    assert sum(losses[-3:]) / 3 < losses[0] - 0.05, "the labels are random: log(4) is the best that can be had"


@pytest.mark.parametrize("seed", range(2000, 2004))
def test_every_step_commits_and_replicas_are_identical_under_random_faults(seed):
    """Kills, cuts, hangs, restarts, moves: no ticket moves two copies, none is missing from a record."""
    changes = [{}, COCKTAIL, THIN_DIFFERENCES, POWERSGD]
    config = local_config(total_steps=4, timing={"rebalance_every_s": 0.0}, **changes[seed % 4])
    schedule = Schedule.draw(seed)

    async def main():
        simulation = Simulation(config, seed=seed, jitter_s=0.002)
        faults = Faults(simulation)
        try:
            await simulation.start(peers_per_stage=3, trainers=2)
            await simulation.began()
            running = [asyncio.ensure_future(faults.run(fault)) for fault in schedule.faults]
            await simulation.finish(within_s=600.0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            assert len(simulation.records()) == 4
            return replicas(simulation)
        finally:
            await simulation.abandon()

    assert [len(stage) for stage in run_checked(main())] == [1, 1, 1]


@pytest.mark.parametrize("changes", [COCKTAIL, THIN_DIFFERENCES])
def test_a_peer_that_dies_takes_what_it_had_not_sent_with_it_and_the_run_goes_on(caplog, changes):
    config = local_config(total_steps=8, **changes)

    async def main():
        simulation = Simulation(config, seed=2)
        await simulation.start(peers_per_stage=3, trainers=1)
        while max(simulation.commits, default=-1) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert simulation.nodes["stage1.1"].peer.stage_context.compressor.residual is not None
        await simulation.kill("stage1.1")
        await simulation.add_stage_peer("stage1.3", 1)
        await simulation.finish()
        result = simulation.records(), replicas(simulation)
        await simulation.close()
        return result

    losses, found = run_virtual(main())
    assert len(losses) == 8
    assert all(len(stage) == 1 for stage in found), found
    assert any("had not sent of earlier steps is lost with it" in x.getMessage() for x in caplog.records)
