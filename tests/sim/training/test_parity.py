"""Promise 2, same_as_one_process: the swarm in virtual time against the plain PyTorch loop."""

from __future__ import annotations

import pytest
import torch

from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import one_process, small_config
from swarm.testing.virtual_time import run_virtual


def run_swarm(config, *, seed=0, **start):
    async def main():
        simulation = Simulation(config, seed=seed)
        await simulation.start(**start)
        await simulation.finish()
        losses, parameters = simulation.records(), simulation.parameters()
        replicas = [
            [(p.committed.versions.newest.version_id, p.committed.state_digest) for p in simulation.stage_peers(stage)]
            for stage in range(config.num_stages)
        ]
        await simulation.close()
        return losses, parameters, replicas

    return run_virtual(main())


@pytest.mark.parametrize("delay_steps", [0, 1])
@pytest.mark.parametrize(("peers", "trainers"), [(1, 1), (2, 1), (3, 2)])
def test_same_as_one_process_in_fp64(peers, trainers, delay_steps):
    config = small_config(total_steps=6, delay_steps=delay_steps)
    plain = one_process(config)
    losses, parameters, replicas = run_swarm(config, peers_per_stage=peers, trainers=trainers)
    assert losses == pytest.approx(plain.losses, rel=1e-8)
    assert float((parameters - plain.parameters).norm() / plain.parameters.norm()) < 1e-8
    for stage in replicas:
        assert len(stage) == peers
        assert len(set(stage)) == 1, f"replicas differ: {stage}"


@pytest.mark.parametrize(("precision", "distance"), [("fp64", 1e-8), ("fp32", 1e-6)])
def test_same_as_one_process_with_lamb(precision, distance):
    """The paper's algorithm on whole tensors, 20 steps, two peers a stage."""
    config = small_config(total_steps=20, precision=precision, optimizer="lamb", weight_decay=0.1, learning_rate=0.01)
    plain = one_process(config)
    losses, parameters, replicas = run_swarm(config)
    assert losses == pytest.approx(plain.losses, rel=distance)
    assert float((parameters - plain.parameters).norm() / plain.parameters.norm()) < distance
    for stage in replicas:
        assert len(set(stage)) == 1, f"replicas differ: {stage}"


def test_same_as_one_process_in_fp32():
    config = small_config(total_steps=6, precision="fp32")
    plain = one_process(config)
    losses, parameters, _ = run_swarm(config)
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    assert parameters.dtype == torch.float32


@pytest.mark.parametrize(("codec", "distance"), [("fp16", 2e-4), ("bf16", 2e-3), ("8bit", 2e-2), ("int8", 2e-2)])
def test_replicas_identical_and_close_to_one_process_with_compressed_averages(codec, distance):
    config = small_config(total_steps=6, precision="fp32", average_compression=codec)
    plain = one_process(config)
    losses, parameters, replicas = run_swarm(config, peers_per_stage=3)
    assert losses == pytest.approx(plain.losses, rel=distance)
    assert 0 < float((parameters - plain.parameters).norm() / plain.parameters.norm()) < distance * 5
    for stage in replicas:
        assert len(set(stage)) == 1, f"replicas differ: {stage}"
