"""The promises under random faults where stages compute by CUDA graphs: who may use a captured call, and until when."""

from __future__ import annotations

import torch
from schedules import Schedule, run_schedule
from small_model import WIDTH

from swarm.stage.compute import StageCompute
from tests.unit.stage.recorded_calls import RecordedCall, install

NUM_SCHEDULES = 8


def test_promises_hold_where_stages_compute_by_graphs(monkeypatch):
    before = RecordedCall.num_backwards
    for seed in range(8000, 8000 + NUM_SCHEDULES):
        schedule = Schedule.draw(seed)
        size = schedule.config().micro_batch_size

        def example(compute: StageCompute, size: int = size):
            inputs = {"x": torch.zeros(size, WIDTH, dtype=compute.dtype)}
            return inputs, {"y": torch.zeros(size, dtype=torch.int64)} if compute.last else None

        with monkeypatch.context() as patch:
            install(patch, example)
            run_schedule(schedule)
    assert RecordedCall.num_backwards - before > 100 * NUM_SCHEDULES, "nearly every micro-batch"
