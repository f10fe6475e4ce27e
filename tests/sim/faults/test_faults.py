"""Promises 1, 2 and 4 under single faults in virtual time; a failing case is replayed by its seed alone."""

from __future__ import annotations

import asyncio

import pytest

from swarm.peer.context import stage_key
from swarm.peer.trainer.retries import TicketFailed
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import SmallFeed, small_config
from swarm.testing.virtual_time import run_virtual


async def after_steps(simulation, steps, *, within_s=120.0):
    """Until some trainer has seen `steps` commits."""
    async with asyncio.timeout(within_s):
        while max((len(n.reports) for n in simulation.nodes.values()), default=0) < steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("delay_steps", [0, 1])
@pytest.mark.parametrize("victim", ["stage0.0", "stage1.1", "stage2.0"])
def test_exactly_once_when_a_stage_peer_is_killed(victim, delay_steps):
    config = small_config(total_steps=6, delay_steps=delay_steps)

    async def main():
        simulation = Simulation(config, seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await after_steps(simulation, 2)
        await asyncio.sleep(0.05)
        await simulation.kill(victim)
        await simulation.finish()
        check(simulation)
        retries = [report.retries for report in simulation.nodes["trainer0"].reports]
        assert not any(retries[:2]), "nothing had failed"
        assert any(retries), "what the peer had computed was computed again, and nobody said so"
        await simulation.close()

    run_virtual(main())


def test_routers_hear_how_long_a_peer_was_waited_for_that_hangs_far_down_the_route():
    """Its stage's router has to rate it by that; one that refuses at once costs no time."""
    config = small_config(total_steps=6)

    async def main():
        simulation = Simulation(config, seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        waited = []
        wiring = simulation.nodes["trainer0"].peer._route_trips.wiring
        failed = wiring.failed

        def listen(stage, peer, **options):
            waited.append((stage, peer, options["waited_s"]))
            failed(stage, peer, **options)

        wiring.failed = listen
        await after_steps(simulation, 2)
        victim = simulation.nodes["stage1.0"]
        simulation.hang(victim)
        await simulation.finish()
        check(simulation)
        assert (1, victim.peer.stage_context.me.peer, config.timing.stall_s) in waited
        await simulation.close()

    run_virtual(main())


def test_a_newcomer_takes_state_and_serves():
    config = small_config(total_steps=12)

    async def main():
        simulation = Simulation(config, seed=4)
        await simulation.start(peers_per_stage=2, trainers=1)
        await after_steps(simulation, 3)
        await simulation.kill("stage1.0")
        node = await simulation.add_stage_peer("stage1.2", 1)
        await simulation.finish()
        check(simulation)
        assert node.peer.membership.serving
        assert node.peer.micro_batches.phases["accumulated"] > 0, "the newcomer never served a micro-batch"
        await simulation.close()

    run_virtual(main())


def test_no_one_waits_forever_when_the_coordinator_is_killed():
    config = small_config(total_steps=6)

    async def main():
        simulation = Simulation(config, seed=5)
        await simulation.start(peers_per_stage=2, trainers=2)
        await after_steps(simulation, 2)
        await simulation.kill("backbone0")
        began = asyncio.get_running_loop().time()
        await simulation.finish()
        assert asyncio.get_running_loop().time() - began < 60
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_exactly_once_and_no_memory_is_lost_when_trainers_are_killed():
    """Their requests end while a forward is under way, which reserves memory then."""
    config = small_config(total_steps=20)

    async def main():
        simulation = Simulation(config, seed=3)
        await simulation.start(peers_per_stage=2, trainers=3)
        for trainer in ("trainer0", "trainer1"):
            await after_steps(simulation, 5 if trainer == "trainer0" else 10)
            await simulation.kill(trainer)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_case_05_a_peer_that_restarts_takes_its_place_again_and_leaves_no_ghost():
    """One identity, one entry in the roster and in each record; nobody is told of the life before."""
    config = small_config(total_steps=10)

    async def main():
        simulation = Simulation(config, seed=7)
        await simulation.start(peers_per_stage=2, trainers=1)
        await after_steps(simulation, 2)
        await simulation.kill("stage1.0")
        await asyncio.sleep(0.02)
        node = await simulation.add_stage_peer("stage1.0", 1)
        await simulation.finish()
        check(simulation)
        assert node.peer.membership.serving
        me = node.peer.stage_context.me
        last = simulation.commits[config.total_steps - 1]
        assert [x.key for x in last.members[1] if x.peer == me.peer] == [me.key]
        assert node.peer.micro_batches.phases["accumulated"] > 0, "it is listed, and does nothing"
        for other in simulation.nodes.values():
            roster = await other.peer.context.dht.lookup(stage_key(node.peer.context.run, 1))
            assert sorted(x.incarnation for x in roster) == sorted(
                p.stage_context.me.incarnation for p in simulation.stage_peers(1)
            )
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
def test_exactly_once_on_a_lossy_network(seed):
    config = small_config(total_steps=4)

    async def main():
        simulation = Simulation(config, seed=seed, drop=0.01, drop_reply=0.01, duplicate=0.02, jitter_s=0.01)
        await simulation.start(peers_per_stage=2, trainers=2)
        await simulation.finish(within_s=1200)
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_activations_are_recomputed_when_memory_is_short():
    """With a budget too small for graphs every backward recomputes, and nothing changes."""
    config = small_config(total_steps=3)

    async def main():
        simulation = Simulation(config, seed=8)
        await simulation.add_backbone("backbone0")
        for stage in range(3):
            await simulation.add_stage_peer(f"stage{stage}.0", stage, memory_limit_bytes=8 * (4 * 6 * 8 + 4 * 8))
        await simulation.add_trainer("trainer0")
        await simulation.finish()
        check(simulation)
        assert simulation.stage_peers(0)[0].micro_batches.recomputed > 0
        await simulation.close()

    run_virtual(main())


def test_data_that_no_peer_can_compute_end_the_trainer_with_a_reason():
    """Promise 4: nobody tries for ever what fails everywhere."""
    config = small_config(total_steps=2)

    class Misfit(SmallFeed):
        def batch(self, ticket):
            batch = super().batch(ticket)
            batch.inputs["unknown"] = batch.inputs.pop("x")
            return batch

    async def main():
        simulation = Simulation(config, seed=10, feed=Misfit(config))
        await simulation.start(peers_per_stage=2, trainers=1)
        with pytest.raises(TicketFailed, match="fails on every peer of stage 0"):
            async with asyncio.timeout(120):
                await simulation.nodes["trainer0"].running
        await simulation.abandon()

    run_virtual(main())
