"""A run whose moments are kept in 8 bits: replicas are alike, newcomers take codes over, and a restart goes on to the bit."""

from __future__ import annotations

import pytest
import torch

from swarm.testing.simulation.phases import committed
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import one_process, small_config
from swarm.testing.virtual_time import run_virtual


def digests(simulation, stage):
    return {(p.committed.versions.newest.version_id, p.committed.state_digest) for p in simulation.stage_peers(stage)}


def test_replicas_identical_with_a_newcomer_that_took_codes_over():
    config = small_config(total_steps=12, precision="fp32", optimizer="adamw8bit")

    async def main():
        simulation = Simulation(config, seed=41)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 3)
        newcomer = await simulation.add_stage_peer("stage1.2", 1)
        await simulation.finish()
        assert newcomer.peer.membership.serving
        assert newcomer.peer.bytes_moved.state_received > 0, "it had nothing to take over"
        assert {name: tensor.dtype for name, tensor in newcomer.peer.committed.versions.optimizer.tensors.items()} == {
            "first": torch.uint8,
            "first_scales": torch.float32,
            "second": torch.uint8,
            "second_scales": torch.float32,
        }
        for stage in range(config.num_stages):
            assert len(digests(simulation, stage)) == 1, f"replicas of stage {stage} differ"
        losses = simulation.records()
        await simulation.close()
        return losses

    losses = run_virtual(main())
    assert losses == pytest.approx(one_process(config).losses, rel=0.02)


def test_a_restart_goes_on_to_the_bit(tmp_path):
    """One ticket a step: then nothing else can change the order of a sum."""
    config = small_config(
        total_steps=9, precision="fp32", optimizer="adamw8bit", micro_batch_size=32, checkpoint_every=3, checkpoint_keep=5
    )

    def run(state_dir, *, until_step=None):
        async def main():
            simulation = Simulation(config, seed=42, state_dir=state_dir)
            await simulation.start(peers_per_stage=1, trainers=1)
            if until_step is None:
                await simulation.finish()
                parameters = simulation.parameters()
            else:
                await committed(simulation, until_step)
                parameters = torch.empty(0)
            await simulation.abandon()
            return parameters, min(record.step for record in simulation.commits.values())

        return run_virtual(main())

    undisturbed, _ = run(tmp_path / "undisturbed")
    run(tmp_path / "killed", until_step=4)
    resumed, first = run(tmp_path / "killed")
    assert first >= 2, "it began again from nothing"
    assert torch.equal(resumed, undisturbed)


def test_in_a_local_run_the_inner_moments_are_in_8_bits_and_what_is_shared_stays_alike():
    config = small_config(
        total_steps=6, precision="fp32", optimizer="adamw8bit", mode="local", inner_batch_size=8, learning_rate=0.01
    )

    async def main():
        simulation = Simulation(config, seed=43)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        for stage in range(config.num_stages):
            assert len(digests(simulation, stage)) == 1, f"replicas of stage {stage} differ"
            peers = simulation.stage_peers(stage)
            own = [peer.member.steps.own.inner for peer in peers if peer.member.steps.own.inner is not None]
            assert {state.tensors["first"].dtype for state in own} == {torch.uint8}
            assert {peer.committed.versions.optimizer.tensors["first"].dtype for peer in peers} == {torch.float32}
        losses = simulation.records()
        await simulation.close()
        return losses

    losses = run_virtual(main())
    assert losses[-1] < losses[0]
