"""Checkpoints whose weights are not the numbers that were trained: how one is told, and what is said of it. Needs no torch.

Each method of quantization keeps codes in place of values, and scales (or whatever decodes them) beside them. Codes must never
be taken for values, whatever the configuration says or does not say.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from swarm.base.errors import ConfigError

CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: Types of safetensors that hold nothing but codes.
_CODES = re.compile(r"F8_|F6_|F4")
#: What decodes a weight, by the names that GPTQ, AWQ, fp8, compressed-tensors, bitsandbytes, MXFP4, HQQ and AQLM give it.
_DECODER = re.compile(
    r"\.(qweight|qzeros|g_idx|codebooks|W_q|absmax|nested_absmax|quant_map|nested_quant_map|quant_state(\.\S+)?|SCB|weight_format|"
    r"weight_packed|(weight|input|activation)_(scale|zero_point)(_\w+)?|(gate_up|gate|up|down)_proj_(blocks|scales))$"
)
logger = logging.getLogger(__name__)


def method_of(config: Mapping[str, Any]) -> str | None:
    """How the model's configuration says that its weights are quantized; None if it says nothing."""
    for stated in (config.get(key) for key in CONFIG_KEYS):
        if stated:
            named = stated.get("quant_method") if isinstance(stated, Mapping) else None
            return str(named or "by a method that it does not name")[:100]
    return None


def without_method(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as that of the values themselves, which are all that a run computes with and exports."""
    return {key: value for key, value in config.items() if key not in CONFIG_KEYS}


def require_full_precision(model: str, config: Mapping[str, Any], types: Mapping[str, str | None], *, tell: bool = False) -> None:
    """Refuse codes in place of values; of a configuration that speaks of some, where there are none, `tell` the operator.

    Args:
        model: for errors: what the operator named.
        config: its `config.json`.
        types: of each tensor, by name, as safetensors calls them; None where it is not known yet.
        tell: log what is not heeded.

    Raises:
        ConfigError: the checkpoint is quantized; names the method, as far as it is told, and a tensor.
    """
    method = method_of(config)
    for name, dtype in sorted(types.items()):
        if _DECODER.search(name):
            raise refusal(model, method, f"{name} decodes one")
        if dtype is not None and is_code(name, dtype):
            raise refusal(model, method, f"{name} is of type {dtype}")
    if method is not None and tell:
        logger.warning(
            "model %s: its configuration calls it quantized (%s), and its tensors are in full precision: that part of the "
            "configuration is ignored",
            model,
            method,
        )


def is_code(name: str, dtype: str) -> bool:
    """Whether a tensor of type `dtype` cannot hold values of a weight called `name`."""
    return bool(_CODES.match(dtype)) or (dtype not in FLOATS and name.rpartition(".")[2] == "weight")


def refusal(model: str, method: str | None, found: str) -> ConfigError:
    """For a checkpoint with codes in place of weights, of which `found` shows that."""
    how = f"quantized ({method})" if method is not None else "quantized, though its configuration does not say how"
    return ConfigError(
        f"model {model}: its weights are {how}: {found}; take the model in full precision that it was made from "
        "(--lora bits=4 or bits=8 keeps that in few bits here)"
    )
