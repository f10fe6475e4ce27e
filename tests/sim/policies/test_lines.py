"""A peer behind a slow line never makes the swarm slower: it gets what its line carries, or nothing, and is told so."""

from __future__ import annotations

import statistics

import pytest

from swarm.policy import occupancy
from swarm.testing.simulation.phases import Log, committed, kind
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

#: 33 kB a ticket in each direction.
ROWS, TICKETS = 688, 32
#: Seconds of a step without the second peer.
STEP_S = 2.0


def swarm_of(num_steps: int, num_tickets: int = TICKETS) -> Simulation:
    config = small_config(num_stages=2, total_steps=num_steps, micro_batch_size=ROWS, target_batch_size=ROWS * num_tickets)
    return Simulation(config, forward_s=0.0201 * TICKETS / num_tickets)


async def start(simulation: Simulation, rate: float | None) -> None:
    """One peer of each stage, the second of which is the pace; another of that behind a line, if there is a rate."""
    await simulation.add_backbone("backbone0")
    (await simulation.add_stage_peer("stage0.0", 0)).slowness = 0.5
    await simulation.add_stage_peer("stage1.0", 1)
    if rate is not None:
        slow = await simulation.add_stage_peer("stage1.1", 1)
        simulation.network.line(slow.address, up=rate, down=rate)
    await committed(simulation, -1)
    await simulation.add_trainer("trainer0")


def seconds(rate: float | None) -> float:
    """A step's time after the first."""
    found: list[float] = []

    async def main() -> None:
        simulation = swarm_of(4)
        await start(simulation, rate)
        await simulation.finish()
        found.extend(report.seconds for report in simulation.nodes["trainer0"].reports if report.record.step > 0)
        if rate is not None:
            slow = simulation.nodes["stage1.1"].stage_peer
            assert slow.meter.report().bandwidth == pytest.approx(rate, rel=0.25), "the coordinator counts the same line"
        await simulation.close()

    run_virtual(main())
    return statistics.fmean(found)


@pytest.mark.parametrize("rate", [None, 200e3, 100e3])
def test_a_second_peer_behind_a_slow_line_makes_no_step_longer(rate: float | None) -> None:
    """By queue and compute alone the steps took 2.0, 3.7 and 6.6 s."""
    limit_s = STEP_S * 1.01 if rate is None else STEP_S / 0.98
    assert seconds(rate) < limit_s


def test_a_peer_that_fits_in_no_step_gets_nothing_and_is_told_why_and_is_used_when_its_line_is_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(occupancy, "PROBE_PART", 0.4)

    async def main() -> None:
        simulation = swarm_of(17, 12)
        await start(simulation, 20e3)
        trained = Log(simulation, kind(m.Train, stage=1))
        slow = simulation.nodes["stage1.1"]
        await committed(simulation, 7)
        served = {call.message.ticket for call in trained.calls if call.target == slow.address}
        assert len(served) <= 4, f"its first one, and what it is asked now and then: {served}"
        told = slow.stage_peer.meter.told()
        assert "a ticket takes" in str(told["left_out"])
        assert "the rest of the step" in str(told["left_out"])
        assert "of stage 1: a ticket takes" in str(simulation.nodes["trainer0"].peer._status().detail["left_out"])
        simulation.network.line(slow.address, up=1e8, down=1e8)
        await simulation.finish()
        last = [call for call in trained.calls if call.message.ticket.step >= 15]
        assert sum(call.target == slow.address for call in last) > 0.3 * len(last), "half of the tickets are its share now"
        assert slow.stage_peer.meter.told()["left_out"] == ""
        await simulation.close()

    run_virtual(main())
