"""Peers move between stages while the run goes on: decided by a record, carried out by the next, and free of charge."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from swarm.base.config import RunConfig, Timing
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import HeldBack, Log, committed, coordinator_of, kind, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.wire import messages as m


def config(every_s: float = 1e6, **changes: object) -> RunConfig:
    """By default only forced moves are decided."""
    return small_config(timing=Timing(rebalance_every_s=every_s), **changes)


async def start(simulation: Simulation, counts: list[int], trainers: int = 1) -> None:
    await simulation.add_backbone("backbone0")
    for stage, count in enumerate(counts):
        for i in range(count):
            await simulation.add_stage_peer(f"stage{stage}.{i}", stage)
    for i in range(trainers):
        await simulation.add_trainer(f"trainer{i}")


def counts(record: m.CommitRecord) -> list[int]:
    return [sum(x.ready for x in xs) for xs in record.members]


def computed(calls: Log) -> Counter[tuple[int, int, int]]:
    """How often each ticket went through each stage."""
    done = [c.message for c in calls.calls if isinstance(c.reply, m.Trained)]
    return Counter((x.stage, x.ticket.step, x.ticket.index) for x in done)


def assert_nothing_twice(simulation: Simulation, calls: Log) -> None:
    twice = {ticket for ticket, times in computed(calls).items() if times != 1}
    assert not twice, f"(stage, step, ticket) computed more than once: {sorted(twice)}"
    assert sum(record.reopened for record in simulation.commits.values()) == 0


def test_six_two_two_becomes_four_three_three_and_nothing_is_computed_twice():
    async def main():
        simulation = Simulation(config(every_s=0.5, total_steps=20), seed=41)
        calls = Log(simulation, kind(m.Train))
        await start(simulation, [6, 2, 2])
        await simulation.finish()
        records = simulation.commits
        first = next(step for step, record in sorted(records.items()) if record.moves)
        assert sorted((x.source, x.target) for x in records[first].moves) == [(0, 1), (0, 2)]
        assert counts(records[first]) == [6, 2, 2], "in the step after the decision the movers serve their old stage"
        assert counts(records[first + 1]) == [4, 2, 2], "the next record carries it out: they download"
        assert counts(records[19]) == [4, 3, 3]
        assert sum(len(record.moves) for record in records.values()) == 2, "nothing moves once nothing is gained"
        moved = [n.peer for n in simulation.nodes.values() if n.name.startswith("stage0") and n.peer.stage != 0]
        assert all(peer.micro_batches.phases["accumulated"] > 0 for peer in moved)
        assert_nothing_twice(simulation, calls)
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_what_a_peer_has_counted_moves_with_it():
    async def main():
        simulation = Simulation(config(total_steps=14), seed=47)
        await start(simulation, [2, 1, 1])
        await committed(simulation, 10)
        node = simulation.nodes["stage0.1"]
        before = node.peer.bytes_moved.average_sent
        simulation.move("stage0.1", 2)
        await simulation.finish()
        assert node.peer.stage == 2
        assert node.peer.bytes_moved.average_sent >= before > 0
        await simulation.close()

    run_checked(main())


@pytest.mark.parametrize("delay_steps", [0, 1])
@pytest.mark.parametrize("mover", ["stage0.0", "stage0.1"])
def test_no_ticket_is_recomputed_because_of_a_move(delay_steps, mover):
    """Also if the mover leads its stage, and if the tickets of two steps are under way."""

    async def main():
        simulation = Simulation(config(total_steps=14, delay_steps=delay_steps), seed=43)
        calls = Log(simulation, kind(m.Train))
        await start(simulation, [2, 1, 1])
        await committed(simulation, 1)
        simulation.move(mover, 2)
        await simulation.finish()
        assert counts(simulation.commits[13]) == [1, 1, 2]
        assert simulation.nodes[mover].peer.stage == 2
        assert simulation.nodes[mover].peer.micro_batches.phases["accumulated"] > 0
        assert_nothing_twice(simulation, calls)
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_mover_that_dies_during_its_download_costs_nothing_but_itself():
    async def main():
        simulation = Simulation(config(total_steps=16), seed=43)
        calls = Log(simulation, kind(m.Train))
        await start(simulation, [2, 1, 1])
        await committed(simulation, 1)
        simulation.move("stage0.1", 1)
        with HeldBack(simulation, kind(m.StateRange)) as held:
            await held.reached()
            await simulation.kill("stage0.1")
        await simulation.finish()
        assert counts(simulation.commits[15]) == [1, 1, 1]
        assert_nothing_twice(simulation, calls)
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_mover_that_dies_before_it_is_handed_over_is_a_peer_that_dies():
    async def main():
        simulation = Simulation(config(total_steps=12), seed=44)
        await start(simulation, [2, 1, 1])
        await committed(simulation, 1)
        simulation.move("stage0.1", 1)
        await until(lambda: any(record.moves for record in simulation.commits.values()), "a move was decided")
        await simulation.kill("stage0.1")
        await simulation.finish()
        assert [len(xs) for xs in simulation.commits[11].members] == [1, 1, 1]
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_the_last_holder_of_a_stage_does_not_go():
    """Its only neighbour dies after the decision: the record that would carry the move out drops it."""

    async def main():
        simulation = Simulation(config(total_steps=12), seed=45)
        await start(simulation, [2, 1, 1])
        await committed(simulation, 1)
        simulation.move("stage0.1", 1)
        await until(lambda: any(record.moves for record in simulation.commits.values()), "a move was decided")
        await simulation.kill("stage0.0")
        await simulation.finish()
        assert simulation.nodes["stage0.1"].peer.stage == 0
        assert [len(xs) for xs in simulation.commits[11].members] == [1, 1, 1]
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_mover_keeps_its_old_state_until_it_sees_a_live_member_there():
    """The other member of its stage hangs behind a cut line as the move is carried out: if it died, the mover would hold on."""

    async def main():
        simulation = Simulation(config(total_steps=12), seed=46)
        await start(simulation, [2, 1, 1])
        await committed(simulation, 1)
        mover, other = simulation.nodes["stage0.1"], simulation.nodes["stage0.0"]
        simulation.move("stage0.1", 1)
        with HeldBack(simulation, kind(m.Status, source=mover, target=other)) as held:
            await held.reached()
            simulation.network.cut(mover.address, other.address)
        await until(lambda: mover.peer.membership.state == "moving", "the mover was handed over")
        before = max(simulation.commits)
        assert mover.peer.stage == 0
        assert mover.peer.committed.versions.newest.num_commits > 0, "it still holds what it held"
        await until(lambda: mover.peer.stage == 1, "a later record shows that the stage went on")
        assert max(simulation.commits) > before - 1
        simulation.network.heal(mover.address, other.address)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_move_survives_the_coordinator_that_decided_it():
    async def main():
        simulation = Simulation(config(total_steps=16), seed=47)
        await simulation.add_backbone("backbone1")
        await start(simulation, [2, 1, 1])
        await committed(simulation, 1)
        simulation.move("stage0.1", 2)
        await until(lambda: any(record.moves for record in simulation.commits.values()), "a move was decided")
        await simulation.kill(coordinator_of(simulation).name)
        await simulation.finish()
        assert simulation.nodes["stage0.1"].peer.stage == 2
        assert [len(xs) for xs in simulation.commits[15].members] == [1, 1, 2]
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_rebalancing_that_finds_the_same_stage_best_reloads_nothing():
    """CASES row 19."""

    async def main():
        simulation = Simulation(config(total_steps=12), seed=48)
        loads = Log(simulation, kind(m.StateOffer))
        await start(simulation, [2, 2, 2])
        await committed(simulation, 1)
        peer = simulation.nodes["stage1.0"].peer
        compute = peer.stage_context.compute
        simulation.move("stage1.0", 1)
        await committed(simulation, 5)
        await peer._move(1)
        await simulation.finish()
        assert not any(record.moves for record in simulation.commits.values())
        assert peer.stage_context.compute is compute
        assert not loads.calls, "a state was asked for"
        assert counts(simulation.commits[11]) == [2, 2, 2]
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_nothing_moves_in_half_an_hour_when_nothing_is_gained():
    """Paces that vary by a fifth are measured, and decided upon every 300 s: 5 peers on 2 stages are as good as they get."""

    async def main():
        timing = Timing(heartbeat_s=10.0, stall_s=120.0, request_s=20.0, lease_s=120.0, coordinator_s=30.0, record_ttl_s=120.0)
        settings = small_config(num_stages=2, total_steps=10, target_batch_size=64, timing=timing)
        simulation = Simulation(settings, seed=49, forward_s=8.0)
        await start(simulation, [3, 2])
        began = asyncio.get_running_loop().time()
        await simulation.finish(within_s=20000.0)
        hours = (asyncio.get_running_loop().time() - began) / 3600
        assert hours > 0.5, f"only {hours:.2f} h passed"
        assert not any(record.moves for record in simulation.commits.values())
        await simulation.close()

    run_checked(main())
