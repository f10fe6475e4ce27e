"""Numbers that are not finite: what is skipped has no loss, and a run that skips step after step ends with a reason."""

from __future__ import annotations

import asyncio
import math

import pytest
from phases import until
from simulation import Simulation
from small_model import SmallFeed, small_config

from swarm.base.ids import Ticket
from swarm.base.virtual_time import run_virtual
from swarm.lifecycle.record import MAX_FAULTY_STEPS
from swarm.peer.trainer import StepsFailed


class Overflowing(SmallFeed):
    """Every sample of the steps from `first` on has `value` in it."""

    first, value = 1, math.inf

    def batch(self, ticket: Ticket):
        batch = super().batch(ticket)
        if ticket.step >= self.first:
            batch.inputs["x"][0] = self.value
        return batch


def stopped(config, feed, **peers):
    """What the trainers of a run say as they end, its steps' records, and the lines of its metrics."""

    async def main():
        simulation = Simulation(config, seed=5, feed=feed)
        await simulation.start(**{"peers_per_stage": 2, "trainers": 2, **peers})
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
        (1, False, False), *((step, True, True) for step in range(2, last + 1))
    ]  # fmt: skip


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
