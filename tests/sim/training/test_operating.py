"""An operator pauses, resumes and stops a run: after a whole step, on disk, and whoever coordinates next."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.peer.link import Refuse
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.simulation.phases import committed, coordinator_of, finish_from, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m


async def say(simulation: Simulation, action: str, at_step: int | None = None) -> m.Operated:
    node = coordinator_of(simulation)
    order = m.Operate(run=node.peer.context.run, action=action, at_step=at_step)
    return await node.peer.election.coordinator.on_operate(order, node.address.host)


async def stands_still(simulation: Simulation, seconds: float) -> int:
    """Steps committed, which do not change for so long."""
    num_commits = max(simulation.commits) + 1
    await asyncio.sleep(seconds)
    assert max(simulation.commits) + 1 == num_commits, "a step committed while the run was paused"
    return num_commits


def test_a_paused_run_stays_paused_under_the_next_coordinator_and_goes_on_when_told(tmp_path):
    config = small_config(total_steps=10)

    async def main():
        simulation = Simulation(config, seed=31, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1, backbones=2)
        await committed(simulation, 3)
        reply = await say(simulation, "pause")
        await until(lambda: any(r.order.paused for r in simulation.commits.values()), "a record says so")
        await asyncio.sleep(1.0)
        paused_at = await stands_still(simulation, 30.0)
        assert paused_at == reply.step + 1, "the step under way ends, and no other"
        assert (await say(simulation, "pause")).text == f"the run is paused after step {paused_at} already"
        assert find_complete([tmp_path])[0].record.step + 1 == paused_at
        before = coordinator_of(simulation)
        await simulation.kill(before.name)
        await until(lambda: any(simulation.coordinates(n) for n in simulation.nodes.values()), "another coordinates")
        assert await stands_still(simulation, 30.0) == paused_at
        trainer = simulation.nodes["trainer0"].peer
        assert trainer.waiting_for == "an operator: the run is paused"
        assert trainer.retries.num_retries == 0, "tickets were tried while the run was paused"
        await say(simulation, "resume")
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_backbone_says_what_it_knows_of_the_run_and_never_that_nothing_has_committed():
    """One that does not coordinate, such as one that was restarted, hears it from the one that does."""

    async def main():
        simulation = Simulation(small_config(total_steps=20), seed=35)
        await simulation.start(peers_per_stage=1, trainers=1, backbones=1)
        await committed(simulation, 3)
        node = await simulation.add_backbone("backbone1")
        said = []

        while not said or said[-1].step < 0:
            said.append((await node.peer.link.ask(node.peer.context.member(), m.Status(), m.StatusReply))[0])
            await asyncio.sleep(0.05)
        assert len(said) > 1, "it knew at once"
        assert said[-1].state == "watching"
        assert said[-1].step >= 3
        assert [len(members) for members in said[-1].stages] == [1, 1, 1]
        await simulation.close()

    run_virtual(main())


def test_a_run_stops_at_a_step_and_goes_on_from_there_after_a_restart(tmp_path):
    config = small_config(total_steps=8)

    async def main():
        simulation = Simulation(config, seed=32, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 2)
        with pytest.raises(Refuse, match=r"step 9 never comes: the run ends after step 8"):
            await say(simulation, "stop", at_step=9)
        link = simulation.nodes["trainer0"].peer.link
        for peer in simulation.stage_peers():  # `swarm_control` may be pointed at any peer
            info, _ = await link.ask(peer.context.member(), m.Hello(), m.RunInfo)
            assert info.coordinator is not None
            assert info.coordinator.key == coordinator_of(simulation).peer.context.member().key
        assert (await say(simulation, "stop", at_step=5)).text.startswith("the run stops after step 5")
        async with asyncio.timeout(60):
            await simulation.nodes["trainer0"].running
        await asyncio.sleep(1.0)
        assert max(simulation.commits) + 1 == 5
        assert (await say(simulation, "stop")).text == "the run has stopped after step 5 already"
        assert find_complete([tmp_path])[0].record.step + 1 == 5
        began = asyncio.get_running_loop().time()
        for peer in simulation.stage_peers(1):
            await simulation.leave(next(name for name, node in simulation.nodes.items() if node.peer is peer))
        assert asyncio.get_running_loop().time() - began < 2.0, "it waited for a record that never comes"
        await simulation.abandon()
        second = Simulation(config, seed=33, state_dir=tmp_path)
        await second.start(peers_per_stage=2, trainers=1)
        await finish_from(second, simulation, 5)

    run_virtual(main())


def test_a_paused_run_that_is_stopped_trains_no_more_and_goes_on_when_told(tmp_path):
    """Its checkpoint was written when it paused."""

    async def main():
        simulation = Simulation(small_config(total_steps=10), seed=36, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 2)
        paused_at = (await say(simulation, "pause")).step + 1
        await until(lambda: simulation.commits[max(simulation.commits)].order.paused, "it has paused")
        assert (await say(simulation, "stop")).text.startswith(f"the run stops after step {paused_at};")
        async with asyncio.timeout(10):
            await simulation.nodes["trainer0"].running
        assert await stands_still(simulation, 30.0) == paused_at
        assert (await say(simulation, "stop")).text == f"the run has stopped after step {paused_at} already"
        waiting_for = coordinator_of(simulation).peer.election.coordinator.waiting_for
        assert waiting_for == f"an operator: the run was stopped after step {paused_at}"
        assert find_complete([tmp_path])[0].record.step + 1 == paused_at
        await say(simulation, "resume")
        await simulation.add_trainer("trainer1")
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_stopped_run_goes_on_when_told(caplog):
    """Everyone says why it ends, and only where the run is done for good that nobody is needed any more."""
    config = small_config(total_steps=6)
    caplog.set_level(logging.INFO, "swarm")

    def told():
        return sum("the run is done; Ctrl-C to leave" in record.getMessage() for record in caplog.records)

    async def main():
        simulation = Simulation(config, seed=34)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 1)
        await say(simulation, "stop")
        async with asyncio.timeout(60):
            await simulation.nodes["trainer0"].running
        assert told() == 0
        await asyncio.sleep(1.0)
        stopped_at = max(simulation.commits) + 1
        said = [record.getMessage() for record in caplog.records if "an operator stopped" in record.getMessage()]
        assert sorted(said) == [
            f"an operator stopped the run after step {stopped_at}: this trainer ends",
            *[f"an operator stopped the run after step {stopped_at}; Ctrl-C to leave"] * config.num_stages,
        ]
        await say(simulation, "resume")
        await simulation.add_trainer("trainer1")
        await simulation.finish()
        check(simulation)
        assert told() == config.num_stages
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("remote", ["", "10.0.0.2", "192.0.2.7", "::ffff:10.0.0.2"])
def test_only_the_coordinators_own_machine_operates_the_run(remote):
    async def main():
        simulation = Simulation(small_config(), seed=35)
        await simulation.start(peers_per_stage=1, trainers=0)
        await simulation.began()
        node = coordinator_of(simulation)
        order = m.Operate(run=node.peer.context.run, action="stop")
        with pytest.raises(Refuse, match="operated from the machine of its coordinator"):
            await node.peer.election.coordinator.on_operate(order, remote)
        for here in ("127.0.0.1", "::1", node.address.host):
            await node.peer.election.coordinator.on_operate(order, here)
        await simulation.close()

    run_virtual(main())


def test_a_trainer_that_comes_late_tells_what_went_before_as_such():
    """And serves as many steps as it was asked for from then on."""
    config = small_config(total_steps=40)

    async def main():
        simulation = Simulation(config, seed=34)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 3)
        late = await simulation.add_trainer("trainer1", num_steps=3)
        await until(lambda: late.running.done(), "it has served")
        await simulation.leave(late.name)
        *history, first, second, third = late.reports
        assert [report.seconds for report in history] == [0.0] * len(history)
        assert [report.goes_on for report in history] == [False] * (len(history) - 1) + [True]
        assert history[-1].record.step >= 2
        assert [r.record.step - history[-1].record.step for r in (first, second, third)] == [1, 2, 3]
        assert min(r.seconds for r in (first, second, third)) > 0
        for number in range(2, 8):
            short = await simulation.add_trainer(f"trainer{number}", num_steps=1)
            await until(lambda node=short: node.running.done(), "it has served")
            await simulation.leave(short.name)
        await simulation.finish()
        slowest = max(report.seconds for report in simulation.nodes["trainer0"].reports)
        assert slowest < config.timing.lease_s / 2, f"a step took {slowest:.1f} s: one that had left was given tickets"
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_peer_that_joins_a_finished_run_says_that_it_is_finished(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="swarm.peer.stage.membership")

    async def main() -> None:
        simulation = Simulation(small_config(total_steps=2), seed=3)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 2)
        await simulation.add_stage_peer("stage1.1", 1)
        await asyncio.sleep(10.0)
        await simulation.abandon()

    run_virtual(main())
    said = [x.getMessage() for x in caplog.records if "not listed yet" in x.getMessage()]
    assert said == ["stage 1: this peer is not listed yet; the run is finished"]
