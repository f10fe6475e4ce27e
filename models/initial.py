"""Initial values as a function of (seed, parameter name, shape). Owns the draws; must not know any architecture.

A model's own initialisation code decides the distribution (`tensor.normal_(0, std)`, ones, zeros); only its random
draws are replaced. So every peer of a stage, and every cut of a model, starts from the same bits, on any processor:
torch's own generator gives other bits on other instruction sets. A draw into something else than a parameter, from
which one is then computed, goes by the name of the module that is being initialised.
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


def initialize(module: torch.nn.Module, initializer: Callable[[torch.nn.Module], Any], seed: int, *, prefix: str = "") -> None:
    """Apply `initializer` to every submodule, children first, with named draws. Parameters are fp32 on the CPU.

    Args:
        module: gets values, in place.
        initializer: a model's own.
        seed: of the run.
        prefix: of the names of `module`'s parameters in the whole model.

    Raises:
        ConfigError: if a parameter or number was left without a value, or needs a distribution not known here.
    """
    draws = _NamedDraws({p.untyped_storage().data_ptr(): prefix + name for name, p in module.named_parameters()}, seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(_nothing(tensor))
        with draws:
            for name, child in reversed(list(module.named_modules())):  # children first
                draws.module = prefix + name
                initializer(child)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if _is_missing(tensor):
                    owner, _, attribute = name.rpartition(".")
                    draws.module = prefix + owner
                    _own_constant(module.get_submodule(owner), attribute, tensor)
                    if _is_missing(tensor):
                        raise ConfigError(f"{name}: the model's own code gives it no initial value")


def initialize_buffers(module: torch.nn.Module, initializer: Callable[[torch.nn.Module], Any]) -> None:
    """Give the buffers of a module without memory theirs, on the CPU, and their values; parameters stay without.

    Raises:
        ConfigError: if a buffer was left without a value.
    """
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            made = torch.empty_like(buffer, device="cpu")
            child.register_buffer(name, made.fill_(_nothing(made)), name not in child._non_persistent_buffers_set)
    with torch.no_grad():
        for child in reversed(list(module.modules())):  # children first
            initializer(child)
        for name, buffer in module.named_buffers():
            if _is_missing(buffer):
                parent, _, attribute = name.rpartition(".")
                _own_constant(module.get_submodule(parent), attribute, buffer)
                if _is_missing(buffer):
                    raise ConfigError(f"{name}: the model's own code gives it no initial value")


def _nothing(tensor: torch.Tensor) -> float | int | bool:
    """A value that no initialisation gives."""
    if tensor.is_floating_point():
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min + 1


def _is_missing(tensor: torch.Tensor) -> bool:
    """Whether some element has no value yet."""
    if tensor.is_floating_point():
        return not torch.isfinite(tensor).all()
    return tensor.dtype != torch.bool and bool((tensor == _nothing(tensor)).any())


def _own_constant(owner: torch.nn.Module, attribute: str, tensor: torch.Tensor) -> None:
    """Fill `tensor` with what its owner gives it when made: of modules that are made without arguments (activations)."""
    try:
        tensor.copy_(getattr(type(owner)(), attribute))
    except TypeError:  # it needs arguments
        return


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
    """Replaces random in-place operations by named draws."""

    def __init__(self, names: dict[int, str], seed: int) -> None:
        super().__init__()
        self._names = names
        self._seed = seed
        self._draws: dict[str, int] = {}
        #: The module that is being initialised.
        self.module = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.rand_like.default:
            func, args = torch.ops.aten.uniform_.default, (torch.empty_like(args[0]),)
        name = self._names.get(args[0].untyped_storage().data_ptr(), f"{self.module} (computed from)")
        make = {torch.ops.aten.normal_.default: normal, torch.ops.aten.uniform_.default: uniform}.get(func)
        if make is None:
            raise ConfigError(f"{name}: the model's initialisation draws {func}: not supported")
        draw = self._draws[name] = self._draws.get(name, -1) + 1
        first, second = (*args[1:], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)  # mean and std, or low and high
        return args[0].copy_(make(self._seed, name, tuple(args[0].shape), float(first), float(second), draw))
