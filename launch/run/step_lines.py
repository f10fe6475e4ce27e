"""A run's data, and a committed step, as a line for people; `launch_trainer` and `launch_local` print the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.base.config import RunConfig
    from swarm.feed.datasets import DataFacts


def facts_text(facts: DataFacts, config: RunConfig) -> str:
    """What the data of a run are, and how often its steps pass over them."""
    parts = []
    if facts.rows:
        parts.append(f"{sum(facts.rows.values()):,} rows, {facts.rows_left_out:,} left out")
    parts.append(f"{facts.samples:,} windows to train on, {facts.eval_samples:,} held out")
    if facts.tokens is not None:
        parts.append(f"{facts.tokens:,} tokens, {facts.trained_tokens:,} trained")
    if facts.rows:
        parts.append(f"{facts.examples_cut:,} examples cut, {facts.examples_left_out:,} left out")
    epochs = config.total_steps * config.target_batch_size / facts.samples
    return f"data: {'; '.join(parts)}; {config.total_steps:,} steps make {epochs:.3g} epochs"


def step_text(line: Mapping[str, Any], total_steps: int) -> str:
    """`line` is `StepReport.json_line()`: `step` counts committed steps, `peers` those of each stage."""
    text = (
        f"step {line['step']}/{total_steps} loss {loss_text(line)} tokens/s {line['tokens_per_s']:.0f} "
        f"seconds {line['seconds']:.2f} grad_norm {line['grad_norm']:.3f} lr {line['lr']:.2e} "
        f"peers {'+'.join(map(str, line['peers']))} retries {line['retries']}"
    )
    return text + " skipped" if line["skipped"] else text


def goes_on_text(line: Mapping[str, Any], total_steps: int) -> str:
    """Where a run goes on that had committed steps before: what was seen of them is its loss alone."""
    return f"goes on after step {line['step']}/{total_steps}, loss {loss_text(line)}"


def loss_text(line: Mapping[str, Any]) -> str:
    """The loss with four digits; a step that was skipped has none."""
    return "none" if line["loss"] is None else f"{line['loss']:.4f}"
