"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from swarm.base.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then constant, linear or cosine decay."""
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    span = max(1, config.total_steps - config.warmup_steps)
    part = min(1.0, (step - config.warmup_steps) / span)
    falling = 1.0 - part if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * falling)
