"""Numbers that are not finite: what is skipped has no loss, and a run that skips step after step ends with a reason."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarm.base.ids import Ticket
from swarm.lifecycle.commit_record import MAX_FAULTY_STEPS
from swarm.peer.trainer.reports import StepsFailed
from swarm.testing.simulation.phases import until
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import SmallFeed, one_process, small_config
from swarm.testing.virtual_time import run_virtual


class Overflowing(SmallFeed):
    """Every sample of the steps from `first` on has `value` in it."""

    first, value = 1, math.inf

    def batch(self, ticket: Ticket):
        batch = super().batch(ticket)
        if ticket.step >= self.first:
            batch.inputs["x"][0] = self.value
        return batch


def stopped(config, feed, alter=lambda simulation: None):
    """What the trainers of a run say as they end, its steps' records, and the lines of its metrics."""

    async def main():
        simulation = Simulation(config, seed=5, feed=feed)
        await simulation.start(peers_per_stage=2, trainers=2)
        alter(simulation)
        trainers = [node for name, node in simulation.nodes.items() if name.startswith("trainer")]
        said = []
        for trainer in trainers:
            with pytest.raises(StepsFailed) as raised:
                async with asyncio.timeout(120):
                    await trainer.running
            said.append(str(raised.value))
        records = dict(simulation.commits)
        lines = [report.json_line() for report in trainers[0].reports]
        await simulation.abandon()
        return said, records, lines

    return run_virtual(main())


def test_a_run_whose_steps_are_all_skipped_stops_after_a_few_with_one_line():
    config = small_config(total_steps=50)
    said, records, lines = stopped(config, Overflowing(config))
    last = 1 + MAX_FAULTY_STEPS
    assert max(records) + 1 == last
    for text in said:
        assert text.startswith(f"steps 2 to {last} were skipped one after the other")
        assert "\n" not in text
    assert [(line["step"], line["loss"] is None, line["skipped"]) for line in lines] == [
        (1, False, False),
        *((step, True, True) for step in range(2, last + 1)),
    ]


def test_a_run_that_ends_with_steps_that_were_all_skipped_is_not_done():
    config = small_config(total_steps=1 + MAX_FAULTY_STEPS)
    stopped(config, Overflowing(config))


def test_fewer_skipped_steps_stop_nobody():
    config = small_config(total_steps=2 + MAX_FAULTY_STEPS)

    class Few(Overflowing):
        def batch(self, ticket):
            return SmallFeed.batch(self, ticket) if ticket.step == MAX_FAULTY_STEPS else super().batch(ticket)

    async def main():
        simulation = Simulation(config, seed=5, feed=Few(config))
        await simulation.start(peers_per_stage=2, trainers=1)
        trainer = simulation.nodes["trainer0"]
        await until(lambda: trainer.peer.finished, "the run is over")
        assert [simulation.commits[step].skipped for step in range(5)] == [False, True, True, False, True]
        await simulation.close()

    run_virtual(main())


# ------------------------------------------------------------------------------------------------ the wire

WIRE = {"precision": "fp32", "compression": "fp16"}


def enlarge(simulation, is_large):
    """What the peers of stage 1 hand on of such tickets is finite, but not in fp16."""
    for peer in simulation.stage_peers(1):
        compute = peer.stage_context.compute

        def forward(version, ticket, *args, original=compute.forward, **options):
            activation = original(version, ticket, *args, **options)
            if is_large(ticket) and activation.outputs is not None:
                activation.outputs = {name: tensor + 70000.0 for name, tensor in activation.outputs.items()}
            return activation

        compute.forward = forward


def test_a_ticket_whose_numbers_no_peer_can_send_is_ledgered_as_an_overflow_and_its_step_skipped(caplog):
    """Every peer says so, and the run goes on."""
    config = small_config(total_steps=4, **WIRE)
    bad = Ticket(1, 3)

    async def main():
        simulation = Simulation(config, seed=5)
        await simulation.start(peers_per_stage=2, trainers=1)
        enlarge(simulation, lambda ticket: ticket == bad)
        await simulation.finish()
        assert [simulation.commits[step].skipped for step in range(4)] == [False, True, False, False]
        results = simulation.commits[1].results
        assert all(result.num_tickets == config.tickets_per_step for result in results), "each ticket counts once"
        assert max(result.num_overflow for result in results) == 1
        losses = [simulation.commits[step].loss for step in (0, 2, 3)]
        expected = one_process(config, skip={1}).losses
        assert losses == pytest.approx([expected[step] for step in (0, 2, 3)], rel=1e-2)
        await simulation.close()

    run_virtual(main())
    assert "which the wire (--compression fp16) does not carry" in caplog.text


def test_a_model_whose_numbers_do_not_fit_the_wire_stops_with_a_line_that_names_the_wire():
    config = small_config(total_steps=50, **WIRE)
    said, _, _ = stopped(config, SmallFeed(config), lambda simulation: enlarge(simulation, lambda ticket: True))
    assert all("fp16 carries nothing above 65504, as bf16 and 8bit do" in text for text in said)


# ------------------------------------------------------------------------------------------------ evaluation


def test_an_evaluation_whose_loss_is_not_finite_is_told_and_holds_nobody_up(caplog):
    config = small_config(total_steps=4, eval_samples=8, eval_every=2)

    class BadEvaluation(SmallFeed):
        def eval_batches(self):
            batches = super().eval_batches()
            batches[-1].inputs["x"][0] = math.nan
            return batches

    async def main():
        simulation = Simulation(config, seed=5, feed=BadEvaluation(config))
        await simulation.start(peers_per_stage=2, trainers=1)
        began = asyncio.get_running_loop().time()
        await simulation.finish()
        assert asyncio.get_running_loop().time() - began < 10.0
        assert simulation.nodes["trainer0"].evaluations == []
        await simulation.close()

    run_virtual(main())
    assert "no evaluation after step 2: " in caplog.text
    assert "the loss is not finite" in caplog.text
