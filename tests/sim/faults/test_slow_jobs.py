"""Slow is not hung: jobs that take many times `stall_s`, with nothing to show inside them, and one that never ends among them."""

from __future__ import annotations

import asyncio

import pytest
from test_faults import after_steps

from swarm.base.errors import Stalled
from swarm.testing.simulation.phases import coordinator_of, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

#: Of a forward; a backward takes twice as long. `stall_s` is 8 s.
FORWARD_S = 20.0
#: Every half second of them there are heartbeats to simulate; announcements are of no interest here.
FEW = {"num_stages": 2, "target_batch_size": 16, "total_steps": 2, "timing": {"record_ttl_s": 300.0}}


def slow_swarm(config, **options):
    return Simulation(config, seed=41, forward_s=FORWARD_S, **options)


@pytest.mark.parametrize(
    ("changes", "peers_per_stage"),
    [({}, 2), ({"delay_steps": 1, "target_batch_size": 8}, 1), ({"eval_samples": 4, "eval_every": 1, "target_batch_size": 8}, 1)],
    ids=["plain", "delayed", "evaluated"],
)
def test_jobs_of_minutes_train_without_a_retry(changes, peers_per_stage):
    config = small_config(**{**FEW, **changes})

    async def main():
        simulation = slow_swarm(config)
        await simulation.start(peers_per_stage=peers_per_stage, trainers=1)
        await simulation.finish(within_s=36000.0)
        check(simulation)
        trainer = simulation.nodes["trainer0"]
        assert [(report.retries, report.record.reopened) for report in trainer.reports] == [(0, 0)] * 2
        assert len(trainer.evaluations) == (2 if "eval_every" in changes else 0)
        await simulation.close()

    run_virtual(main())


def test_jobs_that_follow_each_other_in_every_step_may_be_long_too():
    """Seals and optimizer steps of a big stage: whoever waits for one follows it."""
    config = small_config(**FEW)

    async def main():
        simulation = Simulation(config, seed=42)
        await simulation.start(peers_per_stage=2, trainers=1)
        simulation.control_s = 30.0
        await simulation.finish(within_s=3600.0)
        check(simulation)
        reports = simulation.nodes["trainer0"].reports
        assert [(report.retries, report.record.reopened) for report in reports] == [(0, 0)] * 2
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize(("victim", "hung_from"), [("stage0.1", "a later job"), ("stage1.1", "the first job")])
def test_one_that_hangs_among_slow_ones_is_passed_by_within_three_of_its_job_times(victim, hung_from):
    """And nobody else is: those who wait for it do so within its callers' patience."""
    config = small_config(**FEW)

    async def main():
        simulation = slow_swarm(config)
        await simulation.start(peers_per_stage=2, trainers=1)
        wiring, blamed = simulation.nodes["trainer0"].peer._route_trips.wiring, set()
        failed = wiring.failed

        def listen(stage, peer, **options):
            blamed.add(peer)
            failed(stage, peer, **options)

        wiring.failed = listen
        node = simulation.nodes[victim]
        await simulation.began()
        if hung_from == "a later job":
            await after_steps(simulation, 1, within_s=3600.0)
        given_up = []

        def look(call):
            if call.target == node.address and isinstance(call.message, m.Train):
                now = asyncio.get_running_loop().time()
                given_up.append((type(call.error), now - node.executor.running.began, node.executor.running.kind))

        simulation.hang(node)
        while node.executor.running is None or node.executor.running.kind == "control":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        simulation.after_reply.append(look)
        await simulation.finish(within_s=36000.0)
        check(simulation)
        first_s = given_up[0][1]
        assert given_up[0][0] is Stalled
        longest_s = 1.2 * FORWARD_S * (2 if given_up[0][2] == "backward" else 1)
        assert 0.8 * longest_s < first_s < 3 * longest_s, f"given up {first_s:.0f} s after its job began"
        assert [error for error, *_ in given_up].count(Stalled) <= 8, "only what was in its queue by then"
        assert blamed == {node.peer.stage_context.me.peer}
        assert node.peer.member.at_work.overdue().startswith("its compute thread hangs: ")
        simulation.unhang(node)
        await simulation.close()

    run_virtual(main())


def test_a_hang_is_found_as_fast_as_ever_where_jobs_are_short():
    config = small_config(total_steps=6)

    async def main():
        simulation = Simulation(config, seed=43)
        await simulation.start(peers_per_stage=2, trainers=1)
        await after_steps(simulation, 1)
        simulation.hang(simulation.nodes["stage1.1"])
        await simulation.finish()
        check(simulation)
        slowest_s = max(report.seconds for report in simulation.nodes["trainer0"].reports)
        assert slowest_s < 1.7 * config.timing.stall_s, f"{slowest_s:.1f} s"
        await simulation.close()

    run_virtual(main())


def test_a_stages_only_leader_that_was_seen_to_hang_leads_again_when_it_goes_on():
    """It excluded itself for the step, as its compute thread hung; there is nobody else, so everyone is tried again."""
    config = small_config(total_steps=4)

    async def main():
        simulation = Simulation(config, seed=44)
        await simulation.start(peers_per_stage=1, trainers=1, backbones=2)
        await after_steps(simulation, 1)
        victim = simulation.nodes["stage1.0"]
        excluded = []

        def note(call):
            if isinstance(call.reply, m.Gathered) and call.target == victim.address:
                excluded.append(bool(call.reply.excluded))

        simulation.after_reply.append(note)
        simulation.hang(victim)
        await asyncio.sleep(1.2 * config.timing.stall_s)
        await simulation.kill(coordinator_of(simulation).name)  # the next one collects the ledgers at once
        await until(lambda: any(excluded), "its leader excludes itself", within_s=60.0)
        simulation.unhang(victim)
        await simulation.finish(within_s=40.0)
        check(simulation)
        assert excluded[-1] is False
        await simulation.close()

    run_virtual(main())


def test_a_newcomer_that_has_yet_to_make_the_optimizer_step_of_its_first_record_is_waited_for():
    config = small_config(**{**FEW, "total_steps": 4})

    async def main():
        simulation = Simulation(config, seed=44, forward_s=1.0)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.began()
        await simulation.add_stage_peer("stage0.1", 0)
        simulation.control_s = 12.0
        await simulation.finish()
        check(simulation)
        newcomer = simulation.nodes["stage0.1"].peer
        assert newcomer.micro_batches.phases["accumulated"] > 0
        assert [report.retries for report in simulation.nodes["trainer0"].reports] == [0] * 4
        await simulation.close()

    run_virtual(main())


def test_who_waits_long_reads_why():
    config = small_config(**{**FEW, "target_batch_size": 8})

    async def main():
        simulation = slow_swarm(config)
        await simulation.start(peers_per_stage=1, trainers=0)
        read = []
        await simulation.add_trainer("trainer0", on_waiting=read.append)
        await after_steps(simulation, 1, within_s=3600.0)
        peers = [simulation.nodes[f"stage{stage}.0"].peer.stage_context.me.peer[:8] for stage in range(2)]
        assert read[0].startswith(f"tickets of step 1: 2 at stage 0 (peer {peers[0]}: forward for ")
        assert read[0].endswith(" s, no such job has ended yet)")
        assert any(f"(peer {peers[1]}: backward for " in text for text in read)
        assert len(read) <= 6, "told again and again"
        await simulation.finish(within_s=36000.0)
        await simulation.close()

    run_virtual(main())
