"""`RunConfig.model_options` -> the configuration of a Hugging Face model. Owns their validation; must not build a model.

The options are `model_type`, optionally `attn_implementation` (`sdpa` or `eager`; by default what transformers would
take), and any field of the family's configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from models.anatomy import check_family
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError

#: Fields of a `config.json` that say how and by what it was saved.
_NOISE = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")


def config_of(options: Mapping[str, Any], run: RunConfig, *, strict: bool = True) -> PreTrainedConfig:
    """The configuration of a causal LM that can be cut; unless `strict`, from what transformers saved.

    Raises:
        ConfigError: one line naming the option and what is wrong with it.
    """
    fields = dict(options)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model_options.model_type {model_type!r} is no causal LM of transformers")
    attention = fields.pop("attn_implementation", None)
    if attention not in (None, "sdpa", "eager"):
        raise ConfigError(f"model_options.attn_implementation {attention!r} is none of sdpa, eager")
    config_class: Any = CONFIG_MAPPING[model_type]
    check_family(model_type, config_class)
    known = set(inspect.signature(config_class).parameters) | set(getattr(config_class, "__dataclass_fields__", ()))
    known |= set(config_class.attribute_map)
    unknown = sorted(set(fields) - known)
    if not strict:
        for name in _NOISE:
            fields.pop(name, None)
    elif unknown:
        raise ConfigError(f"model_options.{unknown[0]}: the {model_type} configuration has no such field")
    positions = config_class.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if positions in known and not {positions, "max_position_embeddings"} & fields.keys():
        fields[positions] = max(2048, run.sequence_length)
    try:
        config = config_class.from_dict(fields, attn_implementation=attention)
    except Exception as error:  # transformers raises several kinds for a field of the wrong type or value
        text = " ".join(str(error).split())
        raise ConfigError(f"model_options: {text[:300]}") from None
    num_layers = getattr(config, "num_hidden_layers", 1)
    if isinstance(num_layers, int) and num_layers < 1:
        raise ConfigError(f"model_options.num_hidden_layers {num_layers}: a model has at least one layer")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < run.sequence_length:
        raise ConfigError(f"sequence_length {run.sequence_length} is over the model's max_position_embeddings {limit}")
    if getattr(config, "layerdrop", 0):
        raise ConfigError("model_options.layerdrop: a draw that skips whole layers cannot be repeated; use 0")
    return config
