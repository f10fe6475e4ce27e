"""Every wait has a deadline, and every buffer a bound, also where others do not do their part."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from swarm.base.errors import RemoteError
from swarm.peer.link import Refuse
from swarm.peer.stage.sum_copies import CHUNK_ELEMENTS, part_of
from swarm.peer.trainer.evaluation import MAX_ATTEMPTS, Evaluator
from swarm.stage.executor import Priority
from swarm.stage.memory_plan import KEPT_SUMS
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.simulation.phases import HeldBack, committed, coordinator_of, kind, node_of
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m


def test_a_claim_does_not_wait_for_a_collection_that_was_given_up():
    """The coordinator that began it is gone, or the leader gave up: the leader's own claims would wait for ever."""

    async def main():
        simulation = Simulation(small_config(total_steps=8), seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 2)
        await simulation.kill("trainer0")
        await asyncio.sleep(1.0)
        step = max(simulation.commits) + 1
        leader = node_of(simulation, simulation.commits[step - 1].members[1][0]).peer
        book = leader.leader._book(step)
        book.is_collected = False
        claims = leader.micro_batches._claims
        reason = await asyncio.wait_for(claims.request(step, 0), 2 * simulation.config.timing.request_s)
        assert "are being collected" in reason
        book.is_collected = True
        assert await asyncio.wait_for(claims.request(step, 0), 1.0) == "", "and it claims again"
        await simulation.add_trainer("trainer1")
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_member_whose_jobs_take_longer_than_a_short_request_is_not_excluded(caplog):
    """Its ledger is collected by its compute thread, after the job that it has."""
    caplog.set_level("INFO")

    async def main():
        simulation = Simulation(small_config(total_steps=3, delay_steps=1), seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.began()
        for name in ("stage1.0", "stage1.1"):
            simulation.nodes[name].slowness = 300.0  # a backward takes 5 to 7 s
        assert simulation.config.timing.request_s < 5.0
        assert simulation.config.timing.stall_s > 7.2
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())
    assert not [record.getMessage() for record in caplog.records if "excluded" in record.getMessage()]


def test_averages_that_wait_for_a_snapshot_take_no_more_than_the_joiners_free_memory():
    async def main():
        simulation = Simulation(small_config(total_steps=30), seed=3)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 2)
        with HeldBack(simulation, kind(m.StateRange)):
            size = 8 * simulation.stage_peers(1)[0].stage_context.compute.layout.num_elements
            joiner = (await simulation.add_stage_peer("stage1.9", 1, memory_limit_bytes=5 * size)).peer
            most = 0
            for step in range(4, 20):
                await committed(simulation, step)
                most = max(most, len(joiner.committed._queued or ()))
            assert most == 1 + KEPT_SUMS + 5
        await simulation.finish()
        assert joiner.committed.up_to_date
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_part_of_an_average_on_its_way_does_not_hold_all_of_it():
    flat = torch.arange(3 * CHUNK_ELEMENTS, dtype=torch.float32)
    part = part_of(flat, 5, 2**62)
    assert torch.equal(part, flat[5 : 5 + CHUNK_ELEMENTS])
    assert part.untyped_storage().nbytes() == part.nbytes


def test_a_failure_of_a_peers_own_request_is_told_as_to_anybody_else():
    async def main():
        simulation = Simulation(small_config(total_steps=2), seed=3)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.began()
        link = coordinator_of(simulation).peer.link

        async def fails(message: m.Message, frame: object, progress: object) -> m.Ack:
            raise RuntimeError("out of memory")

        link.register(m.Status, fails)
        with pytest.raises(RemoteError, match="RuntimeError: out of memory"):
            await link.ask(link.context.member(), m.Status(), m.StatusReply)
        await simulation.abandon()

    run_virtual(main())


def test_a_disk_that_is_slower_than_steps_writes_some_checkpoints_and_the_last(tmp_path, caplog):
    config = small_config(total_steps=24, checkpoint_every=1, checkpoint_copies=2, checkpoint_keep=3)

    async def main():
        simulation = Simulation(config, seed=5, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        slow = simulation.nodes["stage1.0"].peer
        slow._threads.storage._duration = lambda priority: 3.0 if priority == Priority.EVALUATION else 0.0005
        most = 0

        def look(record: m.CommitRecord) -> None:
            nonlocal most
            most = max(most, len(slow._threads.storage._heap) + len(slow._checkpoints._waiting))

        slow.committed.on_commit.append(look)
        await simulation.finish()
        assert most <= 2, "one is under way, another waits"
        await slow._checkpoints.written()
        assert find_complete([tmp_path])[0].record.step + 1 == 24
        await simulation.close()

    run_virtual(main())
    assert "is not written: the disk is too slow" in caplog.text


def test_an_evaluation_that_fails_leaves_nobody_at_work():
    record = SimpleNamespace(step=3, version_id="h", members=())
    batches = [SimpleNamespace(inputs={}, labels={})] * 5
    asked: list[int] = []

    async def evaluate(ticket: object, version_id: str, tensors: object, buffers: object) -> None:
        asked.append(ticket.index)  # type: ignore[attr-defined]
        if ticket.index == 0:  # type: ignore[attr-defined]
            raise Refuse("no_candidate", "nobody")
        await asyncio.sleep(3600.0)

    async def main():
        link = SimpleNamespace(context=SimpleNamespace(config=SimpleNamespace(num_stages=3)))
        evaluator = Evaluator(link, SimpleNamespace(evaluate=evaluate), SimpleNamespace(eval_batches=lambda: batches))
        assert await evaluator.evaluate(record) is None
        assert asked.count(0) == MAX_ATTEMPTS
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
