"""An optimizer or compressor of the run's owner, by its dotted path: used where its import was agreed to, and only there."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from models.registry import factory_of
from swarm.averaging.compressors.choice import compressor_of
from swarm.averaging.compressors.plain import Plain
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.layout import Layout
from swarm.stage.memory_plan import moments_bytes
from swarm.stage.moments import FIRST, OptimizerState
from swarm.stage.optimizers.choice import optimizer_of
from swarm.stage.optimizers.interface import Optimizer

LAYOUT = Layout.of(torch.nn.Linear(3, 2))
CONFIG = RunConfig(optimizer="own_code:Sign", average_compression="own_code:whole")


class Sign(Optimizer):
    """signSGD with momentum."""

    kept = (FIRST,)

    def update(self, masters, total, state, *, step, learning_rate, factor=1.0):  # type: ignore[no-untyped-def]
        first = self.config.beta1 * state.tensors[FIRST] + total * factor
        return masters - learning_rate * first.sign(), OptimizerState({FIRST: first}, state.num_updates + 1)


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("own_code")
    module.Sign = Sign  # type: ignore[attr-defined]
    module.whole = lambda config, layout: Plain(layout.num_elements)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_code", module)
    return module


def test_what_was_imported_is_used(own_code: types.ModuleType) -> None:
    optimizer = optimizer_of(CONFIG, LAYOUT, dtype=torch.float32, device="cpu")
    state = optimizer.moments.zero()
    assert list(state.tensors) == [FIRST], "what it keeps is what is shared and saved"
    masters, state = optimizer.update(torch.zeros(8), torch.ones(8), state, step=0, learning_rate=0.5)
    assert masters.tolist() == [-0.5] * 8
    assert moments_bytes(100, CONFIG) == 400
    assert isinstance(compressor_of(CONFIG, LAYOUT), Plain)


def test_nothing_is_imported_where_it_is_used() -> None:
    with pytest.raises(ConfigError, match="optimizer own_code:Sign: this process has not imported own_code"):
        optimizer_of(CONFIG, LAYOUT, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="average_compression own_code:whole: this process has not imported own_code"):
        compressor_of(CONFIG, LAYOUT)


def test_a_peer_that_did_not_agree_refuses_the_run() -> None:
    with pytest.raises(ConfigError, match="optimizer own_code:Sign: this peer may not import it; --allow-import"):
        factory_of(CONFIG, may_import=False)
    assert CONFIG.imports == {"optimizer": "own_code:Sign", "average_compression": "own_code:whole"}


def test_what_is_no_optimizer_is_refused(own_code: types.ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"must be a class derived from swarm.stage.optimizers.interface.Optimizer"):
        optimizer_of(RunConfig(optimizer="own_code:whole"), LAYOUT, dtype=torch.float32, device="cpu")
