"""A stage has nobody: one candidate waits, all others learn what for, nobody is loud, and then the run goes on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from swarm.base.config import Timing
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import Log, committed, coordinator_of, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.wire import messages as m

#: Seconds: after the first of them everything was said that there is to say.
SETTLED_S, LASTS_S = 40.0, 60.0


@pytest.mark.parametrize("coordinator_goes", [True, False])
def test_nobody_of_a_stage_for_long(caplog, coordinator_goes):
    caplog.set_level(logging.INFO)

    async def main():
        simulation = Simulation(small_config(total_steps=6, timing=Timing(stage_lost_s=15.0)), seed=11)
        loop = asyncio.get_running_loop()
        await simulation.start(peers_per_stage=1, trainers=1, backbones=3)
        await committed(simulation, 2)
        elections = Log(simulation, lambda call: isinstance(call.message, m.Elect))
        gone = simulation.nodes["stage1.0"]
        simulation.isolate(gone)
        if coordinator_goes:
            await simulation.kill(coordinator_of(simulation).name)
        began = loop.time()
        await asyncio.sleep(SETTLED_S / 2)
        await simulation.add_stage_peer("stage2.1", 2)
        await asyncio.sleep(SETTLED_S / 2)
        lines = Counter(record.name for record in caplog.records)
        num_elections = len({call.message.ballot for call in elections.calls if call.began_at < began + SETTLED_S})
        assert num_elections <= 3
        await asyncio.sleep(LASTS_S)
        ballots = {call.message.ballot for call in elections.calls if call.source != gone.address}
        assert len(ballots) <= num_elections, f"{len(ballots)} ballots, {num_elections} in the first {SETTLED_S:g} s"
        assert Counter(record.name for record in caplog.records) == lines, "everything was said already"
        for node in simulation.nodes.values():
            if node is not gone:
                waits = str(node.peer._status().detail.get("waiting_for"))
                assert "stage 1" in waits or "stages [1]" in waits, f"{node.name} waits for {waits}"
        if not coordinator_goes:
            await simulation.abandon()
            return
        back = loop.time()
        simulation.rejoin(gone)
        await until(lambda: max(simulation.commits) >= 2, "a step commits", within_s=20.0)
        assert loop.time() - back < 20.0
        await simulation.finish(within_s=60.0)
        check(simulation)
        await simulation.abandon()

    run_checked(main())
    if coordinator_goes:
        told = [r.getMessage() for r in caplog.records if "not listed yet" in r.getMessage()]
        waits = "a live member of stage 1: without one no coordinator is elected"
        assert told == [f"stage 2: this peer is not listed yet; the run waits for {waits}"]
