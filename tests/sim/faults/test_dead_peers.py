"""Many peers go at once, or ask to be listed and never answer: the run commits again within a bound, at what the rest can do."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import Log, committed
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.wire import messages as m


@pytest.mark.parametrize("how", ["killed", "preempted", "stopped"])
def test_seven_of_eight_peers_of_each_stage_go_at_once(how):
    """It commits within 3 x `stall_s`, hardly a ticket is tried on a dead peer, and then it is as fast as the rest can be."""

    async def main():
        simulation = Simulation(small_config(num_stages=2, total_steps=9, target_batch_size=64), seed=5)
        loop = asyncio.get_running_loop()
        await simulation.start(peers_per_stage=8, trainers=1)
        await committed(simulation, 2)
        await asyncio.sleep(0.03)
        in_flight, chosen = len(simulation.nodes["trainer0"].peer._running), random.Random(1)
        names = [f"stage{stage}.{i}" for stage in range(2) for i in chosen.sample(range(8), 7)]
        dead = {simulation.nodes[name].address for name in names}
        for name in names:
            await simulation.fell(name, how)
        wasted = Log(simulation, lambda call: isinstance(call.message, m.Train) and call.target in dead)
        step = max(simulation.commits) + 1
        await committed(simulation, step + 1, within_s=3 * simulation.config.timing.stall_s)
        await committed(simulation, step + 2)
        began = loop.time()
        await committed(simulation, step + 5)
        compute_s = 3 * simulation.config.tickets_per_step * 0.03
        assert loop.time() - began < 1.25 * compute_s, "one peer of each stage computes all the time"
        assert len(wasted) <= 2 * in_flight, f"{in_flight} tickets in flight, {len(wasted)} sent to dead peers afterwards"
        await simulation.finish(within_s=60.0)
        check(simulation)
        await simulation.abandon()

    run_checked(main())


@pytest.mark.parametrize("refuses", [True, False])
def test_sixty_joiners_that_never_answer(refuses):
    """They ask before the run begins, and for some steps: they are in no record, and no step waits for them."""

    async def main():
        simulation = Simulation(small_config(num_stages=2, total_steps=18), seed=6)
        loop = asyncio.get_running_loop()
        await simulation.add_backbone("backbone0")
        joining = asyncio.ensure_future(simulation.silent_joiners(60, for_s=4.0, refuses=refuses))
        await asyncio.sleep(1.0)
        await simulation.start(peers_per_stage=2, trainers=1, backbones=0)
        await simulation.began(within_s=4.0)
        while not joining.done():
            step, _began = max(simulation.commits), loop.time()
            await committed(simulation, step + 2, within_s=1.5)
        await simulation.finish(within_s=60.0)
        listed = {x.port for record in simulation.commits.values() for xs in record.members for x in xs}
        assert listed == {peer.context.transport.address.port for peer in simulation.stage_peers()}
        check(simulation)
        await simulation.abandon()

    run_checked(main())


def test_a_joiner_that_cannot_be_reached_is_told_so_and_is_listed_once_it_can_be():
    async def main():
        simulation = Simulation(small_config(num_stages=2, total_steps=30), seed=7)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 1)
        (coordinator,) = [node for node in simulation.nodes.values() if simulation.coordinates(node)]
        refused = [True]

        def lost(call):
            return refused[0] and call.source == coordinator.address and call.target == late

        late = simulation.next_address
        simulation.lose_reply.append(lost)
        node = await simulation.add_stage_peer("stage0.late", 0)
        await committed(simulation, 6)
        waits = node.peer.membership.waiting_for
        assert waits.startswith(f"this peer to answer at {late.host}:{late.port}, which it announces: "), waits
        assert all(x.port != late.port for xs in simulation.commits[max(simulation.commits)].members for x in xs)
        refused[0] = False
        await simulation.finish(within_s=120.0)
        assert any(x.port == late.port for x in simulation.commits[max(simulation.commits)].members[0])
        check(simulation)
        await simulation.abandon()

    run_checked(main())
