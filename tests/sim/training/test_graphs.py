"""The promises under random faults where stages compute by CUDA graphs: who may use a captured call, and until when."""

from __future__ import annotations

from swarm.testing.simulation.schedules import Schedule, run_schedule
from tests.unit.stage.recorded_calls import RecordedCall, install

NUM_SCHEDULES = 3


def test_promises_hold_where_stages_compute_by_graphs(monkeypatch):
    before = RecordedCall.num_backwards
    for seed in range(8000, 8000 + NUM_SCHEDULES):
        with monkeypatch.context() as patch:
            install(patch)
            run_schedule(Schedule.draw(seed))
    assert RecordedCall.num_backwards - before > 100 * NUM_SCHEDULES, "nearly every micro-batch"
