"""What a stage takes is told before it is allocated, in numbers that an operator can check; what does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.memory_plan import LEAST_IN_FLIGHT_BYTES, memory_of, queued_sums, require_main_memory, room_in_flight


def module(trained: int, frozen: int = 0) -> torch.nn.Module:
    with torch.device("meta"):
        layers = [torch.nn.Linear(trained, 1, bias=False), torch.nn.Linear(max(1, frozen), 1, bias=False).requires_grad_(False)]
        return torch.nn.Sequential(*layers[: 2 if frozen else 1])


@pytest.mark.parametrize(
    ("precision", "delay_steps", "per_parameter"),
    # parameters, moments, both once more, sums and averages, copies that compute
    [("fp32", 0, 4 * (1 + 2 + 3 + 3)), ("fp64", 0, 8 * 9), ("bf16", 0, 4 * 9 + 2 * 2), ("fp32", 1, 4 * (2 + 2 + 3 + 4))],
)
def test_bytes_for_each_trained_parameter(precision: str, delay_steps: int, per_parameter: int) -> None:
    config = RunConfig(precision=precision, delay_steps=delay_steps)
    needed = memory_of(module(10**6), config, writes_checkpoints=False, on_cpu=True)
    assert needed.num_bytes == per_parameter * 10**6
    written = memory_of(module(10**6), config, writes_checkpoints=True, on_cpu=True)
    assert written.num_bytes == (per_parameter + (16 if precision == "fp64" else 8)) * 10**6


@pytest.mark.parametrize(("offload", "moments"), [(False, 2), (True, 0)])
def test_moments_in_8_bits_take_a_quarter_and_offloaded_ones_nothing(offload: bool, moments: int) -> None:
    config = RunConfig(optimizer="adamw8bit")
    needed = memory_of(module(256 * 4000), config, writes_checkpoints=True, on_cpu=not offload, offload=offload)
    sizes = dict(needed.parts)
    assert sizes["optimizer's moments"] == moments * (256 + 4) * 4000
    assert sizes["both once more while a step is applied"] == (4 * 256 + moments * (256 + 4)) * 4000
    assert sizes["writing a checkpoint"] == (0 if offload else 4 * 256 * 4000)


def test_offloaded_moments_that_main_memory_does_not_hold_are_refused_with_the_numbers() -> None:
    require_main_memory(module(10**6), RunConfig(), 16 * 10**6)
    with pytest.raises(ConfigError) as caught:
        require_main_memory(module(10**6, 10**9), RunConfig(), 15 * 10**6)
    assert str(caught.value) == (
        "--offload-optimizer: the optimizer's moments, twice while a step is applied, need 16.0 MB of main memory, and "
        "15.0 MB are free; use --optimizer adamw8bit, or more stages (--stages)"
    )


def test_frozen_parameters_take_the_computing_copy_alone() -> None:
    needed = memory_of(module(10, 10**9), RunConfig(precision="bf16"), writes_checkpoints=True, on_cpu=True)
    assert 2e9 < needed.num_bytes < 2e9 + 1000


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    config = RunConfig(num_stages=4)
    needed = memory_of(module(50_000_000, 7_000_000), config, writes_checkpoints=False, on_cpu=True)
    with pytest.raises(ConfigError) as caught:
        room_in_flight(needed, 10**9, stage=2, config=config, limit="--memory-limit")
    assert str(caught.value) == (
        "stage 2 of 4 needs 1.83 GB for 50,000,000 trained and 7,000,000 frozen parameters (parameters 200.0 MB, optimizer's "
        "moments 400.0 MB, both once more while a step is applied 600.0 MB, gradient sums and averages 600.0 MB, frozen "
        "parameters 28.0 MB) and 16.8 MB for micro-batches, and this peer has 1.00 GB (--memory-limit); cut the model into more "
        "stages (--stages), or train less of it (--lora, --frozen)"
    )
    assert room_in_flight(needed, 2 * 10**9, stage=2, config=config, limit="x") == 2 * 10**9 - needed.num_bytes
    with pytest.raises(ConfigError):
        room_in_flight(needed, needed.num_bytes + LEAST_IN_FLIGHT_BYTES - 1, stage=2, config=config, limit="x")


@pytest.mark.parametrize(("delay_steps", "room", "expected"), [(0, 0, 3), (1, 4 * 999, 4), (0, 4 * 2000, 5), (0, 2**40, 64)])
def test_a_joiner_holds_as_many_averages_as_its_sums_and_its_room_take(delay_steps: int, room: int, expected: int) -> None:
    config = RunConfig(precision="bf16", delay_steps=delay_steps)
    assert queued_sums(1000, config, room) == expected
    assert queued_sums(0, config, 0) >= 3, "where nothing is trained averages are empty"
