"""From the names and tensors of a checkpoint's files to those of the model, where they differ (experts that are one tensor
in the model and many in the files, renamed layers). Owns the use of transformers' own rules; must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass
class TensorConversion:
    """How parameters `makes` come from files' tensors: (name in the files, the rule's pattern that it fits)."""

    makes: tuple[str, ...]
    sources: list[tuple[str, str]] = field(default_factory=list)
    rule: Any = None


class Conversion:
    """The rules of one model, which may be without memory."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self._lm = lm
        self._wanted = {name: tensor for name, tensor in lm.state_dict().items()}
        self._rename, self._rules = _rules_of(lm)

    def conversions(self, names: Iterable[str]) -> tuple[list[TensorConversion], list[str]]:
        """What the tensors `names` of the files make, and those of them that make nothing."""
        found: dict[str, TensorConversion] = {}
        unknown = []
        for name in sorted(names, key=_natural):
            target, pattern = (name, None) if name in self._wanted else self._rename(name)
            if target not in self._wanted:
                unknown.append(name)
                continue
            rule = self._rules.get(pattern) if pattern is not None else None
            made = (target,) if rule is None else _targets(target, rule, self._wanted)
            conversion = found.setdefault(target, TensorConversion(made, rule=rule))
            conversion.sources.append((name, pattern or name))
        return list(found.values()), unknown

    def target_of(self, name: str) -> str:
        """What the tensor `name` of the files would be called in the model."""
        return self._rename(name)[0]

    def make(self, conversion: TensorConversion, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by name.

        Args:
            tensors: those of `conversion.sources`, by name.
        """
        rule = deepcopy(conversion.rule)
        for name, pattern in conversion.sources:
            rule.add_tensor(conversion.makes[0], name, pattern, tensors[name])
        made = rule.convert(conversion.makes[0], model=self._lm, config=self._lm.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def as_saved(lm: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters under the names, and in the shapes, that transformers saves them in: those of the family's checkpoints.

    Args:
        tensors: all of a layer, by the model's names. They stay as they are where no rule is known that leads back.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return dict(tensors)
    try:
        return dict(revert_weight_conversion(lm, dict(tensors)))
    except (NotImplementedError, KeyError):  # a rule that has no way back
        return dict(tensors)


def _rules_of(lm: PreTrainedModel) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any]]:
    """What gives a file's name the model's, with the pattern of the rule that applies, and the rules by pattern."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # a version that saves every model under its own names
        return lambda name: (name, None), {}
    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted = lm.state_dict()

    def rename(name: str) -> tuple[str, str | None]:
        return rename_source_key(name, renamings, converters, lm.base_model_prefix, wanted)

    return rename, {pattern: rule for rule in converters for pattern in rule.source_patterns}


def _targets(first: str, rule: Any, wanted: Mapping[str, Any]) -> tuple[str, ...]:
    """All parameters that a rule makes, of which `first` is one."""
    patterns = list(rule.target_patterns)
    used = next((pattern for pattern in patterns if pattern in first), None)
    if used is None:
        return (first,)
    return tuple(dict.fromkeys([first, *(name for p in patterns if (name := first.replace(used, p)) in wanted)]))


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Numbers in order of value: expert 2 comes before expert 10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))
