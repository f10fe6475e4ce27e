"""The learning rate as a pure function of the step, or in a local run with `inner_steps` of the inner step."""

from __future__ import annotations

import math

from swarm.base.config import RunConfig


def learning_rate(config: RunConfig, step: int, inner_step: int = 0) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then constant, linear or cosine decay.

    Where an outer step counts for several updates, warm-up and decay go by these, and it is that of number `inner_step`.
    """
    peak, end = config.learning_rate, config.total_steps * config.updates_per_step
    step = step * config.updates_per_step + inner_step
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    span = max(1, end - config.warmup_steps)
    part = min(1.0, (step - config.warmup_steps) / span)
    falling = 1.0 - part if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * falling)
