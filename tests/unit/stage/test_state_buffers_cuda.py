"""A ticket's buffers reach the sum on every device and in every precision: those of a ResNet's last stage."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.stage.accumulator import Accumulator
from swarm.stage.compute import StageCompute
from swarm.stage.device import Added
from swarm.stage.devices import compute_thread, device_of
from swarm.stage.executor import Priority
from swarm.stage.versions import make_version
from swarm.wire.messages import Attempt, CommitRecord
from tests.unit.models.resnet import factory

torch.set_num_threads(1)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
RECORD = CommitRecord(run="1" * 64, step=-1, version_id="2" * 64, ballot=ZERO_BALLOT, members=((),) * 3, loss_scale=8.0)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda:0", marks=NEEDS_CUDA)])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-4), ("bf16", 0.2)])
def test_the_sum_holds_how_far_a_ticket_moved_each_buffer(name: str, precision: str, tolerance: float) -> None:
    made = factory(RunConfig(num_stages=3, precision=precision))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, 4, 4, dtype=torch.float64, generator=generator) + 1.0
    labels = {"class": torch.tensor([0, 1, -100, 2])}
    plain = made.build(2).double()
    before = {n: b.clone() for n, b in plain.named_buffers()}
    plain({"x": x}, labels)
    compute = StageCompute(made, 2, precision=precision, seed=0, device=name)
    version = make_version(RECORD, compute.layout, compute.initial_masters(), compute.dtype)
    accumulator = Accumulator(0, compute.layout, dtype=compute.master_dtype, device=name)
    accumulator.ledger.grant(0, accumulator.ledger.attempt)

    async def main() -> None:
        device, executor = device_of(name), compute_thread(name)

        def job() -> Added:
            inputs = {"x": x.to(name, compute.dtype)}
            activation = compute.forward(
                version, Ticket(0, 0), inputs, {n: t.to(name) for n, t in labels.items()}, keep_graph=True
            )
            outputs = activation.outputs or {}
            result = compute.backward(activation, None)
            return device.add(accumulator, 0, result.parameters, loss_scale=8.0, entry=outputs, with_norm=False)

        added = (await executor.run(job, Priority.BACKWARD)).value
        await device.complete(added)
        assert added.verdict == "accumulated"
        await executor.run(lambda: accumulator.freeze(Attempt(n=1)), Priority.CONTROL)
        executor.close()
        device.close()

    asyncio.run(main())
    contribution = accumulator.contribution()
    assert contribution is not None
    for buffer, part in compute.layout.named(contribution.cpu()).items():
        if buffer in compute.layout.buffers:
            expected = 3 * (before[buffer].double() - plain.get_buffer(buffer).double())
            assert float((part.double() - expected).norm()) <= tolerance * float(expected.norm()), buffer
