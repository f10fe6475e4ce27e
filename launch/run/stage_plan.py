"""How a run's model would be cut for peers of a given memory: `--stages auto`, and the plan that `plan_run` prints.

Owns the question and the answer's form; what layers cost is the model's (`models/cost.py`), where to cut is
`swarm/policy/spans.py`. Imports torch only when asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.run.run_files import RunFile, build_config
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.policy.spans import fewest_stages

AUTO = "auto"


@dataclass(frozen=True)
class StageRow:
    """One stage of a plan."""

    stage: int
    layers: range
    num_trained: int
    num_frozen: int
    #: Forward and backward of one token, and the part of the whole model's.
    flops_per_token: float
    part: float
    #: Of parameters, optimizer and averages at the worst moment.
    state_bytes: int
    #: That one micro-batch keeps for its backward.
    kept_bytes: int
    #: Of the hidden states of one micro-batch that leave the stage, uncompressed.
    sent_bytes: int

    @property
    def num_bytes(self) -> int:
        """What a peer must have to serve the stage."""
        from swarm.stage.memory_plan import LEAST_IN_FLIGHT_BYTES

        return self.state_bytes + self.kept_bytes + LEAST_IN_FLIGHT_BYTES


def with_stages(run_file: RunFile | None, overrides: Mapping[str, Any], peer_memory: int | None) -> tuple[dict[str, Any], str]:
    """`overrides` with a number in the place of `num_stages = "auto"`, and the reason for it ("" if it was a number).

    Raises:
        ConfigError: no memory was given, or no number of stages fits it.
    """
    stated = overrides.get("num_stages", None if run_file is None else run_file.fields.get("num_stages"))
    if stated != AUTO:
        return dict(overrides), ""
    if peer_memory is None:
        raise ConfigError("--stages auto: --peer-memory SIZE must say what one stage peer may take")
    config = build_config(run_file, {**overrides, "num_stages": 1})
    from swarm.stage.memory_plan import LEAST_IN_FLIGHT_BYTES

    number, reason = fewest_stages(_factory_of(config).cost.loads(config), peer_memory - LEAST_IN_FLIGHT_BYTES)
    if number is None:
        raise ConfigError(
            f"--peer-memory {peer_memory}: {reason}, and micro-batches under way {LEAST_IN_FLIGHT_BYTES}; the model cannot be "
            "served by such peers"
        )
    return {**overrides, "num_stages": number}, reason


def plan_of(config: RunConfig) -> list[StageRow]:
    """What each stage of the run costs.

    Raises:
        ConfigError: the model is unusable, or of a kind whose costs are not known.
    """
    factory = _factory_of(config)
    from models.cost import kept_of, state_of
    from swarm.stage.compute import PRECISION_DTYPES

    cost = factory.cost
    sent = config.micro_batch_size * config.sequence_length * int(factory.config.hidden_size)
    sent *= PRECISION_DTYPES[config.precision].itemsize
    total = sum(cost.of(span).flops for span in factory.spans)
    rows = []
    for stage, span in enumerate(factory.spans):
        part = cost.of(span)
        rows.append(
            StageRow(
                stage,
                span,
                part.num_trained,
                part.num_frozen,
                3 * part.flops,
                part.flops / total,
                state_of(part, config),
                kept_of(part, config),
                sent if stage < config.num_stages - 1 else 0,
            )
        )
    return rows


def _factory_of(config: RunConfig) -> Any:
    from models.registry import factory_of

    factory = factory_of(config)
    if not hasattr(factory, "cost"):
        raise ConfigError(f"model {config.model}: only the costs of Hugging Face models are known")
    return factory
