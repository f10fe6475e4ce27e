"""A record that its stage's only holder did not hear of: found by `benchmarks/faults/chaos_real.py`."""

from __future__ import annotations

import asyncio

from swarm.base.errors import LinkBroken
from swarm.testing.simulation.phases import committed
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m


def test_the_only_holder_of_a_stage_hears_a_record_that_it_missed():
    """Every word of step 1's record to stage 1's only peer is lost; the next gather finds it behind, and tells it."""
    config = small_config(total_steps=4)

    async def main():
        simulation = Simulation(config, seed=31)
        await simulation.start(peers_per_stage=1, trainers=1)
        deaf = simulation.nodes["stage1.0"].address
        lost = []

        async def lose(call):
            record = getattr(call.message, "record", None)
            if isinstance(call.message, m.Commit) and call.target == deaf and record.step == 1 and len(lost) < 3:
                lost.append(call)
                raise LinkBroken("lost (injected)")

        simulation.before_request.append(lose)
        began = asyncio.get_running_loop().time()
        await committed(simulation, 3)
        seconds = asyncio.get_running_loop().time() - began
        assert len(lost) == 3, "the coordinator and both neighbours told it once each"
        assert seconds < config.timing.stage_lost_s / 2, f"three steps took {seconds:.1f} s"
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_coordinator_that_finds_a_stage_lost_as_it_is_elected_sets_the_run_back(tmp_path):
    """Both the coordinator and a stage's only peer die; the next one's first questions already find nobody there."""
    config = small_config(total_steps=6, checkpoint_every=2, checkpoint_copies=1, timing={"stage_lost_s": 5.0})

    async def main():
        simulation = Simulation(config, seed=32, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1, backbones=2)
        await committed(simulation, 3)
        old = next(n for n in simulation.nodes.values() if simulation.coordinates(n))
        stage = simulation.nodes["stage1.0"]
        elected = asyncio.Event()

        async def kill_after_the_vote(call):
            if isinstance(call.message, m.Gather) and call.message.attempt.ballot.counter > 1 and not elected.is_set():
                elected.set()
                await simulation.kill("stage1.0")

        simulation.before_request.append(kill_after_the_vote)
        await simulation.kill(old.name)
        await asyncio.wait_for(elected.wait(), 60.0)
        assert stage.name not in simulation.nodes
        await asyncio.sleep(3.0)
        await simulation.add_stage_peer("stage1.0", 1)
        await simulation.finish()
        check(simulation, lineages=True)
        assert max(record.era for record in simulation.commits.values()) == 1, "the run was not set back"
        await simulation.close()

    run_virtual(main())
