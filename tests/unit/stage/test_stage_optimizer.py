"""AdamW on flat tensors equals torch's own, out of place."""

from __future__ import annotations

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.stage.layout import Layout
from swarm.stage.moments import Moments
from swarm.stage.optimizers.adamw import AdamW
from swarm.stage.optimizers.choice import optimizer_of

torch.set_num_threads(1)

CONFIG = RunConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
NUM_STEPS = 20


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(257, generator=generator, dtype=torch.float64) for _ in range(NUM_STEPS)]
    return [(g * 10.0 ** (step % 5 - 3)).to(dtype) for step, g in enumerate(drawn)]


def layout_of(*sizes: int) -> Layout:
    return Layout.of(torch.nn.ParameterList([torch.nn.Parameter(torch.empty(size)) for size in sizes]))


def plain(dtype: torch.dtype) -> Moments:
    return Moments(layout_of(257), dtype=dtype, device="cpu")


def start(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(257, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_adamw(dtype: torch.dtype, tolerance: float, weight_decay: float) -> None:
    config = CONFIG.model_copy(update={"weight_decay": weight_decay})
    parameter = torch.nn.Parameter(start(dtype))
    optimizer = torch.optim.AdamW(
        [parameter], betas=(config.beta1, config.beta2), eps=config.epsilon, weight_decay=weight_decay, foreach=False
    )
    moments, masters = plain(dtype), start(dtype)
    state = moments.zero()
    for step, gradient in enumerate(gradients(dtype)):
        learning_rate = 0.01 * (1 + step % 3)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        masters, state = AdamW(config, moments).update(masters, gradient.clone(), state, step=0, learning_rate=learning_rate)
        assert masters.dtype == dtype
        difference = float((masters - parameter.detach()).norm() / parameter.detach().norm())
        assert difference < tolerance, f"step {step}"
    assert state.num_updates == NUM_STEPS
    theirs = optimizer.state[parameter]
    torch.testing.assert_close(state.tensors["first"], theirs["exp_avg"], rtol=tolerance * 10, atol=tolerance)
    torch.testing.assert_close(state.tensors["second"], theirs["exp_avg_sq"], rtol=tolerance * 10, atol=tolerance)


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_what_an_older_version_holds_is_not_modified(in_8_bits: bool) -> None:
    moments = Moments(layout_of(257), dtype=torch.float32, device="cpu", in_8_bits=in_8_bits)
    optimizer, (gradient, other, *_) = AdamW(CONFIG, moments), gradients(torch.float32)
    masters, state = optimizer.update(start(torch.float32), gradient, moments.zero(), step=0, learning_rate=0.1)
    held = [masters, *state.tensors.values()]
    before = [t.clone() for t in held]
    new, new_state = optimizer.update(masters, other, state, step=1, learning_rate=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
    assert state.num_updates == 1
    storages = {t.untyped_storage().data_ptr() for t in held}
    assert not storages & {t.untyped_storage().data_ptr() for t in (new, *new_state.tensors.values())}


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_replicas_identical_the_same_bits_from_the_same_bits(in_8_bits: bool) -> None:
    moments = Moments(layout_of(257), dtype=torch.float32, device="cpu", in_8_bits=in_8_bits)

    def run(offset: int) -> torch.Tensor:
        """`offset` shifts the tensors in memory: vectorised code must not round by alignment."""
        masters = torch.empty(257 + offset)[offset:].copy_(start(torch.float32))
        state = moments.zero()
        for gradient in gradients(torch.float32):
            shifted = torch.empty(257 + offset)[offset:].copy_(gradient)
            masters, state = AdamW(CONFIG, moments).update(masters, shifted, state, step=0, learning_rate=0.01)
        return masters

    assert torch.equal(run(0), run(1))
    assert torch.equal(run(0), run(3))


def test_a_zero_gradient_only_decays() -> None:
    masters = start(torch.float64)
    moments = plain(torch.float64)
    new, _ = AdamW(CONFIG, moments).update(masters, torch.zeros_like(masters), moments.zero(), step=0, learning_rate=0.5)
    torch.testing.assert_close(new, masters * (1 - 0.5 * 0.1), rtol=1e-15, atol=0.0)


# ---------------------------------------------------------------------------------------------------- 8 bits


IN_8_BITS = RunConfig(optimizer="adamw8bit", weight_decay=0.1)


def trained(
    config: RunConfig, layout: Layout, num_steps: int = 100, *, decades: float = 1.0, part: slice = slice(None)
) -> tuple[torch.Tensor, ...]:
    """Masters and the optimizer's tensors after steps on noisy gradients of unequal sizes, those of `part` of 3,000."""
    generator = torch.Generator().manual_seed(5)
    sizes = 10.0 ** torch.linspace(-decades, 0, 3000)[torch.randperm(3000, generator=generator)]
    means = torch.randn(3000, generator=generator)
    moments = optimizer_of(config, layout, dtype=torch.float32, device="cpu").moments
    masters, state = torch.ones(layout.num_elements), moments.zero()
    for _ in range(num_steps):
        gradient = (sizes * (means + torch.randn(3000, generator=generator)))[part]
        masters, state = AdamW(config, moments).update(masters, gradient, state, step=0, learning_rate=0.01)
    return masters, *state.tensors.values()


@pytest.mark.parametrize(("decades", "distance"), [(1.0, 0.03), (4.0, 0.15)])
def test_in_8_bits_it_walks_nearly_to_the_same_place(decades: float, distance: float) -> None:
    """Over four decades in a block bitsandbytes' way, which codes the second moment itself, is off by 11 times the walk."""
    layout = layout_of(2000, 1000)
    exact, *_ = trained(CONFIG, layout, decades=decades)
    coded, *_ = trained(IN_8_BITS, layout, decades=decades)
    walked = exact - 1.0
    assert float(walked.norm()) > 10, "the comparison says nothing about a walk of no length"
    assert 0 < float((coded - exact).norm() / walked.norm()) < distance


def test_in_8_bits_the_state_takes_a_quarter() -> None:
    layout = layout_of(256 * 1000)
    exact, coded = (
        optimizer_of(config, layout, dtype=torch.float32, device="cpu").moments.zero() for config in (CONFIG, IN_8_BITS)
    )
    assert coded.num_bytes / exact.num_bytes == pytest.approx(0.25, rel=0.02)


def test_blocks_begin_at_parameters_so_another_cut_has_the_same_bits() -> None:
    together = trained(IN_8_BITS, layout_of(700, 2300), 5)
    apart = [trained(IN_8_BITS, layout_of(n), 5, part=part) for n, part in ((700, slice(700)), (2300, slice(700, None)))]
    for whole, *parts in zip(together, *apart, strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_a_gradient_that_is_seen_once_moves_no_parameter_far() -> None:
    """Rare tokens: were the second moment lost in the code before the first, the next update would divide by nothing."""
    layout = layout_of(256)
    moments = optimizer_of(IN_8_BITS, layout, dtype=torch.float32, device="cpu").moments
    gradient = 10.0 ** torch.linspace(-9, 0, 256)
    masters, state = AdamW(IN_8_BITS, moments).update(torch.zeros(256), gradient, moments.zero(), step=0, learning_rate=1.0)
    for _ in range(5):
        before = masters
        masters, state = AdamW(IN_8_BITS, moments).update(masters, torch.zeros(256), state, step=0, learning_rate=1.0)
        assert float((masters - before).abs().max()) < 1.5, "a step of AdamW is about the learning rate"
