"""The parameters of a live run at one head, taken by someone who is no peer, while training goes on."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from swarm.base.errors import ConfigError, RemoteError
from swarm.base.ids import Address
from swarm.peer.joining import fetch_run
from swarm.peer.stage.live_state import fetch_parameters
from swarm.stage.layout import Layout
from swarm.testing.memory_transport import MemoryTransport
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire.messages import StateRange


def visitor(simulation: Simulation) -> MemoryTransport:
    return MemoryTransport(simulation.network, Address("10.9.9.9", 1))


async def fetch(simulation: Simulation, transport: MemoryTransport, *, deadline_s: float = 60.0, seed: int = 1):
    info = await fetch_run(transport, simulation.nodes["backbone0"].address, deadline_s=5.0)
    with tempfile.TemporaryDirectory() as directory:
        found = await fetch_parameters(
            transport,
            info,
            simulation.config,
            simulation.factory,
            deadline_s=deadline_s,
            rng=random.Random(seed),
            directory=Path(directory),
        )
        assert not os.listdir(directory), "what was fetched has no name there"
    return found


def test_a_live_run_gives_all_stages_of_one_version_and_goes_on() -> None:
    torch.set_num_threads(1)
    config = small_config(total_steps=12)

    async def main() -> None:
        simulation = Simulation(config, seed=3)
        masters: dict[tuple[int, str], torch.Tensor] = {}
        await simulation.start(peers_per_stage=2, trainers=1)
        for peer in simulation.stage_peers():

            def note(record, peer=peer):
                newest = peer.committed.versions.newest
                masters[peer.stage, newest.version_id] = newest.masters

            note(None)
            peer.committed.on_commit.append(note)
        await simulation.began()
        transport = visitor(simulation)
        version_ids = []
        for _ in range(3):
            record, parameters = await fetch(simulation, transport)
            version_ids.append(record.step)
            await asyncio.sleep(0.37)
            for stage in range(config.num_stages):
                expected = Layout.of(simulation.factory.build(stage)).named(masters[stage, record.version_id])
                assert all(torch.equal(parameters[name], value) for name, value in expected.items())
            assert len(parameters) == 2 * config.num_stages
        assert version_ids[0] < version_ids[-1] < config.total_steps - 1, "it was taken while training went on"
        await simulation.finish()
        check(simulation)
        await transport.close()
        await simulation.close()

    run_virtual(main())


def test_two_exports_from_one_machine_do_not_disturb_each_other() -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        simulation = Simulation(small_config(total_steps=12), seed=5)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.began()
        second = visitor(simulation)
        records = []

        class First(MemoryTransport):
            async def call(self, address, request, **options):
                if isinstance(request.message, StateRange) and not records:
                    records.append((await fetch(simulation, second, seed=2))[0])
                return await super().call(address, request, **options)

        first = First(simulation.network, Address("10.9.9.9", 2))
        record, _ = await fetch(simulation, first)
        assert records[0].step == record.step, "the second came and went while the first was under way"
        await first.close()
        await second.close()
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_what_a_live_run_cannot_give_is_named() -> None:
    torch.set_num_threads(1)
    config = small_config(total_steps=40)

    async def main() -> tuple[str, str]:
        simulation = Simulation(config, seed=4)
        await simulation.add_backbone("backbone0")
        transport = visitor(simulation)
        with pytest.raises(ConfigError) as early:
            await fetch(simulation, transport)
        await simulation.start(peers_per_stage=1, trainers=1, backbones=0)
        await simulation.began()
        await simulation.kill("stage1.0")
        with pytest.raises(RemoteError) as late:
            await fetch(simulation, transport, deadline_s=5.0)
        await transport.close()
        await simulation.abandon()
        return str(early.value), str(late.value)

    early, late = run_virtual(main())
    assert early == "the run has not begun: there is nothing to export yet"
    assert late.startswith("the stages did not offer one version within 5 s; stage 1: ")
