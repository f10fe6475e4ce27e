"""What a stranger sends must not end or stop a run: refused where it arrives, and the run goes on as if it had not come."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.base.ids import Address, Ballot, Ticket
from swarm.peer.link import Refuse
from swarm.peer.trainer.retries import TicketFailed
from swarm.testing.memory_transport import MemoryTransport
from swarm.testing.simulation.phases import committed, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m
from swarm.wire.framing import Frame


def attack(messages_of, *, refused):
    """Run a swarm; after two commits a stranger sends each of `messages_of(simulation)` to a peer of stage 0."""
    config = small_config(total_steps=8)

    async def main():
        simulation = Simulation(config, seed=31)
        await simulation.start(peers_per_stage=2, trainers=1)
        async with asyncio.timeout(60):
            while max(simulation.commits, default=-1) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        unknown_node = MemoryTransport(simulation.network, Address("10.9.9.9", 1))
        target = simulation.nodes["stage0.0"].address
        for message, buffers in messages_of(simulation):
            reply = await unknown_node.call(target, Frame(message, buffers), stall_s=4)
            if refused:
                assert isinstance(reply.message, m.Refusal), f"{message.kind} was answered by {reply.message.kind}"
        await simulation.finish(within_s=120)
        check(simulation)
        await simulation.close()

    run_virtual(main())


def forged_records(simulation):
    record = simulation.commits[max(simulation.commits)]
    following = {"previous_version_id": record.version_id, "step": record.step + 1, "version_id": "ab" * 32}
    for change in (
        {**following, "results": ()},
        following,
        {"era": 10**6, "step": 3, "version_id": "cd" * 32},
        {**following, "step": 10**9},
        {**following, "tokens": 0},
        {"step": -1, "version_id": "ef" * 32},
    ):
        yield m.Commit(record=record.model_copy(update=change)), ()


def test_forged_records_are_refused_and_not_handed_on():
    attack(forged_records, refused=True)


def foreign_tickets(simulation):
    record = simulation.commits[max(simulation.commits)]
    route = tuple(members[:1] for members in record.members)
    tensors = (
        m.TensorSpec(name="x", dtype="float64", shape=(1, 6)),
        m.TensorSpec(name="y", dtype="int64", shape=(1,), role="label"),
    )
    for ticket in (Ticket(record.step + 1, 50), Ticket(record.step + 1, -1), Ticket(2**40, 0), Ticket(record.step + 1, 2**40)):
        yield (
            m.Train(run=record.run, ticket=ticket, version_id=record.version_id, stage=0, route=route, tensors=tensors),
            (bytes(48), bytes(8)),
        )
    large = (tensors[0].model_copy(update={"shape": (1000, 6)}), tensors[1])
    yield (
        m.Train(
            run=record.run, ticket=Ticket(record.step + 1, 0), version_id=record.version_id, stage=0, route=route, tensors=large
        ),
        (bytes(48_000), bytes(8)),
    )


def test_tickets_that_are_none_of_the_run_are_refused():
    attack(foreign_tickets, refused=True)


def huge_ballot(simulation):
    record = simulation.commits[max(simulation.commits)]
    unknown_node = record.members[0][0].model_copy(update={"peer": "f" * 40})
    yield m.Elect(run=record.run, ballot=Ballot(2**63, "f" * 40), coordinator=unknown_node), ()


def test_a_huge_ballot_costs_an_election_and_no_more():
    attack(huge_ballot, refused=False)


def malformed_answers(config, falsify, *, name):
    """Run a swarm in which the peer `name` answers with what `falsify` makes of its frames; a newcomer joins its stage."""

    async def main():
        simulation = Simulation(config, seed=33)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        simulation.falsify[simulation.nodes[name].address] = falsify
        newcomer = await simulation.add_stage_peer("newcomer", 0)
        await until(lambda: newcomer.peer.membership.serving, "the newcomer serves")
        await simulation.finish(within_s=120)
        assert all(node.running.exception() is None for node in simulation.nodes.values() if node.running.done())
        check(simulation)
        await simulation.close()

    run_virtual(main())


def without_tensors(frame):
    if not isinstance(frame.message, m.StateChunk | m.SumCopy):
        return frame
    return Frame(frame.message.model_copy(update={"tensors": ()}))


def with_other_stages(frame):
    if not isinstance(frame.message, m.Trained):
        return frame
    hops = tuple(hop.model_copy(update={"stage": hop.stage + 500}) for hop in frame.message.hops)
    return Frame(frame.message.model_copy(update={"hops": hops}), frame.buffers)


def with_an_impossible_ballot(frame):
    if not isinstance(frame.message, m.StatusReply):
        return frame
    return Frame(frame.message.model_copy(update={"ballot": -7}))


@pytest.mark.parametrize(
    ("falsify", "name"),
    [(without_tensors, "stage0.0"), (with_other_stages, "stage0.0"), (with_an_impossible_ballot, "backbone0")],
)
def test_an_answer_that_does_not_fit_its_question_ends_nobody(falsify, name):
    malformed_answers(small_config(total_steps=12), falsify, name=name)


@pytest.mark.parametrize("code", ["wrong_run", "bad_request"])
def test_a_candidate_that_finds_no_sense_in_requests_is_passed_by(code):
    """As a peer of another run does that took a dead one's port."""

    async def refuse(message, frame, progress):
        raise Refuse(code, "not here")

    async def main():
        simulation = Simulation(small_config(total_steps=6), seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        simulation.nodes["stage1.1"].peer.link._handlers[m.Train] = refuse
        await simulation.finish()
        check(simulation)
        assert max(report.seconds for report in simulation.nodes["trainer0"].reports) < 5.0
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_ticket_that_all_peers_of_a_stage_find_malformed_ends_the_run_with_their_words(stage):
    """No retry can mend it: promise 4."""

    async def refuse(message, frame, progress):
        raise Refuse("bad_request", "x of shape (9,) is larger than a micro-batch of this run")

    async def main():
        simulation = Simulation(small_config(total_steps=6), seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        for number in range(2):
            simulation.nodes[f"stage{stage}.{number}"].peer.link._handlers[m.Train] = refuse
        with pytest.raises(TicketFailed) as failed:
            async with asyncio.timeout(30):
                await simulation.nodes["trainer0"].running
        assert f"fails on every peer of stage {stage}: " in str(failed.value)
        assert "bad_request: x of shape (9,) is larger than a micro-batch of this run" in str(failed.value)
        await simulation.abandon()

    run_virtual(main())


def test_one_that_refuses_while_the_others_may_not_be_tried_ends_nothing():
    """The only other peer of its stage was silent, and is left alone for a while."""

    async def refuse(message, frame, progress):
        raise Refuse("bad_request", "not here")

    async def main():
        simulation = Simulation(small_config(total_steps=6), seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        odd, other = (simulation.nodes[f"stage1.{number}"].peer for number in range(2))
        odd.link._handlers[m.Train] = refuse
        router = simulation.nodes["trainer0"].peer._route_trips.wiring._routers[1]
        for peer in router._peers.values():
            if peer.key == other.stage_context.me.key:
                peer.banned_until = asyncio.get_running_loop().time() + 20.0
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("count", [2000])
def test_a_flood_of_joiners_is_bounded(count):

    config = small_config(total_steps=4)

    async def main():
        simulation = Simulation(config, seed=32)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.began()
        backbone = simulation.nodes["backbone0"]
        unknown_node = MemoryTransport(simulation.network, Address("10.9.9.9", 1))
        run = backbone.peer.context.run
        refused = 0
        for i in range(count):
            member = m.Member(peer=f"{i:040x}", incarnation=f"{i:016x}", host="10.9.9.9", port=2)
            reply = await unknown_node.call(backbone.address, Frame(m.Join(run=run, stage=0, member=member)), stall_s=4)
            refused += isinstance(reply.message, m.Refusal)
        assert refused > 0
        await simulation.abandon()

    run_virtual(main())


def test_one_identity_in_two_processes_keeps_nobody_from_beginning(tmp_path, caplog):
    """Someone copied a state directory: the later one serves, and the other is told."""
    caplog.set_level(logging.INFO)
    config = small_config(total_steps=3)

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.add_backbone("backbone0")
        for stage in range(config.num_stages):
            await simulation.add_stage_peer(f"stage{stage}.0", stage)
        simulation.identities["copy"] = simulation.identities["stage1.0"]
        await simulation.add_stage_peer("copy", 1)
        await simulation.add_trainer("trainer0")
        await simulation.began()
        members = simulation.commits[-1].members[1]
        assert len(members) == 1
        told = "this peer to end: another one with its identity " + members[0].peer[:8]
        async with asyncio.timeout(30.0):
            while told not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        loser = next(name for name in ("stage1.0", "copy") if simulation.nodes[name].address.port != members[0].port)
        await simulation.kill(loser)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())
