"""Any Hugging Face causal LM as stages. Owns what belongs to the model as a whole: its configuration, the spans, the
names and initial values of parameters, the export; must not know how a stage computes or the swarm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import compressors
from models.anatomy import anatomy_of
from models.cost import cost_of
from models.cut import CausalLMStage
from models.files.export import Form, write_model
from models.initial import initialize, initialize_buffers
from models.options import config_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.tokenizers import ByteTokenizer
from swarm.policy.spans import Loads, cut
from swarm.stage.module import Tie


class CausalLMFactory:
    """Builds the stages of one causal LM (a `swarm.stage.module.StageFactory`).

    Args:
        run: the run; its seed, sequence length, number of stages and precision matter.
        options: see `models/options.py` and `models/compressors.py`; and `stage_layers`, the number of layers of each
            stage, where measured costs are other than those computed.
        strict: False takes the `config.json` of a checkpoint as `from_pretrained` does, unknown fields included.

    Raises:
        ConfigError: one line naming the option and what is wrong with it. Nothing has been allocated then.
    """

    def __init__(self, run: RunConfig, options: Mapping[str, Any], *, strict: bool = True) -> None:
        self.num_stages = run.num_stages
        self._run = run
        self._dtype = torch.float64 if run.precision == "fp64" else torch.float32
        own = (*compressors.OPTIONS, "stage_layers")
        self.config = config_of({n: v for n, v in options.items() if n not in own}, run, strict=strict)
        self.vocab_size: int = self.config.vocab_size
        lm = self.skeleton()
        self._shapes = {name: tuple(p.shape) for name, p in lm.named_parameters()}
        self.cost = cost_of(lm, anatomy_of(lm), sequence_length=run.sequence_length, frozen=run.frozen)
        whole = CausalLMStage(lm)
        self.num_layers = whole.num_layers
        if run.num_stages > self.num_layers:
            raise ConfigError(f"num_stages {run.num_stages} is more than the model's {self.num_layers} layers")
        self.anatomy = whole.anatomy
        self.spans = self._spans(options.get("stage_layers"))
        anatomy = whole.anatomy
        self.compression = compressors.compression_of(
            options, self.config, spans=self.spans, can_narrow=anatomy.streams is None and anatomy.shared is None
        )
        #: Parameters that are another one, and the name under which transformers lists that.
        self.owners = _owners(whole)
        #: Of these, the ones whose stages differ.
        self.ties = tuple(
            Tie(((self.stage_of(owner), owner), (self.stage_of(name), name)))
            for name, owner in self.owners.items()
            if self.stage_of(name) != self.stage_of(owner)
        )

    def _spans(self, stage_layers: Any) -> list[range]:
        """By cost, unless the options say how many layers each stage has."""
        if stage_layers is None:
            return cut(self.loads(), self.num_stages)[0]
        numbers = isinstance(stage_layers, list) and all(isinstance(n, int) and n > 0 for n in stage_layers)
        if not numbers or len(stage_layers) != self.num_stages or sum(stage_layers) != self.num_layers:
            raise ConfigError(
                f"model_options.stage_layers {stage_layers!r} is no list of {self.num_stages} numbers "
                f"that add up to the model's {self.num_layers} layers"
            )
        return [range(end - n, end) for n, end in zip(stage_layers, accumulate(stage_layers), strict=True)]

    def loads(self) -> Loads:
        """Work and bytes of each layer, of the embedding and of the head, as a peer of this run has them."""
        return self.cost.loads(self._run)

    def stage_of(self, name: str) -> int:
        """The stage that has the parameter or buffer of this name; names of a copy are those of its place."""
        anatomy = self.anatomy
        if name.startswith("compressors."):
            _, after, half, *_ = name.split(".")
            number = int(after) + (half == "up")
            return next(stage for stage, span in enumerate(self.spans) if number in span)
        inside = name.removeprefix(f"{anatomy.base}.")
        child, _, rest = inside.partition(".")
        if inside == name or child in anatomy.last:
            return self.num_stages - 1
        if child != anatomy.layers:
            return 0
        number = int(rest.partition(".")[0])
        return next(stage for stage, span in enumerate(self.spans) if number in span)

    def build(self, stage: int) -> CausalLMStage:
        """The module of `stage`, on the CPU, with its initial values."""
        return self._build(self.spans[stage])

    def build_whole(self) -> CausalLMStage:
        """All stages as one module, with the same parameter names and initial values."""
        return self._build(None)

    def outline(self, stage: int) -> CausalLMStage:
        """The module of `stage` with its parameters on the meta device, and its buffers, with their values, on the CPU."""
        lm = self.skeleton()
        module = CausalLMStage(lm, self.spans[stage], compression=self.compression)
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
            ValueError: if a parameter is missing, unknown or of another shape, or copies of one differ.
        """
        return {name: self._exported(params, name).cpu().contiguous() for name in self._names_to_export(params)}

    def _names_to_export(self, params: Mapping[str, torch.Tensor]) -> list[str]:
        """In the model's order, which is that of the stages. See `export_state_dict`."""
        for name, owner in self.owners.items():
            if name in params and owner in params and not torch.equal(params[name], params[owner]):
                raise ValueError(f"{name} and {owner} are one parameter, and differ")
        wrong = sorted(self._shapes.keys() ^ (params.keys() - self.owners.keys()))
        if wrong:
            what = "missing" if wrong[0] in self._shapes else "unknown"
            raise ValueError(f"{len(wrong)} parameters do not fit, first {wrong[0]}, which is {what}")
        return list(self._shapes)

    def _exported(self, params: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        value = params[name].detach()
        if tuple(value.shape) != self._shapes[name]:
            raise ValueError(f"parameters do not fit: {name} is {tuple(value.shape)} instead of {self._shapes[name]}")
        return value

    def save_pretrained(
        self,
        params: Mapping[str, torch.Tensor],
        directory: str | os.PathLike[str],
        buffers: Mapping[str, torch.Tensor] | None = None,
        form: Form | None = None,
    ) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads; an old one stays until the new is whole.

        With byte tokens, a `tokenizer.json` that `AutoTokenizer` loads is written too. A run that was trained in fp64
        is loaded with `dtype=torch.float64`; it then differs from the run by the fp32 casts inside transformers.

        Args:
            params: every parameter; read one after the other, in the order of the layers.
            directory: is made if it is missing.
            buffers: what a checkpoint holds besides.
            form: what the files are like; by default fp32, or fp64 of a run of that precision.

        Raises:
            ConfigError: the model is none of transformers'.
            StorageError: if the directory cannot be written.
            ValueError: see `export_state_dict`.
        """
        if self.compression is not None:
            raise ConfigError(f"a model with model_options.compressor {self.compression.kind!r} is none of transformers'")
        write_model(
            directory,
            self._names_to_export(params),
            lambda name: self._exported(params, name),
            self.skeleton(),
            form or Form(dtype=self._dtype),
            buffers=buffers or {},
            byte_tokenizer=self.vocab_size == 256 and self._run.tokenizer_digest in ("", ByteTokenizer.digest),
        )

    def _build(self, span: range | None) -> CausalLMStage:
        lm = self.skeleton()
        stage = CausalLMStage(lm, span, compression=self.compression)
        stage.to_empty(device="cpu")
        initialize(stage, _initializer(lm, stage), self._run.seed)
        self._tie(stage)
        for name in self.owners.keys() & dict(stage.named_parameters()).keys():  # the owner is in another stage
            stage.get_parameter(name).data = self._initial(self.owners[name]).data
        for parameter in stage.parameters():  # not the buffers: rotary frequencies are fp32 in every precision
            parameter.data = parameter.data.to(self._dtype)
        return stage

    def _tie(self, stage: torch.nn.Module) -> None:
        """Make one parameter of two that are tied, where both are in this stage."""
        present = dict(stage.named_parameters(remove_duplicate=False))
        for name, owner in self.owners.items():
            if name in present and owner in present:
                parent, _, attribute = name.rpartition(".")
                setattr(stage.get_submodule(parent), attribute, present[owner])

    def _initial(self, name: str) -> torch.nn.Parameter:
        """The initial value of one parameter, from the code of the module that has it."""
        lm = self.skeleton()
        parent, _, attribute = name.rpartition(".")
        initializer = _initializer(lm, lm)
        module = lm.get_submodule(parent).to_empty(device="cpu")
        initialize(module, initializer, self._run.seed, prefix=f"{parent}.")
        return getattr(module, attribute)


def _initializer(lm: PreTrainedModel, part: torch.nn.Module) -> Callable[[torch.nn.Module], Any]:
    """What gives a submodule of `part` its initial values: the code of the innermost model that it is a part of."""
    initializers: dict[torch.nn.Module, Callable[[torch.nn.Module], Any]] = {}
    for name, module in part.named_modules():  # parents first
        if isinstance(module, PreTrainedModel):
            initializers.update(dict.fromkeys(module.modules(), module._init_weights))
        elif name == "compressors":
            initializers.update(dict.fromkeys(module.modules(), compressors.initial))
    return lambda child: initializers.get(child, lm._init_weights)(child)


def _owners(whole: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another one -> the name under which transformers lists it."""
    names: dict[int, str] = {}
    owners: dict[str, str] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        owner = names.setdefault(id(parameter), name)
        if owner != name:
            owners[name] = owner
    return owners
