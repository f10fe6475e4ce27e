"""Initial values as a function of (seed, parameter name, shape). Owns the draws; must not know any architecture.

A model's own initialisation code decides the distribution (`tensor.normal_(0, std)`, ones, zeros); only its random
draws are replaced. So every peer of a stage, and every cut of a model, starts from the same bits, on any processor:
torch's own generator gives other bits on other instruction sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.base.errors import ConfigError

#: Elements drawn at once: bounds the fp64 temporary. The values do not depend on it.
_CHUNK = 2**20


def initialize(module: torch.nn.Module, initializer: Callable[[torch.nn.Module], Any], seed: int) -> None:
    """Apply `initializer` to every submodule, children first, with named draws. Parameters are fp32 on the CPU.

    Raises:
        ConfigError: if a parameter or buffer was left without a value, or needs a distribution not known here.
    """
    names = {p.untyped_storage().data_ptr(): name for name, p in module.named_parameters()}
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        with _NamedDraws(names, seed):
            module.apply(initializer)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.numel() and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ConfigError(f"{name}: the model's own code gives it no initial value")


def generator_of(seed: int, name: str, shape: tuple[int, ...], draw: int) -> np.random.Generator:
    """The stream behind draw number `draw` for one parameter."""
    key = hashlib.sha256(f"swarm initial values 1\0{seed}\0{name}\0{shape}\0{draw}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "big")))


def normal(seed: int, name: str, shape: tuple[int, ...], mean: float, std: float, draw: int) -> torch.Tensor:
    """Normal values in fp32, drawn in fp64 and rounded once."""
    generator = generator_of(seed, name, shape, draw)
    return _fill(shape, lambda n: mean + std * generator.standard_normal(n))


def uniform(seed: int, name: str, shape: tuple[int, ...], low: float, high: float, draw: int) -> torch.Tensor:
    """Uniform values in fp32, drawn in fp64 and rounded once."""
    generator = generator_of(seed, name, shape, draw)
    return _fill(shape, lambda n: low + (high - low) * generator.random(n))


def _fill(shape: tuple[int, ...], draw: Callable[[int], np.ndarray]) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    flat = out.numpy().reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        flat[start : start + _CHUNK] = draw(min(_CHUNK, flat.size - start))
    return out


class _NamedDraws(TorchDispatchMode):
    """Replaces random in-place operations on named parameters by named draws."""

    def __init__(self, names: dict[int, str], seed: int) -> None:
        super().__init__()
        self._names = names
        self._seed = seed
        self._draws: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        name = self._names.get(args[0].untyped_storage().data_ptr()) if isinstance(args[0], torch.Tensor) else None
        make = {torch.ops.aten.normal_.default: normal, torch.ops.aten.uniform_.default: uniform}.get(func)
        if name is None or make is None:
            raise ConfigError(f"the model's initialisation draws {func} for {name or 'no parameter'}: not supported")
        draw = self._draws[name] = self._draws.get(name, -1) + 1
        first, second = (*args[1:], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)  # mean and std, or low and high
        return args[0].copy_(make(self._seed, name, tuple(args[0].shape), float(first), float(second), draw))
