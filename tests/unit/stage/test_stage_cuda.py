"""A CUDA device computes later than it is asked: the ledger is right all the same, and bits are those of a CPU."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from swarm.base.config import RunConfig
from swarm.lifecycle.step import LedgerEntry
from swarm.stage.accumulator import Accumulator
from swarm.stage.device import Added, Device, DeviceTime
from swarm.stage.devices import compute_thread, device_of, on_device, on_host
from swarm.stage.digest import checksum_of
from swarm.stage.executor import Priority
from swarm.stage.gpu.kernels import Summand, add_together, survey
from swarm.stage.layout import Layout
from swarm.stage.moments import Moments, OptimizerState
from swarm.stage.norms import norm_of
from swarm.stage.optimizers.adamw import AdamW
from swarm.stage.optimizers.choice import optimizer_of
from swarm.wire.compression import CODECS, decode_tensor
from swarm.wire.framing import Frame
from swarm.wire.messages import Attempt, Train

torch.set_num_threads(1)

LAYOUT = Layout.of(torch.nn.Linear(3, 2))
VALID = torch.ones(1, dtype=torch.int32)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
DEVICES = ["cpu", pytest.param("cuda:0", marks=NEEDS_CUDA)]


class Later:
    """Numbers that nobody knows before they were waited for."""

    def __init__(self, entry: LedgerEntry, is_finite: bool) -> None:
        self.entry, self.is_finite, self.waited = entry, is_finite, False

    def is_known(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True


def added_unseen(accumulator: Accumulator, index: int, value: float, device: str) -> bool:
    accumulator.ledger.grant(index, accumulator.ledger.attempt)
    gradients = [torch.full(shape, value, dtype=torch.bfloat16, device=device) for shape in LAYOUT.shapes]
    valid = survey(gradients, 2.0**60, device).is_valid
    numbers = Later(LedgerEntry(index, 0.5), bool(valid))
    return accumulator.add_unseen(index, numbers, valid, gradients, loss_scale=2.0)


@pytest.mark.parametrize("device", DEVICES)
def test_exactly_once_a_ticket_is_held_before_its_numbers_are_known(device: str) -> None:
    accumulator = Accumulator(0, LAYOUT, dtype=torch.float32, device=device)
    assert added_unseen(accumulator, 3, 1.0, device)
    assert 3 in accumulator.ledger
    assert not added_unseen(accumulator, 3, 1.0, device), "a second time it is denied"
    accumulator.freeze(Attempt(n=1))
    assert accumulator.ledger.entries == {3: LedgerEntry(3, 0.5)}
    contribution = accumulator.contribution()
    assert contribution is not None
    assert contribution.tolist() == [0.5] * 8, "the loss scale is divided out"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_that_shows_late_is_ledgered_and_not_added(device: str, bad: float) -> None:
    accumulator = Accumulator(0, LAYOUT, dtype=torch.float32, device=device)
    for index, value in enumerate((1.0, bad, 4.0)):
        assert added_unseen(accumulator, index, value, device)
    accumulator.freeze(Attempt(n=1))
    assert accumulator.ledger.overflow == {1}
    assert set(accumulator.ledger.entries) == {0, 2}
    contribution = accumulator.contribution()
    assert contribution is not None
    assert contribution.tolist() == [2.5] * 8


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_whose_memory_is_only_borrowed_are_added_at_once(device: str) -> None:
    accumulator = Accumulator(0, LAYOUT, dtype=torch.float32, device=device)
    place = [torch.empty(shape, device=device) for shape in LAYOUT.shapes]
    for index in range(3):
        accumulator.ledger.grant(index, accumulator.ledger.attempt)
        torch._foreach_zero_(place)
        torch._foreach_add_(place, 2.0**index)
        valid = survey(place, 2.0**60, device).is_valid
        assert accumulator.add_unseen(index, Later(LedgerEntry(index, 0.5), True), valid, place, borrowed=True)
    torch._foreach_zero_(place)
    accumulator.freeze(Attempt(n=1))
    contribution = accumulator.contribution()
    assert contribution is not None
    assert contribution.tolist() == [7.0] * 8


def test_a_job_that_fails_halfway_forgets_what_was_unknown() -> None:
    accumulator = Accumulator(0, LAYOUT, dtype=torch.float32, device="cpu")
    added_unseen(accumulator, 0, 1.0, "cpu")
    accumulator.ledger.grant(1, accumulator.ledger.attempt)
    accumulator.add_unseen(1, Later(LedgerEntry(1, 0.0), True), VALID, [torch.ones(2, 3), torch.ones(7)])
    with pytest.raises(ValueError, match="shape"):
        accumulator.complete_sum()
    accumulator.freeze(Attempt(n=1))
    assert not accumulator.ledger.entries
    assert accumulator.contribution() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_sums_have_the_bits_of_one_addition_after_the_other(device: str, dtype: torch.dtype, num: int) -> None:
    def drawn() -> list[torch.Tensor | None]:
        return [torch.randn(1237, 5, device=device).to(dtype), None, torch.randn(3, device=device).to(dtype)]

    totals = [torch.randn(shape, device=device) for shape in ((1237, 5), (2,), (3,))]
    expected = [total.clone() for total in totals]
    summands = []
    for position in range(num):
        gradients, is_good = drawn(), position != 1
        if is_good:
            for total, gradient in zip(expected, gradients, strict=True):
                if gradient is not None:
                    total += gradient.float() * 0.25
        else:
            gradients[2][1] = float("nan")  # type: ignore[index]
        valid = survey(gradients, 2.0**60, device).is_valid
        assert bool(valid) == is_good
        summands.append(Summand(gradients, valid, 0.25))
    add_together(totals, summands)
    for total, one in zip(totals, expected, strict=True):
        assert torch.equal(total, one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**61])
def test_one_bad_element_anywhere_is_seen(device: str, bad: float) -> None:
    for where in (0, 4095, 4096, 9999):
        gradient = torch.zeros(10_000, device=device)
        assert bool(survey([gradient, None], 2.0**60, device).is_valid)
        gradient[where] = bad
        assert not bool(survey([gradient, None], 2.0**60, device).is_valid)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", [[(16, 1024), (4096,), (32, 3)], [(1237, 5), (3,), (1,)]], ids=["aligned", "odd"])
def test_a_survey_tells_the_norm_of_all_gradients(device: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    gradients = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    gradients[0] = gradients[0].t().contiguous().t()  # not contiguous
    expected = float(torch.cat([gradient.double().flatten() for gradient in gradients]).norm())
    seen = survey([*gradients, None, torch.empty(0, device=device)], 2.0**60, device)
    norm = seen.norm()
    assert bool(seen.is_valid)
    assert norm is not None
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    assert survey([None], 2.0**60, device).norm() is None


def layout_of(*sizes: int) -> Layout:
    return Layout.of(torch.nn.ParameterList([torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]))


@NEEDS_CUDA
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [(torch.float32, "adamw"), (torch.float64, "adamw"), (torch.float32, "adamw8bit"), (torch.float32, "lamb")],
)
def test_replicas_identical_a_gpu_ends_on_the_bits_of_a_cpu(dtype: torch.dtype, optimizer: str, offload: bool) -> None:
    config = RunConfig.model_validate({"weight_decay": 0.1, "optimizer": optimizer})
    layout = layout_of(70_000, 30_003, 5)
    start = torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(3), dtype=dtype)
    ends = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(4)
        updates = optimizer_of(config, layout, dtype=dtype, device=device, offload=offload)
        masters, state = start.to(device), updates.moments.zero()
        for step in range(20):
            gradient = torch.randn(start.shape, generator=generator, dtype=dtype) * 10.0 ** (step % 7 - 5)
            masters, state = updates.update(
                masters, gradient.to(device), state, step=step, learning_rate=1e-3 * (1 + step % 3), factor=0.37
            )
        assert all(tensor.device.type == ("cpu" if offload else device) for tensor in state.tensors.values())
        ends.append([masters.cpu(), *(tensor.cpu() for tensor in state.tensors.values())])
    for here, there in zip(*ends, strict=True):
        assert torch.equal(here, there)


@NEEDS_CUDA
def test_a_checksum_is_the_same_on_every_device() -> None:
    tensor = torch.randn(100_001)
    assert checksum_of([tensor, tensor[:7]]) == checksum_of([tensor.cuda(), tensor[:7].cuda()])


# ---------------------------------------------------------------------------------------------------- transfers


def with_device(name: str, main: Callable[[Device], Awaitable[None]]) -> None:
    async def bounded() -> None:
        device = device_of(name)
        try:
            async with asyncio.timeout(60):
                await main(device)
        finally:
            device.close()

    asyncio.run(bounded())


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("codec", ["raw", "scaled8", "bf16", "fp16"])
def test_what_is_sent_is_received(name: str, codec: str) -> None:
    async def main(device: Device) -> None:
        sent = torch.randn(64, 1000, device=name)
        out = device.send({"x": sent, "mask": sent > 0}, codec, "input")  # type: ignore[arg-type]
        await device.complete(out)
        buffers = []
        for _, buffer in out.payload:
            own = (device.allocate or bytearray)(memoryview(buffer).nbytes)
            own[:] = bytes(buffer)
            buffers.append(own)
        train = Train.model_construct(tensors=tuple(spec for spec, _ in out.payload))
        got = device.receive(Frame(train, tuple(buffers)), "input")
        assert torch.equal(got["mask"], sent > 0)
        assert float((got["x"] - sent).norm() / sent.norm()) < {"raw": 1e-9, "fp16": 1e-3}.get(codec, 0.02)

    with_device(name, main)


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_not_finite_travels_raw(name: str) -> None:
    async def main(device: Device) -> None:
        sent = torch.randn(5000, device=name)
        sent[17] = float("nan")
        out = device.send({"x": sent}, "scaled8", "input")
        await device.complete(out)
        spec, buffer = out.payload[0]
        assert spec.codec == "raw"
        assert torch.isnan(decode_tensor(spec, buffer)[17])

    with_device(name, main)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("option", "value"), [("fp16", 7e4), ("8bit", 2e38)])
def test_a_value_too_large_for_the_codec_arrives_as_none(
    name: str, option: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(device: Device) -> None:
        sent = torch.ones(9, device=name)
        sent[3] = value
        out = device.send({"x": sent}, CODECS[option], "grad")
        await device.complete(out)
        assert decode_tensor(*out.payload[0]).isnan().all()
        expected = f"x has values up to {value:.3g}, which the wire (--compression {option}) does not carry"
        assert expected in caplog.text

    with_device(name, main)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_the_last_stage_tells_tokens_and_loss_with_its_verdict(name: str, value: float) -> None:
    async def main(device: Device) -> None:
        accumulator = Accumulator(0, LAYOUT, dtype=torch.float32, device=name)
        accumulator.ledger.grant(0, accumulator.ledger.attempt)
        executor = compute_thread(name)

        def job() -> Added:
            gradients = [torch.full(shape, value, device=name) for shape in LAYOUT.shapes]
            outputs = {"tokens": torch.tensor(12, device=name), "loss_sum": torch.tensor(value, device=name)}
            return device.add(accumulator, 0, gradients, loss_scale=1.0, entry=outputs, with_norm=True)

        added = (await executor.run(job, Priority.BACKWARD)).value
        await device.complete(added)
        executor.close()
        expected = LedgerEntry(12, 1.0) if value == 1.0 else LedgerEntry(12, 0.0)
        assert (added.verdict, added.entry) == ("accumulated" if value == 1.0 else "overflow", expected)
        assert added.norm is not None
        assert float(added.norm) == pytest.approx(sum(math.prod(shape) for shape in LAYOUT.shapes) ** 0.5 * value, nan_ok=True)

    with_device(name, main)


@pytest.mark.parametrize("name", DEVICES)
def test_the_time_of_the_device_is_that_of_its_jobs(name: str) -> None:
    async def main(device: Device) -> None:
        executor = compute_thread(name)
        factor = torch.ones(*(2 * [64 if name == "cpu" else 1024]), device=name)

        def job() -> DeviceTime:
            device.begin()
            for _ in range(50):
                factor @ factor
            return device.end()

        began = time.perf_counter()
        jobs = [executor.run(job, priority) for _ in range(6) for priority in (Priority.FORWARD, Priority.BACKWARD)]
        worked = [outcome.value for outcome in await asyncio.gather(*jobs)]
        await device.complete(*worked)
        passed = time.perf_counter() - began
        executor.close()
        if name == "cpu":
            assert all(one.seconds is None for one in worked), "there its thread's time is the device's"
        else:
            assert 0.0 < sum(one.seconds for one in worked if one.seconds is not None) <= passed

    with_device(name, main)


@NEEDS_CUDA
@pytest.mark.parametrize("num_elements", [0, 5, 2**24, 3 * 2**24 + 17])
def test_large_copies_in_pieces_lose_nothing(num_elements: int) -> None:
    tensor = torch.randn(num_elements)
    there = on_device(tensor, "cuda:0")
    assert there.is_cuda
    assert torch.equal(there.cpu(), tensor)
    assert torch.equal(on_host(there), tensor)


def test_a_root_is_correctly_rounded() -> None:
    """Otherwise peers with unlike processors end on unlike bits."""
    for dtype in (torch.float32, torch.float64):
        squares = torch.arange(1, 50_000, dtype=dtype) / 7
        state = OptimizerState({"first": torch.zeros_like(squares), "second": squares}, 0)
        moments = Moments(layout_of(len(squares)), dtype=dtype, device="cpu")
        config = RunConfig(beta1=0.5, beta2=0.75, weight_decay=0.0, epsilon=1.0)
        gradient = torch.ones_like(squares)
        masters, after = AdamW(config, moments).update(torch.zeros_like(squares), gradient, state, step=0, learning_rate=1.0)
        first, second = (after.tensors[name].numpy() for name in ("first", "second"))
        expected = -(first * 2.0) / (np.sqrt(second) * 2.0 + 1.0)
        assert np.array_equal(masters.numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_norm_is_that_of_all_tensors_as_one_vector(device: str, dtype: torch.dtype) -> None:
    """Also where a GPU sums in fp32."""
    tensors = [torch.randn(1 << 20, device=device).to(dtype) * scale for scale in (1e-3, 1.0, 0.01)]
    expected = float(torch.cat(tensors).double().norm())
    found = norm_of([*tensors, None, torch.ones(7, dtype=torch.int64, device=device)])
    assert found is not None
    assert found.dtype == torch.float64
    assert found.device.type == torch.device(device).type
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert norm_of([None]) is None
