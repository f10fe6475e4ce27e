"""A newcomer downloads the state of a big stage from several donors at once, and survives the loss of one halfway."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from simulation import Simulation, check, small_config

from swarm.base.virtual_time import run_virtual
from swarm.peer import stage_member, state_transfer
from swarm.peer.state_transfer import StateDonor


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    """The test model's 42 parameters in 14 ranges a tensor."""
    monkeypatch.setattr(state_transfer, "CHUNK_ELEMENTS", 3)
    monkeypatch.setattr(stage_member, "CHUNK_ELEMENTS", 3)


@pytest.fixture
def served(monkeypatch):
    """Ranges that each donor's address served."""
    counts = Counter()
    plain = StateDonor._on_range

    async def counting(self, message, frame, progress):
        reply = await plain(self, message, frame, progress)
        counts[self._member.me.port] += 1
        return reply

    monkeypatch.setattr(StateDonor, "_on_range", counting)
    return counts


async def after_steps(simulation, steps):
    async with asyncio.timeout(200):
        while max(simulation.commits, default=-1) + 1 < steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kill_a_donor", [False, True])
def test_a_newcomer_downloads_from_three_donors_at_once(served, kill_a_donor):
    config = small_config(total_steps=14)

    async def main():
        simulation = Simulation(config, seed=21)
        await simulation.start(peers_per_stage=3, trainers=1)
        await after_steps(simulation, 2)
        node = await simulation.add_stage_peer("stage1.3", 1)
        donors = [simulation.nodes[f"stage1.{i}"].address for i in range(3)]
        for donor in donors:
            simulation.network.link(node.address, donor, latency_s=0.02)
        if kill_a_donor:
            async with asyncio.timeout(60):
                while served[donors[1].port] < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert sum(served.values()) < 40, "the download was over already"
            await simulation.kill("stage1.1")
        await simulation.finish()
        check(simulation)
        assert node.peer.membership.serving
        assert len([port for port in served if served[port] > 2]) == 3, f"ranges served: {dict(served)}"
        await simulation.close()

    run_virtual(main())


def test_eight_newcomers_do_not_stop_a_step_and_pin_one_snapshot_each(served):
    """CASES row 9: more newcomers than donors; each donor pins one snapshot, and all become members in the end."""
    config = small_config(total_steps=40)

    async def main():
        simulation = Simulation(config, seed=22)
        await simulation.start(peers_per_stage=1, trainers=1)
        await after_steps(simulation, 2)
        pins = []
        plain = StateDonor._on_offer

        async def watching(self, message, frame, progress):
            try:
                return await plain(self, message, frame, progress)
            finally:
                pins.append(len(self._pins))

        StateDonor._on_offer = watching
        try:
            newcomers = [await simulation.add_stage_peer(f"stage1.{i + 1}", 1) for i in range(8)]
            await simulation.finish()
        finally:
            StateDonor._on_offer = plain
        check(simulation)
        assert max(pins) <= 1, "a donor pinned more than one snapshot"
        assert sum(n.peer.membership.serving for n in newcomers) == 8, simulation.describe()
        await simulation.close()

    run_virtual(main())
