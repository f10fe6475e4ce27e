"""`--stage auto`: the coordinator places newcomers where the swarm gains most, by what it knows of everyone alive."""

from __future__ import annotations

import random

from swarm.base.config import Timing
from swarm.base.ids import new_incarnation
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import committed, coordinator_of, until
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import small_config
from swarm.wire import messages as m


async def place(simulation: Simulation, number: int, **says: object) -> m.Placed:
    """What a newcomer is told."""
    asker = simulation.nodes["trainer0"].peer
    member = m.Member(
        peer=f"{number:040x}", incarnation=new_incarnation(random.Random(number)), host="10.0.0.9", port=9000 + number
    )
    request = m.Place(run=asker.context.run, member=member, **says)
    placed, _ = await asker.link.ask(coordinator_of(simulation).peer.context.member(), request, m.Placed)
    return placed


def slow_to_forget(**changes: object):
    """Records outlive their peers by far: who counts them counts the dead."""
    return small_config(timing=Timing(record_ttl_s=600.0, rebalance_every_s=0.0), **changes)


def test_dead_peers_are_not_counted_and_newcomers_who_ask_at_once_spread_out():
    async def main():
        simulation = Simulation(slow_to_forget(total_steps=40), seed=61)
        await simulation.start(peers_per_stage=2)
        await committed(simulation, 1)
        await simulation.kill("stage1.0")
        await until(lambda: any(len(r.members[1]) == 1 for r in simulation.commits.values()), "a record without the dead peer")
        told = [(await place(simulation, n)) for n in range(4)]
        stages = [x.stage for x in told]
        assert stages[0] == 1, told[0].reason
        assert sorted(stages[1:]) == [0, 1, 2], [x.reason for x in told]
        await simulation.abandon()

    run_checked(main())


def test_a_stage_of_slow_peers_is_helped_rather_than_the_one_with_the_fewest():
    async def main():
        simulation = Simulation(small_config(total_steps=60, timing=Timing(rebalance_every_s=0.3)), seed=62)
        await simulation.add_backbone("backbone0")
        for name, stage in (("a", 0), ("b", 1), ("c", 1), ("d", 2)):
            node = await simulation.add_stage_peer(name, stage)
            node.slowness = 4.0 if stage == 1 else 1.0
        await simulation.add_trainer("trainer0")
        await committed(simulation, 1)
        await until(lambda: "not" not in coordinator_of(simulation).peer.election.coordinator.rebalancing.reason, "it measured")
        placed = await place(simulation, 1)
        assert placed.stage == 1, placed.reason
        tight = await place(simulation, 2, room_bytes=1)
        assert tight.stage is None
        assert tight.reason.startswith("no stage fits")
        await simulation.abandon()

    run_checked(main())


def test_a_device_that_computed_nothing_yet_is_judged_by_the_benchmark_that_all_ran():
    """Ten times the flops of the others: it is expected to be ten times as fast."""

    async def main():
        simulation = Simulation(slow_to_forget(total_steps=40), seed=63)
        await simulation.start(peers_per_stage=1)
        for node in simulation.nodes.values():
            if node.name.startswith("stage"):
                node.peer.meter._flops_per_s = 1e9
        await committed(simulation, 3)
        coordinator = coordinator_of(simulation).peer.election.coordinator
        coordinator.rebalancing._remember()
        placed = await place(simulation, 1, flops_per_s=1e10)
        expected_s = next(iter(coordinator.rebalancing._placed.values()))[3]
        typical_s = coordinator.rebalancing.swarm(coordinator.record.members).typical_s
        assert 0.05 * typical_s < expected_s < 0.2 * typical_s, placed.reason
        await simulation.abandon()

    run_checked(main())


def test_before_the_run_has_begun_newcomers_fill_the_stages():
    async def main():
        simulation = Simulation(slow_to_forget(total_steps=4), seed=64)
        await simulation.add_backbone("backbone0")
        await simulation.add_trainer("trainer0")
        await simulation.add_stage_peer("a", 1)
        await until(lambda: any(simulation.coordinates(n) for n in simulation.nodes.values()), "a coordinator")
        await until(lambda: coordinator_of(simulation).peer.election.coordinator.next_members.joining, "a peer asked to join")
        assert sorted([(await place(simulation, n)).stage for n in range(2)]) == [0, 2]
        await simulation.abandon()

    run_checked(main())
