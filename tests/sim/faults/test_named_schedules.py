"""Schedules that broke other systems, or nearly this one; each happens on purpose, and promises 1 to 3 hold at its end."""

from __future__ import annotations

import asyncio

import pytest

from swarm.base.errors import Stalled
from swarm.peer.stage import state_transfer
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import HeldBack, Log, committed, coordinator_of, kind, ledger, node_at, node_of, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.wire import messages as m


def test_a_slow_peer_abandoned_mid_request_whose_downstream_call_still_runs():
    """Stage 0 gives a peer of stage 1 up, which does not hear of it: what it asked of stage 2 ends, late, and counts once."""

    async def main():
        simulation = Simulation(small_config(total_steps=5), seed=21)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        slow = simulation.nodes["stage1.0"]
        with HeldBack(simulation, kind(m.Train, stage=2, source=slow), limit=1) as held:
            below = await held.reached()
            above = next(
                c for c in simulation.open_calls if c.target == slow.address and c.message.ticket == below.message.ticket
            )
            simulation.network.cut(above.source, slow.address)
            await asyncio.sleep(4.0)
            busy = node_at(simulation, below.target)
            simulation.hang(busy)
        await until(lambda: above.error is not None, "the slow peer was given up")
        # Nothing advanced for long enough, or the look at a peer whose call stands still found it silent first.
        assert isinstance(above.error, Stalled | asyncio.CancelledError), above.error
        assert below in simulation.open_calls, "its downstream call ended too early to be of interest"
        simulation.unhang(busy)
        await until(lambda: below not in simulation.open_calls, "the downstream call ended")
        assert isinstance(below.reply, m.Trained), f"the downstream call failed: {below.error or below.reply}"
        simulation.network.heal(above.source, slow.address)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_checked(main())


@pytest.mark.parametrize("same_port", [False, True])
@pytest.mark.parametrize("victim", ["leader", "member"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_restart_with_the_same_identity_between_seal_and_average(step, victim, same_port):
    """The seal names an incarnation that is gone: its contribution must not be taken for the newcomer's empty one."""

    async def main():
        simulation = Simulation(small_config(total_steps=5), seed=22)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.began()
        with HeldBack(simulation, kind(m.AllReduce, step=step, stage=1)) as held:
            call = await held.reached()
            leader = node_at(simulation, call.target)
            member = next(n for n in (node_of(simulation, s.member) for s in call.message.seals) if n is not leader)
            gone = leader if victim == "leader" else member
            old = gone.peer.stage_context.me
            assert old.key in {seal.member.key for seal in call.message.seals}
            await simulation.kill(gone.name)
            new = await simulation.add_stage_peer(gone.name, 1, same_port=same_port)
            assert (new.peer.stage_context.me.peer, new.peer.stage_context.me.incarnation) != old.key
            assert new.peer.stage_context.me.peer == old.peer
            assert (new.address == gone.address) == same_port
            await asyncio.sleep(0.1)
        await simulation.finish()
        record = simulation.commits[step]
        assert record.reopened > 0, "the step ended without the tickets of the dead incarnation"
        assert old.key not in {x.key for x in record.results[1].holders}
        check(simulation)
        assert new.peer.membership.serving
        await simulation.close()

    run_checked(main())


def test_an_out_of_memory_error_halfway_through_a_backward():
    """A part of the gradient was added already: the whole accumulator is discarded, its tickets are computed again."""

    async def main():
        simulation = Simulation(small_config(total_steps=4), seed=23)
        await simulation.start(peers_per_stage=2, trainers=1)
        node = simulation.nodes["stage1.0"]
        await until(lambda: len(ledger(node, 1)) >= 2, "two tickets in the ledger")
        lost = ledger(node, 1)
        node.fail_halfway = 1
        await until(lambda: node.fail_halfway == 0, "a backward failed")
        assert not lost & ledger(node, 1), "tickets stay in the ledger of an accumulator that was discarded"
        await simulation.finish()
        assert simulation.commits[1].reopened > 0
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_coordinator_that_dies_after_telling_one_stage():
    """The record is the decision: its successor adopts it from the one peer that has it, and decides nothing else."""

    async def main():
        simulation = Simulation(small_config(total_steps=5), seed=24)
        await simulation.start(peers_per_stage=2, trainers=2, backbones=2)
        await committed(simulation, 2)
        coordinator = coordinator_of(simulation)
        told = simulation.nodes["stage0.0"]
        others = kind(m.Commit, step=2)
        with HeldBack(simulation, lambda c: others(c) and not (c.source == coordinator.address and c.target == told.address)):
            await until(lambda: told.peer.committed.num_commits == 3, "one peer heard of the record")
            await simulation.kill(coordinator.name)
            commits = {n.name: n.peer.committed.num_commits for n in simulation.nodes.values() if n.name.startswith("stage")}
            assert [name for name, count in commits.items() if count == 3] == [told.name]
        await simulation.finish()
        assert coordinator_of(simulation).peer.election.coordinator.ballot.counter > 1
        assert len(simulation.version_ids[2]) == 1
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_two_coordinators_at_once():
    """The old one no longer reaches its rivals, but every stage: it leases and seals until a member refuses its ballot."""

    async def main():
        simulation = Simulation(small_config(total_steps=16), seed=25)
        await simulation.start(peers_per_stage=2, trainers=2, backbones=2)
        await committed(simulation, 2)
        old = coordinator_of(simulation)
        for name in ("backbone0", "backbone1", "trainer1"):
            other = simulation.nodes[name]
            if other is not old:
                simulation.network.cut(old.address, other.address)
        await until(lambda: sum(simulation.coordinates(n) for n in simulation.nodes.values()) == 2, "two coordinators")
        ballots = {n.peer.election.coordinator.ballot for n in simulation.nodes.values() if simulation.coordinates(n)}
        assert len(ballots) == 2
        await simulation.finish()
        assert coordinator_of(simulation).peer.election.coordinator.ballot >= max(ballots)
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_an_isolated_peer_that_re_elects_itself_for_ten_minutes_and_then_heals():
    """It is the only trainer, so the run waits for it. Alone it coordinates nobody; healed, it must not upset those who do."""

    async def main():
        simulation = Simulation(small_config(total_steps=4), seed=26)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 1)
        trainer = simulation.nodes["trainer0"]
        steps, requests = max(simulation.commits), Log(simulation, lambda call: call.source == trainer.address)
        simulation.isolate(trainer)
        await asyncio.sleep(600.0)
        assert simulation.coordinates(trainer), "it never elected itself"
        assert simulation.coordinates(simulation.nodes["backbone0"])
        assert max(simulation.commits) == steps
        assert len(requests) < 2 * 600, f"{len(requests)} requests in ten minutes of being alone"
        simulation.rejoin(trainer)
        await simulation.finish(within_s=120)
        assert not simulation.coordinates(trainer)
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_all_candidates_of_one_stage_gone_and_no_exponential_retries():
    async def main():
        simulation = Simulation(small_config(total_steps=4, timing={"stage_lost_s": 60.0}), seed=27)
        await simulation.start(peers_per_stage=2, trainers=2)
        await committed(simulation, 1)
        gone = [simulation.nodes["stage1.0"], simulation.nodes["stage1.1"]]
        for node in gone:
            simulation.isolate(node)
        requests = Log(simulation, kind(m.Train))
        await asyncio.sleep(15.0)
        first = len(requests)
        await asyncio.sleep(15.0)
        second = len(requests) - first
        for node in gone:
            simulation.rejoin(node)
        tickets = {call.message.ticket for call in requests.calls}
        assert {c.target for c in requests.calls} & {n.address for n in gone}, "nobody tried the stage that is gone"
        # A ticket waits up to 2 s between its passes, each of which asks stage 0 once and stage 1 at most twice.
        assert first <= 3 * 15 * len(tickets), f"{first} requests for {len(tickets)} tickets in 15 s"
        assert second <= first, f"{first} requests in the first 15 s, {second} in the next"
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_checked(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_sole_holder_that_looks_around_as_it_learns_of_a_commit(seed):
    """What it learned and has in hand is not what it lacks: it lets nothing go, and the run is not set back."""

    async def main():
        simulation = Simulation(small_config(total_steps=5), seed=35)
        await simulation.start(peers_per_stage=1, trainers=1)
        peer = simulation.nodes["stage1.0"].peer
        learn, states = peer.committed.learn, []

        def learn_as_it_wakes(record):
            peer.membership._poke.set()  # stands for its timer, which is due at this moment
            learn(record)
            asyncio.get_running_loop().call_soon(lambda: states.append(peer.membership.state))

        peer.committed.learn = learn_as_it_wakes
        await simulation.finish(within_s=120.0)
        assert states.count("serving") >= 4, states
        assert set(states) <= {"waiting", "serving"}, f"it served, and then {states}"
        assert simulation.commits[4].era == 0, "the run was set back"
        check(simulation)
        await simulation.close()

    run_checked(main(), seed=seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [2, 5], ids=["under_way", "after_the_last_step"])
def test_who_is_left_out_keeps_its_state_until_another_is_seen_to_hold_it(steps, seed):
    """The newest version of a record lists one member, which has no state: what those that it leaves out hold is all there is."""

    async def main():
        simulation = Simulation(small_config(total_steps=5, timing={"stage_lost_s": 8.0}), seed=36, forward_s=0.1)
        await simulation.start(peers_per_stage=3, trainers=1)
        await committed(simulation, steps)
        record = simulation.commits[steps - 1]
        bare, *left_out = (node_of(simulation, member).peer for member in record.members[1])
        async with asyncio.timeout(5.0):
            while not all(peer.committed.up_to_date for peer in (bare, *left_out)):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        bare.committed.let_go()
        members = (record.members[0], record.members[1][:1], record.members[2])
        coordinator = next(n.peer.election.coordinator for n in simulation.nodes.values() if simulation.coordinates(n))
        ballot = record.ballot._replace(counter=record.ballot.counter + 1)
        await coordinator._publish(record.model_copy(update={"ballot": ballot, "members": members}), record.members[1][1:])
        await asyncio.sleep(5.0)
        assert {peer.membership.state for peer in left_out} == {"waiting"}
        await simulation.finish()
        await asyncio.sleep(10.0)
        assert simulation.commits[4].era == 1, "the run went on from what was kept"
        assert all(peer.committed.discarded_steps == 0 for peer in simulation.stage_peers())
        assert all(peer.membership.serving for peer in simulation.stage_peers())
        check(simulation)
        await simulation.close()

    run_checked(main(), seed=seed)


def test_a_link_cut_between_two_members_that_the_leader_still_reaches():
    """Both answer the leader, but their round fails: one end is excluded, and the step commits with the others."""

    async def main():
        simulation = Simulation(small_config(total_steps=5), seed=28)
        await simulation.start(peers_per_stage=3, trainers=1)
        await committed(simulation, 2)
        leader, *rest = simulation.commits[1].members[1]
        a, b = (node_of(simulation, member) for member in rest)
        slices = Log(simulation, lambda c: kind(m.Slice)(c) and {c.source, c.target} == {a.address, b.address})
        simulation.network.cut(a.address, b.address)
        await committed(simulation, 3)
        simulation.network.heal(a.address, b.address)
        assert len(slices) > 0
        assert all(call.error is not None for call in slices.calls), "a slice passed the cut"
        record = simulation.commits[2]
        holders = {x.key for x in record.results[1].holders}
        assert leader.key in holders
        assert len(holders) == 2, f"{len(holders)} holders"
        assert record.reopened > 0
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_joiner_whose_download_outlasts_a_step(monkeypatch):
    """Averages queue for it meanwhile and apply to the snapshot that it asked for: one download is enough.

    No step waits for it: it is no part of the all-reduce before it is ready.
    """
    monkeypatch.setattr(state_transfer, "RANGE_ELEMENTS", 3)  # many ranges, as of a big stage

    async def main():
        simulation = Simulation(small_config(total_steps=24), seed=29)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 2)
        began: list[int] = []

        async def slow_down(call):
            asks = isinstance(call.message, m.StateOffer) and not call.message.release
            if asks and call.source == joiner_address:
                began.append(max(simulation.commits))
                simulation.network.link(call.target, call.source, bytes_per_s=10_000.0, one_way=True)

        simulation.before_request.append(slow_down)
        joiner_address = simulation.next_address
        joiner = await simulation.add_stage_peer("stage1.2", 1)
        assert joiner.address == joiner_address
        await until(lambda: joiner.peer.membership.serving, "the joiner serves")
        ended = max(simulation.commits)
        assert len(began) == 2, f"one download asks each of two donors once; they were asked after steps {began}"
        assert ended >= began[0] + 2, f"the download began after step {began[0]} and ended after step {ended}"
        await simulation.finish()
        check(simulation)
        assert joiner.peer.micro_batches.phases["accumulated"] > 0
        await simulation.close()

    run_checked(main())


def test_a_mover_and_a_leaver_of_the_same_stage_at_once():
    """One goes to the next stage under its old identity, one for good; the third carries the stage."""

    async def main():
        simulation = Simulation(small_config(total_steps=20), seed=30)
        await simulation.start(peers_per_stage=3, trainers=1)
        await committed(simulation, 2)
        mover, stayer = simulation.nodes["stage1.0"].identity.peer_id, simulation.nodes["stage1.2"].identity.peer_id
        await asyncio.gather(simulation.leave("stage1.0"), simulation.leave("stage1.1"))
        moved = await simulation.add_stage_peer("stage1.0", 2)
        await simulation.finish()
        members = simulation.commits[19].members
        assert [x.peer for x in members[1]] == [stayer]
        assert mover in {x.peer for x in members[2]}
        assert moved.peer.membership.serving
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_trainer_that_dies_after_the_last_stage_accumulated():
    """The ticket is in the last stage's ledger and nowhere else: whoever gets it next fills in the other stages only."""

    async def was_computed_again(seed: int) -> bool:
        simulation = Simulation(small_config(total_steps=4), seed=seed)
        await simulation.start(peers_per_stage=2, trainers=2)
        await committed(simulation, 1)
        calls = Log(simulation, kind(m.Train))
        trainer = simulation.nodes["trainer0"]

        def half_done():
            """Tickets of trainer0 that the last stage has answered, but stage 1 not yet."""
            own = {c.message.ticket for c in simulation.open_calls if c.source == trainer.address and kind(m.Train)(c)}
            last = {c.message.ticket for c in calls.calls if c.message.stage == 2 and isinstance(c.reply, m.Trained)}
            return {
                t
                for t in own & last
                if any(t.index in ledger(simulation.nodes[f"stage2.{i}"], t.step) for i in range(2))
                and not any(t.index in ledger(simulation.nodes[f"stage{k}.{i}"], t.step) for k in range(2) for i in range(2))
            }

        await until(half_done, "a ticket in the last stage's ledger only", every_s=0.0005)
        (ticket, *_) = half_done()
        await simulation.kill("trainer0")
        await simulation.finish()
        asked = [c for c in calls.calls if c.message.ticket == ticket and c.message.stage == 0]
        check(simulation)
        await simulation.close()
        return len(asked) > 1

    # The hang-up may come too late to stop the other stages: then the ticket is whole, and there is nothing to fill in.
    assert any(run_checked(was_computed_again(seed)) for seed in range(31, 37)), "nobody computed the ticket again"


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_the_last_ticket_of_the_run(delay_steps):
    """Its trainer dies when nothing else is left to do: the other trainer is still there, and takes it."""
    config = small_config(total_steps=3, delay_steps=delay_steps)

    async def main():
        simulation = Simulation(config, seed=32)
        await simulation.start(peers_per_stage=2, trainers=2)
        index = config.tickets_per_step - 1
        held_ticket = lambda c: kind(m.Train, step=2, stage=0)(c) and c.message.ticket.index == index  # noqa: E731
        with HeldBack(simulation, held_ticket, limit=1) as held:
            call = await held.reached()
            rest = set(range(index))
            await until(
                lambda: all(
                    ledger(simulation.nodes[f"stage{k}.0"], 2) | ledger(simulation.nodes[f"stage{k}.1"], 2) == rest
                    for k in range(3)
                ),
                "every other ticket was accumulated",
            )
            victim = node_at(simulation, call.source)
            other = next(n for n in simulation.nodes.values() if n.name.startswith("trainer") and n is not victim)
            assert not other.running.done(), "the other trainer has gone before the run was finished"
            await simulation.kill(victim.name)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_checked(main())


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_forward_before_and_a_backward_after_a_commit(recomputed):
    """With delay_steps = 1 the ticket's own version is used, whether its graph was kept or is computed again."""
    config = small_config(total_steps=5, delay_steps=1)

    async def main():
        simulation = Simulation(config, seed=33)
        await simulation.add_backbone("backbone0")
        request_bytes = 4 * 6 * 8 + 4 * 8
        for stage in range(3):
            limit = request_bytes + 100 if recomputed else 2**30  # one request fits, and no graph beside it
            await simulation.add_stage_peer(f"stage{stage}.0", stage, memory_limit_bytes=limit)
        await simulation.add_trainer("trainer0", in_flight=1)
        node = simulation.nodes["stage0.0"]
        versions = node.peer.committed.versions
        with HeldBack(simulation, kind(m.Train, stage=1, step=2, source=node), limit=1) as held:
            below = await held.reached()
            ticket = below.message.ticket
            above = next(
                c for c in simulation.open_calls if c.target == node.address and kind(m.Train)(c) and c.message.ticket == ticket
            )
            before = versions.newest.num_commits
            await until(lambda: versions.newest.num_commits > before, "a commit between forward and backward")
            assert versions.newest.version_id != below.message.version_id, "the ticket builds on the newest version still"
        await until(lambda: above.reply is not None or above.error is not None, "the ticket came back")
        assert isinstance(above.reply, m.Trained), above.error or above.reply
        hop = above.reply.hops[0]
        assert hop.accumulated
        assert hop.recomputed == recomputed
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_a_last_stage_whose_claims_are_late_keeps_two_graphs():
    """Otherwise one for each micro-batch on its way, which nobody counts."""

    async def main():
        simulation = Simulation(small_config(total_steps=3, target_batch_size=64), seed=34)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        leader = next(n for n in simulation.nodes.values() if n.name.startswith("stage2") and n.peer.member.leads_stage())
        member = next(n for n in simulation.nodes.values() if n.name.startswith("stage2") and n is not leader)
        compute, graphs, most = member.peer.stage_context.compute, 0, 0
        forward, backward = compute.forward, compute.backward

        def counted_forward(*args, **kwargs):
            nonlocal graphs, most
            graphs += 1
            most = max(most, graphs)
            return forward(*args, **kwargs)

        def counted_backward(*args, **kwargs):
            nonlocal graphs
            graphs -= 1
            return backward(*args, **kwargs)

        compute.forward, compute.backward = counted_forward, counted_backward
        with HeldBack(simulation, kind(m.Claim, source=member)) as held:
            await held.reached()
            await until(lambda: member.peer.micro_batches.in_flight > 2, "more micro-batches wait there")
            await asyncio.sleep(0.5)
        await simulation.finish()
        assert most == 2
        assert graphs == 0
        check(simulation)
        await simulation.close()

    run_checked(main())
