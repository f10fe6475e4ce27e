"""What the creator of a run left open: values that follow the weights that it begins with, and its data.

Owns these values. They are for a new run that begins with weights and has data of its own; what begins from random values
has those of `RunConfig`. A run that has begun keeps what its configuration says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.presets import PRETRAINED
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.errors import ConfigError
from swarm.feed.sources import BUILTIN

if TYPE_CHECKING:
    from launch.run.run_files import DataPaths, RunFile

_log = logging.getLogger(__name__)

#: What a command line may leave out, because it follows from the model and the data.
FOLLOWING = ("total_steps", "sequence_length", "warmup_steps", "learning_rate")
#: What `create_run` finds out: it says nothing of whether a run is the same.
_FOUND = {"dataset", "data_digest", "tokenizer_digest", "template_date", "packing", "weights", "weights_source"}
_EPOCHS = 1.0
_SEQUENCE_LENGTH = 1024
_WARMUP_PART = 0.03
_LEARNING_RATE, _LORA_LEARNING_RATE = 2e-5, 2e-4
#: A learning rate so many times as high is likely to be a mistake.
_SUSPICIOUS = 10
#: The rates above are AdamW's: LAMB's steps, and those of an optimizer of one's own, are of another size.
_ADAMW = ("adamw", "adamw8bit")
#: What families of models call the most tokens that they take.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")


@dataclass(frozen=True, kw_only=True)
class LeftOpen:
    """Fields of a new run that nobody gave, and its epochs, where somebody gave those."""

    fields: tuple[str, ...] = ()
    epochs: float | None = None
    #: Of AdamW, for what the run trains; None where nothing is known of it.
    usual_learning_rate: float | None = None

    def settled(self, config: RunConfig, num_samples: int) -> dict[str, int]:
        """Fields that follow from the number of training samples; warns of a learning rate that is far off."""
        usual = self.usual_learning_rate
        if usual is not None and config.learning_rate > _SUSPICIOUS * usual:
            _log.warning(
                "learning_rate %g is %.0f times what such a model is usually trained with, %g",
                config.learning_rate,
                config.learning_rate / usual,
                usual,
            )
        found: dict[str, int] = {}
        epochs = _EPOCHS if self.epochs is None and "total_steps" in self.fields else self.epochs
        if epochs is not None:
            found["total_steps"] = max(1, math.ceil(epochs * num_samples / config.target_batch_size))
        if "warmup_steps" in self.fields:
            num_updates = found.get("total_steps", config.total_steps) * config.updates_per_step
            found["warmup_steps"] = math.ceil(_WARMUP_PART * num_updates)
        return found

    def told(self, config: RunConfig) -> str:
        """What was taken, as a line; "" if nothing was left open. `config` is that of the run as it was created."""
        taken = [f"{name} {getattr(config, name):g}" for name in FOLLOWING if name in self.fields]
        if "total_steps" in self.fields:
            taken[0] = f"{_EPOCHS:g} epoch ({taken[0]})"
        return f"not said, and so taken: {', '.join(taken)}" if taken else ""


def epochs_of(run_file: RunFile | None, overrides: Mapping[str, Any], epochs: float | None) -> float | None:
    """The epochs that were asked for, on the command line (`epochs`) or in the file.

    Raises:
        ConfigError: the same place says how many steps.
    """
    if epochs is not None:
        if "total_steps" in overrides:
            raise ConfigError("--epochs: --steps says how long the run is too; give one of them")
        return epochs
    if run_file is None or run_file.epochs is None or "total_steps" in overrides:
        return None
    if "total_steps" in run_file.fields:
        raise ConfigError(f"{run_file.path}: epochs: total_steps says how long the run is too; give one of them")
    return run_file.epochs


def filled(
    run_file: RunFile | None, overrides: Mapping[str, Any], paths: DataPaths, *, epochs: float | None = None
) -> tuple[dict[str, Any], LeftOpen]:
    """`overrides` with the values that follow from the model, and what else was left open.

    Raises:
        ConfigError: epochs and steps are both given.
    """
    wanted = epochs_of(run_file, overrides, epochs)
    given = {**(run_file.fields if run_file else {}), **overrides}
    is_saved = run_file is not None and run_file.config_bytes is not None
    if is_saved or given.get("model") != PRETRAINED or paths.model is None or paths.data in (None, BUILTIN):
        return dict(overrides), LeftOpen(epochs=wanted)
    is_adamw = given.get("optimizer", _ADAMW[0]) in _ADAMW
    usual = (_LORA_LEARNING_RATE if given.get("lora") else _LEARNING_RATE) if is_adamw else None
    left = [name for name in FOLLOWING if name not in given and not (name == "total_steps" and wanted is not None)]
    values: dict[str, Any] = {"sequence_length": min(_SEQUENCE_LENGTH, _most_tokens(run_file, overrides))}
    if usual is not None:
        values["learning_rate"] = usual
    elif "learning_rate" in left:
        left.remove("learning_rate")
    taken = {name: value for name, value in values.items() if name in left}
    return {**overrides, **taken}, LeftOpen(fields=tuple(left), epochs=wanted, usual_learning_rate=usual)


def _most_tokens(run_file: RunFile | None, overrides: Mapping[str, Any]) -> int:
    options: dict[str, Any] = {}
    for fields in (run_file.fields if run_file else {}, overrides):
        stated = fields.get("model_options", {})
        options |= stated if isinstance(stated, dict) else {}
    text = options.get("text_config")
    places = [options, text if isinstance(text, dict) else {}]
    found = [value for place in places for key in _POSITIONS if isinstance(value := place.get(key), int) and value > 0]
    return min(found, default=_SEQUENCE_LENGTH)


def as_begun(
    run_file: RunFile | None, overrides: Mapping[str, Any], config_bytes: bytes, *, epochs: float | None = None
) -> dict[str, Any]:
    """`overrides` with what a run that has begun recorded for the fields that are left open."""
    recorded = parse_config_bytes(config_bytes)
    given = {**(run_file.fields if run_file else {}), **overrides}
    names = [name for name in (*FOLLOWING, "no_decay") if name not in given]
    if epochs_of(run_file, overrides, epochs) is not None and "total_steps" in names:
        names.remove("total_steps")
    return {**overrides, **{name: getattr(recorded, name) for name in names}}


def is_begun(config: RunConfig, config_bytes: bytes, *, epochs: float | None) -> bool:
    """Whether `config`, whose data nobody has read yet, is that of the run that has begun."""
    recorded = parse_config_bytes(config_bytes)
    unknown = _FOUND | ({"total_steps"} if epochs is not None else set())
    return all(getattr(config, name) == getattr(recorded, name) for name in RunConfig.model_fields if name not in unknown)
