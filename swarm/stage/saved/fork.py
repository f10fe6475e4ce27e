"""A new run from a checkpoint of another: other stages, another batch, another learning rate, the same parameters.

Position counts samples, so the new run goes on with the sample that the old one would have taken next. Owns what is
carried over (parameters and moments, by name) and the first record of the new run; must not know where files are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarm.base.config import RunConfig, run_id_of
from swarm.base.errors import ConfigError
from swarm.base.ids import ZERO_BALLOT
from swarm.lifecycle.commit_record import version_id_of
from swarm.stage.compute import MASTER_DTYPES, PRECISION_DTYPES
from swarm.stage.digest import digest_of
from swarm.stage.frozen import stage_module
from swarm.stage.layout import Layout
from swarm.stage.module import StageFactory
from swarm.stage.moments import Moments, OptimizerState, numbers_of
from swarm.stage.optimizers.choice import optimizer_of
from swarm.stage.saved.checkpoint import StageCheckpoint, write_checkpoint
from swarm.stage.state_buffers import stage_layout
from swarm.stage.versions import StageState, make_version
from swarm.wire.messages import Attempt, CommitRecord, StageResult


def step_after(old: RunConfig, new: RunConfig, num_commits: int) -> tuple[int, int]:
    """Steps that the new run has behind it after so many of the old one, and samples that it sees again.

    Raises:
        ConfigError: it would have no step behind it, or none before it.
    """
    samples = num_commits * old.target_batch_size
    steps = samples // new.target_batch_size
    if steps == 0:
        raise ConfigError(f"the checkpoint is at sample {samples}, before the end of the first batch of {new.target_batch_size}")
    if steps >= new.total_steps:
        raise ConfigError(f"the new run is at step {steps} of {new.total_steps} already: give it more with --steps")
    return steps, samples - steps * new.target_batch_size


def fork(found: Sequence[StageCheckpoint], old: RunConfig, new: RunConfig, factory: StageFactory, out: Path) -> CommitRecord:
    """Write one checkpoint for each stage of `new`, as the state directory of a local run has them.

    Args:
        found: one checkpoint for each stage of the old run, all of one version.
        old, new: the runs' configurations.
        factory: of the new run.
        out: gets `stage-<k>-0/checkpoints/...`.

    Returns:
        The record that the new run goes on from.

    Raises:
        ConfigError: the parameters do not fit the new cut; names the first that is missing or has another shape.
        StorageError: a file is damaged, or the disk refuses.
    """
    step, _ = step_after(old, new, found[0].record.step + 1)
    parameters = {name: value for checkpoint in found for name, value in checkpoint.parameters().items()}
    moments = {name: value for checkpoint in found for name, value in checkpoint.moments().items()}
    dtype = MASTER_DTYPES[new.precision]
    layouts, flats, states = [], [], []
    for stage in range(new.num_stages):
        module = stage_module(factory, stage, new.frozen)
        layout = stage_layout(factory, module)
        for name in layout.buffers:  # a checkpoint from before buffers were part of the state has none
            parameters.setdefault(name, module.get_buffer(name))
        layouts.append(layout)
        flats.append(_flat(layout, parameters, "", dtype, stage))
        kept = optimizer_of(new, layout, dtype=dtype, device="cpu").moments
        states.append((kept, _state_of(kept, moments, stage, found[0].num_updates)))
    digests = [digest_of([flat, *state.tensors.values()]) for flat, (_, state) in zip(flats, states, strict=True)]
    record = _first_record(found[0].record, new, digests, step)
    for stage, (layout, masters, (kept, optimizer)) in enumerate(zip(layouts, flats, states, strict=True)):
        version = make_version(record, layout, masters, PRECISION_DTYPES[new.precision])
        previous = None
        if new.delay_steps:  # the next step's tickets use the version before: here the same parameters under its name
            before = record.model_copy(
                update={"step": record.step - 1, "version_id": record.previous_version_id, "previous_version_id": ""}
            )
            previous = make_version(before, layout, masters, PRECISION_DTYPES[new.precision])
        state = StageState(version, optimizer, previous)
        write_checkpoint(out / f"stage-{stage}-0", stage, state, kept, new, config_bytes=new.to_bytes())
    return record


def _state_of(kept: Moments, moments: dict[str, torch.Tensor], stage: int, num_updates: int) -> OptimizerState:
    """The part of `stage`, carried over to the bit if both runs keep moments alike, else as numbers."""
    if {key.partition("/")[0] for key in moments} == kept.entries.keys():
        return OptimizerState(
            {name: _flat(layout, moments, f"{name}/", dtype, stage) for name, (dtype, layout) in kept.entries.items()},
            num_updates,
        )
    numbers = numbers_of(moments)
    return kept.of_numbers(
        {name: _flat(kept.layout.trained, numbers, f"{name}/", kept.dtype, stage) for name in kept.kept}, num_updates
    )


def _flat(layout: Layout, tensors: dict[str, torch.Tensor], prefix: str, dtype: torch.dtype, stage: int) -> torch.Tensor:
    try:
        return layout.flatten((tensors[prefix + name] for name in layout.names), dtype=dtype, device="cpu")
    except KeyError as error:
        raise ConfigError(f"stage {stage} of the new run needs {error.args[0]}, which the checkpoint lacks") from None
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(f"stage {stage} of the new run does not fit the checkpoint: {error}") from None


def _first_record(parent: CommitRecord, new: RunConfig, digests: list[str], step: int) -> CommitRecord:
    """A record as if the new run had committed the parent's step: its name is bound to the parent's and to the tensors."""
    results = tuple(
        StageResult(attempt=Attempt(), sum_digest=digest, sum_squares=0.0, num_tickets=new.tickets_per_step, tokens=parent.tokens)
        for digest in digests
    )
    return CommitRecord(
        run=run_id_of(new.to_bytes()),
        step=step - 1,
        version_id=version_id_of(parent.version_id, step - 1, digests, 1.0, parent.skipped),
        previous_version_id=parent.version_id,
        ballot=ZERO_BALLOT,
        members=tuple(() for _ in digests),
        results=results,
        tokens=parent.tokens,
        loss_sum=parent.loss_sum,
        grad_norm=parent.grad_norm,
        learning_rate=parent.learning_rate,
        skipped=parent.skipped,
        loss_scale=parent.loss_scale,
        scale_age=parent.scale_age,
    )
