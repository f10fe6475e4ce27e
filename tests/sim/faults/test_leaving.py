"""SIGTERM costs no ticket: whoever leaves finishes, hands over or contributes what it has, within a bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from swarm.peer.stage.stage_peer import StagePeer
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.memory_dht import MemoryDht
from swarm.testing.simulation.phases import Log, committed, kind, node_of, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

#: SIGTERM to the end, in seconds.
BOUND_S = 15.0


class Tally:
    """What every stage peer of a simulation made of its micro-batches, also of those that left."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.peers: list[StagePeer] = simulation.stage_peers()

    def assert_nothing_was_computed_twice(self) -> None:
        config = self._simulation.config
        for stage in range(config.num_stages):
            ends = sum((p.micro_batches.phases for p in self.peers if p.stage == stage), start=Counter())
            assert dict(ends) == {"accumulated": config.tickets_per_step * config.total_steps}, f"stage {stage}: {dict(ends)}"
        assert all(record.reopened == 0 for record in self._simulation.commits.values())


async def leave(simulation: Simulation, name: str) -> None:
    began = asyncio.get_running_loop().time()
    await simulation.leave(name)
    assert asyncio.get_running_loop().time() - began < BOUND_S


async def holds_gradients(simulation: Simulation, name: str) -> None:
    member = simulation.nodes[name].peer.member
    await until(lambda: bool(member.held_tickets()), f"{name} accumulates")


@pytest.mark.parametrize("delay_steps", [0, 1])
@pytest.mark.parametrize("leads", [False, True], ids=["member", "leader"])
def test_a_stage_peer_that_leaves_contributes_first(leads, delay_steps):
    config = small_config(total_steps=8, delay_steps=delay_steps)

    async def main():
        simulation = Simulation(config, seed=9)
        await simulation.start(peers_per_stage=2, trainers=1)
        tally = Tally(simulation)
        await committed(simulation, 2)
        members = simulation.commits[1].members[1]
        name = node_of(simulation, members[0 if leads else 1]).name
        await holds_gradients(simulation, name)
        await leave(simulation, name)
        left_at = max(simulation.commits)
        await simulation.finish()
        check(simulation)
        assert left_at <= 5, "it stayed longer than the steps that it held gradients of"
        tally.assert_nothing_was_computed_twice()
        await simulation.close()

    run_virtual(main())


def test_a_trainer_that_leaves_finishes_what_it_has_in_flight():
    config = small_config(total_steps=8)

    async def main():
        simulation = Simulation(config, seed=10)
        await simulation.start(peers_per_stage=2, trainers=2)
        tally = Tally(simulation)
        await committed(simulation, 2)
        trainer = simulation.nodes["trainer1"].peer
        await until(lambda: len(trainer._running) > 1, "the trainer has tickets in flight")
        await leave(simulation, "trainer1")
        await simulation.finish()
        check(simulation)
        tally.assert_nothing_was_computed_twice()
        await simulation.close()

    run_virtual(main())


def test_a_coordinator_that_leaves_ends_the_open_step_first():
    config = small_config(total_steps=8)

    async def main():
        simulation = Simulation(config, seed=11)
        await simulation.start(peers_per_stage=2, trainers=1, backbones=2)
        tally = Tally(simulation)
        await committed(simulation, 2)
        [name] = [n for n, node in simulation.nodes.items() if simulation.coordinates(node)]
        await holds_gradients(simulation, "stage1.0")
        elections = Log(simulation, kind(m.Elect))
        await leave(simulation, name)
        assert not elections.calls, "another coordinator stood while the step was open"
        await simulation.finish()
        check(simulation)
        assert elections.calls
        tally.assert_nothing_was_computed_twice()
        await simulation.close()

    run_virtual(main())


def test_what_no_commit_takes_in_time_is_given_back_at_once():
    """A stage has hung, so no step ends: the leaver goes all the same, and what it held is leased again before any seal."""
    config = small_config(total_steps=5)

    async def main():
        simulation = Simulation(config, seed=12)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        await holds_gradients(simulation, "stage1.0")
        hung = [simulation.nodes["stage2.0"], simulation.nodes["stage2.1"]]
        for node in hung:
            simulation.hang(node)
        held = {ticket.index for ticket in simulation.nodes["stage1.0"].peer.member.held_tickets()}
        leases = Log(simulation, kind(m.Lease))
        await leave(simulation, "stage1.0")
        leases.calls.clear()
        for node in hung:
            simulation.unhang(node)
        await simulation.finish()
        check(simulation)
        assert held
        assert simulation.commits[2].reopened == 0, "the lost tickets were found missing only at a seal"
        await simulation.close()

    run_virtual(main())


def test_a_stage_peer_that_is_stopped_while_it_starts_has_nobody_to_tell(monkeypatch):
    """Its DHT node has not begun: it can neither withdraw a record nor look a coordinator up."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        simulation = Simulation(small_config(total_steps=4), seed=44)
        await simulation.start()
        with monkeypatch.context() as patched:
            patched.setattr(MemoryDht, "start", never)
            starting = asyncio.ensure_future(simulation.add_stage_peer("late", 0))
            await asyncio.sleep(0.1)
            starting.cancel()
            await asyncio.wait({starting})
        began = asyncio.get_running_loop().time()
        await simulation.nodes.pop("late").peer.close()
        assert asyncio.get_running_loop().time() - began < 0.5
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_where_all_leave_at_once_what_had_committed_is_on_disk(tmp_path: Path) -> None:
    """Trainers go first, as `launch_local` has it. Of each stage those write that write checkpoints, and nobody else."""
    config = small_config(total_steps=50, checkpoint_every=4, checkpoint_copies=1)

    async def main() -> int:
        simulation = Simulation(config, seed=14, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 6)
        await leave(simulation, "trainer0")
        last = max(simulation.commits)
        assert (last + 1) % config.checkpoint_every, "a checkpoint was due anyway"
        await asyncio.gather(*(leave(simulation, name) for name in list(simulation.nodes) if name.startswith("stage")))
        found = find_complete([tmp_path])[0]
        assert found.record.step == last
        assert found.record.version_id == simulation.commits[last].version_id
        await simulation.close()
        return last

    last = run_virtual(main())
    assert len(list(tmp_path.glob(f"*/checkpoints/stage-*/step-{last + 1:08d}"))) == config.num_stages
