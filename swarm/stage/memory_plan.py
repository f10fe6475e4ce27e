"""What a stage takes of its device's memory, told before any of it is allocated. Owns the arithmetic; allocates nothing.

The parts are those of `versions`, `optimizer`, `accumulator` and `checkpoint`: tensors of the size of all trained
parameters, in the masters' dtype, and the copies that compute. What in-flight micro-batches hold comes on top of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.base.choices import compressor_facts
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.compute import MASTER_DTYPES, PRECISION_DTYPES
from swarm.stage.optimizers.choice import gradient_optimizer, shared_optimizer

#: Averages of committed steps that a member keeps: a newcomer that downloads may be a step behind.
KEPT_SUMS = 2
#: A joiner whose snapshot is older by more commits asks for a newer one.
MAX_QUEUED_SUMS = 64
#: Less is of no use for in-flight micro-batches.
LEAST_IN_FLIGHT_BYTES = 2**24


@dataclass(frozen=True)
class StageMemory:
    """Bytes by what they are for, most telling first."""

    num_trained: int
    num_frozen: int
    parts: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{what} {_text(size)}" for what, size in self.parts if size)
        counted = f"{self.num_trained:,} trained" + (f" and {self.num_frozen:,} frozen" if self.num_frozen else "")
        return f"{_text(self.num_bytes)} for {counted} parameters ({parts})"


def memory_of(
    module: torch.nn.Module, config: RunConfig, *, writes_checkpoints: bool, on_cpu: bool, offload: bool = False
) -> StageMemory:
    """Count what training `module` takes; it may be without memory itself.

    Args:
        module: of one stage; what it does not train needs no gradient.
        writes_checkpoints: the peer has a state directory.
        on_cpu: a GPU's checkpoints pass through main memory, which is not counted then.
        offload: nor are moments, which are there; see `moments_bytes`.
    """
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    untrained = [p for p in module.parameters() if not p.requires_grad]
    compute = PRECISION_DTYPES[config.precision]
    frozen_bytes = sum(p.numel() * (compute if p.is_floating_point() else p.dtype).itemsize for p in untrained)
    return memory_for(
        trained,
        sum(p.numel() for p in untrained),
        config,
        frozen_bytes=frozen_bytes,
        writes_checkpoints=writes_checkpoints,
        on_cpu=on_cpu,
        offload=offload,
    )


def memory_for(
    trained: int,
    frozen: int,
    config: RunConfig,
    *,
    frozen_bytes: int,
    writes_checkpoints: bool,
    on_cpu: bool,
    offload: bool = False,
) -> StageMemory:
    """Count what training so many parameters takes; see `memory_of`."""
    master, compute = MASTER_DTYPES[config.precision], PRECISION_DTYPES[config.precision]
    size, versions = trained * master.itemsize, 1 + config.delay_steps
    copies = 0 if master == compute else (versions + 1) * trained * compute.itemsize
    moments = moments_bytes(trained, config)
    here = 0 if offload else moments
    return StageMemory(
        trained,
        frozen,
        (
            ("parameters", versions * size),
            ("optimizer's moments", here),
            ("both once more while a step is applied", size + here),
            ("gradient sums and averages", (versions + KEPT_SUMS) * size),
            (f"{config.precision} copies", copies),
            *_kept_back(trained, size, trained * compute.itemsize if copies else 0, config, offload=offload),
            ("frozen parameters", frozen_bytes),
            ("writing a checkpoint", max(size, moments) if writes_checkpoints and on_cpu else 0),
        ),
    )


def _kept_back(trained: int, size: int, copy: int, config: RunConfig, *, offload: bool) -> list[tuple[str, int]]:
    """What belongs to one peer alone: its own copy in a local run, and what its compressor has not sent."""
    parts = []
    if config.mode == "local":
        inner = 0 if offload else _own_moments_bytes(trained, config)
        parts.append(("own copy and its moments", 2 * (size + inner + copy) + size))
    if compressor_facts(config.average_compression).keeps_back or config.fragments > 1:
        parts.append(("what is not sent yet", 3 * size))
    return parts


def queued_sums(trained: int, config: RunConfig, room_bytes: int) -> int:
    """Tell how many averages of committed steps a joiner may hold until its snapshot is there, at most `MAX_QUEUED_SUMS`.

    It has no sums yet, nor any micro-batch: their memory is free for averages until then.

    Args:
        room_bytes: for in-flight micro-batches, see `room_in_flight`.
    """
    size = trained * MASTER_DTYPES[config.precision].itemsize
    return min(MAX_QUEUED_SUMS, 1 + config.delay_steps + KEPT_SUMS + room_bytes // max(1, size))


def moments_bytes(trained: int, config: RunConfig) -> int:
    """Bytes of the optimizer's state that the peers of a stage share, for so many parameters."""
    return shared_optimizer(config).kept_bytes(trained, MASTER_DTYPES[config.precision].itemsize)


def _own_moments_bytes(trained: int, config: RunConfig) -> int:
    """Bytes of the state of a peer's own optimizer in a local run."""
    if config.mode != "local":
        return 0
    return gradient_optimizer(config).kept_bytes(trained, MASTER_DTYPES[config.precision].itemsize)


def room_in_flight(needed: StageMemory, limit_bytes: int, *, stage: int, config: RunConfig, limit: str) -> int:
    """Return the bytes that are left for in-flight micro-batches.

    Args:
        limit: what sets the limit, for the error.

    Raises:
        ConfigError: the stage does not fit; with the numbers, and what to do.
    """
    room = limit_bytes - needed.num_bytes
    if room < LEAST_IN_FLIGHT_BYTES:
        raise ConfigError(
            f"stage {stage} of {config.num_stages} needs {needed} and {_text(LEAST_IN_FLIGHT_BYTES)} for micro-batches, and this "
            f"peer has {_text(limit_bytes)} ({limit}); cut the model into more stages (--stages), or train less of it (--lora, "
            "--frozen)"
        )
    return room


def require_main_memory(module: torch.nn.Module, config: RunConfig, free_bytes: int) -> None:
    """Check that main memory has room for offloaded moments: those of a step's end beside those of its start.

    Raises:
        ConfigError: there is not; with the numbers.
    """
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    needed = 2 * (moments_bytes(trained, config) + _own_moments_bytes(trained, config))
    if needed > free_bytes:
        raise ConfigError(
            f"--offload-optimizer: the optimizer's moments, twice while a step is applied, need {_text(needed)} of main memory, "
            f"and {_text(free_bytes)} are free; use --optimizer adamw8bit, or more stages (--stages)"
        )


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
