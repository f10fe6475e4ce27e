"""What a run chooses by name, and what its configuration must know of each choice without importing torch.

Beside these names a run may give an optimizer or a compressor of its owner as `package.module:name`; see `dotted.py`. The
classes are in `swarm/stage/optimizers/choice.py` and `swarm/averaging/compressors/choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from swarm.base.dotted import is_dotted


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Facts of an optimizer that are known before it is made."""

    #: Memory of what it keeps from one update to the next, in units of the masters'.
    kept_per_master: float = 2.0
    #: It loses digits of fp64.
    excludes_fp64: bool = False


@dataclass(frozen=True, kw_only=True)
class CompressorFacts:
    """Facts of a compressor of averages that are known before it is made."""

    #: It keeps back what it does not send (error feedback): it sums no whole averages, and needs memory for what it keeps.
    keeps_back: bool = False
    #: The modes that it is not for, and why.
    unfit: Mapping[str, str] = field(default_factory=dict)
    #: Percent of the norm of a real gradient that one exchange loses, or leaves for later if it keeps something back, where
    #: that is above 5; `tests/unit/models/test_losses_of_averages.py` measures it.
    loses: int = 0
    #: It sends whole parameters, and no fragment of them.
    is_whole: bool = False
    #: What a local run with it takes where its configuration says nothing: as the method was published.
    local: Mapping[str, float] = field(default_factory=lambda: DILOCO)


#: DiLoCo, arXiv 2311.08105, section 3.1: H is for the user to choose.
DILOCO: Mapping[str, float] = {"inner_steps": 0, "outer_learning_rate": 0.7, "outer_momentum": 0.9, "fragments": 1}
#: CocktailSGD, ICML 2023: copies meet after each update, in a tenth of the elements, and there is no outer optimizer.
COCKTAIL: Mapping[str, float] = {"inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0, "fragments": 10}

OPTIMIZER_FACTS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(),
    "adamw8bit": OptimizerFacts(kept_per_master=0.5, excludes_fp64=True),
    "lamb": OptimizerFacts(),
}

COMPRESSOR_FACTS: dict[str, CompressorFacts] = {
    **dict.fromkeys(("none", "fp16", "bf16", "8bit", "int8"), CompressorFacts()),
    "uniform8": CompressorFacts(loses=36),
    "powersgd": CompressorFacts(keeps_back=True, loses=40, is_whole=True),
    "cocktail": CompressorFacts(
        keeps_back=True, loses=97, unfit={"sync": "sends differences of models: it needs mode 'local'"}, local=COCKTAIL
    ),
}

#: `RunConfig.compression` -> the relative error of one rounding of activations and their gradients.
ROUNDING: dict[str, float] = {"none": 0.0, "8bit": 6.4e-3, "fp16": 2e-4, "bf16": 2e-3}


def optimizer_facts(name: str) -> OptimizerFacts:
    """The facts of the optimizer `name`; an owner's own is taken to keep as much as AdamW."""
    return OPTIMIZER_FACTS.get(name) or OptimizerFacts()


def compressor_facts(name: str) -> CompressorFacts:
    """The facts of the compressor `name`; an owner's own is taken to keep something back."""
    return COMPRESSOR_FACTS.get(name) or CompressorFacts(keeps_back=True)


def one_of(names: Iterable[str], *, or_own: bool = True) -> Callable[[str], str]:
    """A validator that lets through one of `names`, or the owner's own `package.module:name`."""
    *first, last = (repr(name) for name in names)
    said = f"Input should be {', '.join(first)} or {last}" + (", or package.module:name" if or_own else "")

    def check(value: str) -> str:
        if value not in names and not (or_own and is_dotted(value)):
            raise ValueError(said)
        return value

    return check
