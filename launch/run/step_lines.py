"""A committed step as a line for people; `launch_trainer` and `launch_local` print the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
