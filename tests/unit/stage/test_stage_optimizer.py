"""AdamW on flat tensors equals torch's own, out of place."""

from __future__ import annotations

import pytest
import torch

from swarm.base.config import RunConfig
from swarm.stage.optimizer import OptimizerState, adamw

torch.set_num_threads(1)

CONFIG = RunConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
NUM_STEPS = 20


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(257, generator=generator, dtype=torch.float64) for _ in range(NUM_STEPS)]
    return [(g * 10.0 ** (step % 5 - 3)).to(dtype) for step, g in enumerate(drawn)]


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
    masters, state = start(dtype), OptimizerState.zero(start(dtype))
    for step, gradient in enumerate(gradients(dtype)):
        learning_rate = 0.01 * (1 + step % 3)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        masters, state = adamw(config, masters, gradient.clone(), state, learning_rate=learning_rate)
        assert masters.dtype == dtype
        difference = float((masters - parameter.detach()).norm() / parameter.detach().norm())
        assert difference < tolerance, f"step {step}"
    assert state.num_updates == NUM_STEPS
    theirs = optimizer.state[parameter]
    torch.testing.assert_close(state.first, theirs["exp_avg"], rtol=tolerance * 10, atol=tolerance)
    torch.testing.assert_close(state.second, theirs["exp_avg_sq"], rtol=tolerance * 10, atol=tolerance)


def test_what_an_older_version_holds_is_not_modified() -> None:
    masters, state = start(torch.float32), OptimizerState.zero(start(torch.float32))
    masters, state = adamw(CONFIG, masters, gradients(torch.float32)[0], state, learning_rate=0.1)
    before = [t.clone() for t in (masters, state.first, state.second)]
    new, new_state = adamw(CONFIG, masters, gradients(torch.float32)[1], state, learning_rate=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, (masters, state.first, state.second), strict=True))
    assert state.num_updates == 1
    storages = {t.untyped_storage().data_ptr() for t in (masters, state.first, state.second)}
    assert not storages & {t.untyped_storage().data_ptr() for t in (new, new_state.first, new_state.second)}


def test_replicas_identical_the_same_bits_from_the_same_bits() -> None:
    def run(offset: int) -> torch.Tensor:
        """`offset` shifts the tensors in memory: vectorised code must not round by alignment."""
        masters = torch.empty(257 + offset)[offset:].copy_(start(torch.float32))
        state = OptimizerState.zero(masters)
        for gradient in gradients(torch.float32):
            shifted = torch.empty(257 + offset)[offset:].copy_(gradient)
            masters, state = adamw(CONFIG, masters, shifted, state, learning_rate=0.01)
        return masters

    assert torch.equal(run(0), run(1))
    assert torch.equal(run(0), run(3))


def test_a_zero_gradient_only_decays() -> None:
    masters = start(torch.float64)
    new, _ = adamw(CONFIG, masters, torch.zeros_like(masters), OptimizerState.zero(masters), learning_rate=0.5)
    torch.testing.assert_close(new, masters * (1 - 0.5 * 0.1), rtol=1e-15, atol=0.0)
