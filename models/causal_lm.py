"""Any Hugging Face causal LM as stages. Owns what belongs to the model as a whole: its configuration, the spans, the
names and initial values of parameters, the export; must not know how a stage computes or the swarm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.cut import CausalLMStage
from models.export import write_model
from models.initial import initialize, initialize_buffers
from models.options import config_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.tokenizers import ByteTokenizer


def balanced_spans(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous spans whose lengths differ by at most one; the first and the last stage get the extra ones last."""
    share, extra = divmod(num_layers, num_stages)
    by_load = sorted(range(num_stages), key=lambda s: (s in (0, num_stages - 1), s))
    lengths = [share + (stage in by_load[:extra]) for stage in range(num_stages)]
    starts = [sum(lengths[:stage]) for stage in range(num_stages)]
    return [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]


class CausalLMFactory:
    """Builds the stages of one causal LM (a `swarm.stage.module.StageFactory`).

    Args:
        run: the run; its seed, sequence length, number of stages and precision matter.
        options: see `models/options.py`.
        strict: False takes the `config.json` of a checkpoint as `from_pretrained` does, unknown fields included.

    Raises:
        ConfigError: one line naming the option and what is wrong with it. Nothing has been allocated then.
    """

    def __init__(self, run: RunConfig, options: Mapping[str, Any], *, strict: bool = True) -> None:
        self.num_stages = run.num_stages
        self._run = run
        self._dtype = torch.float64 if run.precision == "fp64" else torch.float32
        self.config = config_of(options, run, strict=strict)
        self.vocab_size: int = self.config.vocab_size
        whole = CausalLMStage(self.skeleton(), None)
        self.num_layers = whole.num_layers
        if run.num_stages > self.num_layers:
            raise ConfigError(f"num_stages {run.num_stages} is more than the model's {self.num_layers} layers")
        self.ties = _ties(whole)
        if self.ties and run.num_stages > 1:
            raise ConfigError("tie_word_embeddings: tied embeddings need num_stages 1, or set it to false")
        self.spans = balanced_spans(self.num_layers, run.num_stages)

    def build(self, stage: int) -> CausalLMStage:
        """The module of `stage`, on the CPU, with its initial values."""
        return self._build(self.spans[stage])

    def build_whole(self) -> CausalLMStage:
        """All stages as one module, with the same parameter names and initial values."""
        return self._build(None)

    def outline(self, stage: int) -> CausalLMStage:
        """The module of `stage` with its parameters on the meta device, and its buffers, with their values, on the CPU."""
        lm = self.skeleton()
        module = CausalLMStage(lm, self.spans[stage])
        self._tie(module)
        initialize_buffers(module, _initializer(lm, module))
        return module

    def skeleton(self) -> PreTrainedModel:
        """The whole model without memory."""
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(self.config, attn_implementation=self.config._attn_implementation)
        return lm

    def export_state_dict(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All stages' parameters as the `state_dict` of the Hugging Face model (the names are the same).

        Raises:
            ValueError: if a parameter is missing, unknown or of another shape.
        """
        wanted = {name: tuple(p.shape) for name, p in self.skeleton().named_parameters()}
        given = {name: tuple(p.shape) for name, p in params.items()}
        wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{len(wrong)} parameters do not fit, first {name}: {given.get(name)} instead of {wanted.get(name)}"
            )
        return {name: params[name].detach().cpu().contiguous() for name in wanted}

    def save_pretrained(
        self, params: Mapping[str, torch.Tensor], directory: str | os.PathLike[str],
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads; an old one stays until the new is whole.

        With byte tokens, a `tokenizer.json` that `AutoTokenizer` loads is written too. A run that was trained in fp64
        is loaded with `dtype=torch.float64`; it then differs from the run by the fp32 casts inside transformers.

        Args:
            params: every parameter.
            directory: is made if it is missing.
            buffers: what a checkpoint holds besides.

        Raises:
            StorageError: if the directory cannot be written.
            ValueError: see `export_state_dict`.
        """
        write_model(
            directory, {**self.export_state_dict(params), **(buffers or {})}, self.config, dtype=self._dtype,
            architecture=type(self.skeleton()).__name__,
            byte_tokenizer=self.vocab_size == 256 and self._run.tokenizer_digest in ("", ByteTokenizer.digest),
        )  # fmt: skip

    def _build(self, span: range | None) -> CausalLMStage:
        lm = self.skeleton()
        stage = CausalLMStage(lm, span)
        stage.to_empty(device="cpu")
        self._tie(stage)
        initialize(stage, _initializer(lm, stage), self._run.seed)
        for parameter in stage.parameters():  # not the buffers: rotary frequencies are fp32 in every precision
            parameter.data = parameter.data.to(self._dtype)
        return stage

    def _tie(self, stage: torch.nn.Module) -> None:
        for name, owner in self.ties.items():
            parent, _, attribute = name.rpartition(".")
            setattr(stage.get_submodule(parent), attribute, stage.get_parameter(owner))


def _initializer(lm: PreTrainedModel, stage: torch.nn.Module) -> Callable[[torch.nn.Module], Any]:
    """What gives a submodule its initial values: the code of the model that it is a part of."""
    owners: dict[torch.nn.Module, Any] = {}
    for module in stage.modules():  # parents first
        if isinstance(module, PreTrainedModel):
            owners.update(dict.fromkeys(module.modules(), module))
    return lambda child: owners.get(child, lm)._init_weights(child)


def _ties(whole: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another one: name -> the name under which transformers lists it."""
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        owner = names.setdefault(id(parameter), name)
        if owner != name:
            ties[name] = owner
    return ties
