"""Initial weights that lie in files: who has none takes the state from its peers, and nothing begins on nobody's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from swarm.testing.simulation.nodes import Node
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import SmallFactory, small_config
from swarm.testing.virtual_time import run_virtual


class FileFactory(SmallFactory):
    """The small model, with its initial values behind `load`; `num_loads` counts the stages that were read."""

    def __init__(self, num_stages: int, *, has_values: bool) -> None:
        super().__init__(num_stages)
        self.has_values = has_values

    def outline(self, stage: int) -> torch.nn.Module:
        return self.build(stage).to("meta")

    def load(self, stage: int, into: Mapping[str, torch.Tensor]) -> None:
        assert self.has_values
        for name, value in self.build(stage).named_parameters():
            if name in into:
                into[name].copy_(value.detach())


def holds_the_newest(simulation: Simulation, stage: int, node: Node) -> bool:
    """Whether the stage would live on with this peer alone."""
    newest, peer = simulation.commits[max(simulation.commits)], node.peer
    listed = any(x.peer == peer.context.peer and x.ready for x in newest.members[stage])
    return listed and peer.membership.serving and peer.committed.versions.newest.version_id == newest.version_id


@pytest.mark.parametrize("frozen", [(), ("layer1.weight", "layer0.bias")], ids=["all trained", "some frozen"])
def test_a_newcomer_without_the_files_takes_the_state_and_serves_alone(frozen: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    config = small_config(total_steps=24, frozen=frozen)

    async def losses(*, replaced: bool) -> list[float]:
        simulation = Simulation(config, seed=4, factory=FileFactory(3, has_values=True))
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.began()
        if replaced:
            simulation.factory = FileFactory(3, has_values=False)
            for stage in range(3):
                await simulation.add_stage_peer(f"new{stage}", stage)
                node = simulation.nodes[f"new{stage}"]
                async with asyncio.timeout(60.0):
                    while not holds_the_newest(simulation, stage, node):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                old = simulation.nodes[f"stage{stage}.0"].peer.stage_context.compute.frozen
                new = node.peer.stage_context.compute.frozen
                assert old.keys() == new.keys()
                assert len(old) == sum(name.startswith(f"layer{stage}.") for name in frozen)
                assert all(torch.equal(old[name], new[name]) for name in old)
                await simulation.kill(f"stage{stage}.0")
        await simulation.finish()
        result = simulation.records()
        await simulation.close()
        return result

    expected = run_virtual(losses(replaced=False))
    assert len(expected) == 24
    assert run_virtual(losses(replaced=True)) == pytest.approx(expected, rel=1e-9)


def test_a_run_begins_only_where_every_stage_has_someone_with_the_weights() -> None:
    torch.set_num_threads(1)
    config = small_config(total_steps=2)

    async def main() -> tuple[str, list[list[bool]]]:
        simulation = Simulation(config, seed=5, factory=FileFactory(3, has_values=True))
        await simulation.add_backbone("backbone0")
        for stage in (0, 2):
            await simulation.add_stage_peer(f"stage{stage}.0", stage)
        simulation.factory = FileFactory(3, has_values=False)
        await simulation.add_stage_peer("stage1.0", 1)
        await simulation.add_trainer("trainer0")
        await asyncio.sleep(30.0)
        assert not simulation.version_ids
        waiting = simulation.describe()
        simulation.factory = FileFactory(3, has_values=True)
        await simulation.add_stage_peer("stage1.1", 1)
        await simulation.began()
        ready = [[x.ready for x in members] for members in simulation.commits[-1].members]
        await simulation.finish()
        await simulation.close()
        return waiting, ready

    waiting, ready = run_virtual(main())
    assert "a peer of stages [1] that has the initial weights (--model)" in waiting
    assert ready == [[True], [True, False], [True]]


def test_peers_that_lost_the_files_go_on_from_their_checkpoints(tmp_path) -> None:
    torch.set_num_threads(1)
    config = small_config(total_steps=6, checkpoint_every=2)

    async def main() -> list[int]:
        simulation = Simulation(config, seed=6, factory=FileFactory(3, has_values=True), state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        async with asyncio.timeout(60.0):
            while max(simulation.version_ids, default=-1) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        await simulation.abandon()
        simulation.version_ids.clear()
        simulation.factory = FileFactory(3, has_values=False)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.finish()
        steps = sorted(simulation.version_ids)
        await simulation.close()
        return steps

    steps = run_virtual(main())
    assert steps[-1] == 5
    assert steps[0] in (1, 3), "from a checkpoint, not from the initial weights"
