"""LoRA adapters in a cut model (Hu et al., arXiv 2106.09685), through peft. Owns where they sit, their first values and
their files; must not know how stages are trained.

Only the adapters are trained, averaged, checkpointed and exported. Their names are those of the whole model, whatever the
cut; a stage without a target layer has none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from models.cost import ModelCost, cost_of
from models.files.pretrained import PretrainedFactory
from models.files.shards import Directory, Source
from models.initial import uniform
from models.quantized import Bits, QuantizedLinear, bitsandbytes_functional
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, StorageError
from swarm.stage.saved.tensor_file import save_file

ADAPTER = "default"
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
_CODES, _SCALES = ".codes", ".scales"
#: What peft puts between a layer's name and that of the weight it had before.
_BASE = ".base_layer."
#: What peft puts before the names of the whole model, in an adapter's file.
_PREFIX = "base_model.model."


class LoraFactory:
    """The stages of a pretrained model with adapters in them (a `swarm.stage.module.StreamingFactory`).

    Raises:
        ConfigError: peft is not installed, or no layer of the model is a target.
    """

    def __init__(self, run: RunConfig, source: Source | None) -> None:
        assert run.lora is not None
        self._run = run
        self._lora = run.lora
        self.base = PretrainedFactory(run, source)
        self._directory = str(Path(source.name).resolve()) if isinstance(source, Directory) else ""
        self.num_stages = self.base.num_stages
        self.has_values = self.base.has_values
        self._peft = _import_peft()
        self._targets = self._target_names()

    @property
    def config(self) -> Any:
        """The configuration of the Hugging Face model."""
        return self.base.config

    @property
    def cost(self) -> ModelCost:
        """What the base costs, none of which is trained; adapters are small beside it."""
        cut = self.base.cut
        return cost_of(cut.skeleton(), cut.anatomy, sequence_length=self._run.sequence_length, frozen=["*"])

    @property
    def remarks(self) -> list[str]:
        """What of the base's files is not used."""
        return self.base.remarks

    @property
    def spans(self) -> list[range]:
        """Numbers of each stage's layers."""
        return self.base.spans

    def _target_names(self) -> list[str]:
        """Last parts of the target layers' names: those that were asked for, or every linear layer but the head."""
        outlines = [self.base.outline(stage) for stage in range(self.num_stages)]
        found = {name.rpartition(".")[2] for outline in outlines for name in _linear_layers(outline)}
        unknown = [name for name in self._lora.targets if name not in found]
        if unknown or not found:
            layers = ", ".join(sorted(found)) or "none"
            raise ConfigError(f"lora.targets {''.join(unknown[:1])}: the linear layers of the model are {layers}")
        return sorted(self._lora.targets or found)

    # ------------------------------------------------------------------------------------------------ stages

    def outline(self, stage: int) -> torch.nn.Module:
        """The stage with its adapters, without memory."""
        module = self.base.outline(stage)
        targets = [name for name in _linear_layers(module) if name.rpartition(".")[2] in self._targets]
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        if targets:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._peft.inject_adapter_in_model(self._peft_config(targets), module, ADAPTER, low_cpu_mem_usage=True)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith((_A, _B)))
        if self._lora.bits is not None:
            _quantize(module, self._lora.bits)
        return module

    def load(self, stage: int, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into`, the tensors of a stage by name: adapters begin anew, the rest comes from the model's files."""
        base: dict[str, torch.Tensor] = {}
        weights: dict[str, Callable[[torch.Tensor], None]] = {}
        for name, target in into.items():
            if name.endswith(_A):
                bound = target.shape[1] ** -0.5
                target.copy_(uniform(self._run.seed, name, tuple(target.shape), -bound, bound, 0))
            elif name.endswith(_B):
                target.zero_()
            elif name.endswith(_CODES):
                scales = into[name.removesuffix(_CODES) + _SCALES]
                weights[name.replace(_BASE, ".").removesuffix(_CODES) + ".weight"] = _encoding(self._lora.bits, target, scales)
            elif not name.endswith(_SCALES):
                base[name.replace(_BASE, ".")] = target
        if base or weights:
            self.base.load(stage, base, weights, device=next(iter(into.values())).device)

    def build(self, stage: int) -> torch.nn.Module:
        """The module of `stage` on the CPU, in fp64 if the run's precision is that, else in fp32."""
        return self.base.filled(self.outline(stage), stage, self.load)

    def _peft_config(self, targets: list[str], **place: str | None) -> Any:
        lora = self._lora
        return self._peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            bias="none",
            task_type="CAUSAL_LM",
            **place,
        )

    # ------------------------------------------------------------------------------------------------ export

    def save_pretrained(
        self,
        params: Mapping[str, torch.Tensor],
        directory: str | os.PathLike[str],
        *,
        base: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Write a directory that `peft.PeftModel.from_pretrained` loads onto the base model.

        Args:
            params: the adapters'.
            directory: is made if it is missing.
            base: directory of the base model; by default the one that this was made with, else the hub's id.
            dtype: of the adapters' values.

        Raises:
            ConfigError: nothing says where the base is.
            StorageError: if the directory cannot be written.
            ValueError: if a parameter is no adapter's, or one is missing.
        """
        stages = [self.outline(stage) for stage in range(self.num_stages)]
        wanted = {name for module in stages for name, p in module.named_parameters() if p.requires_grad}
        if params.keys() != wanted:
            raise ValueError(f"parameters do not fit, such as {min(params.keys() ^ wanted)}")
        hub_id, _, revision = self._run.weights_source.partition("@")
        hub_id = hub_id or str(self._run.model_options.get("_name_or_path") or "")
        base = base or ("" if hub_id and revision else self._directory)
        if not (base or hub_id):
            raise ConfigError("the adapter belongs to a model that the run does not name: say where it is with --model")
        path = Path(directory)
        tensors = {
            _PREFIX + name.replace(f".{ADAPTER}.", "."): parameter.detach().to(dtype).cpu().contiguous()
            for name, parameter in params.items()
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            partial = path / "adapter_model.safetensors.partial"
            save_file(tensors, partial)
            os.replace(partial, path / "adapter_model.safetensors")
            place = {"base_model_name_or_path": base or hub_id, "revision": None if base else revision or None}
            config = self._peft_config(self._targets, **place)
            config.inference_mode = True
            config.save_pretrained(path)
        except Exception as error:  # safetensors raises its own type for a full disk
            raise StorageError(f"cannot write the adapter to {path}: {error}") from error


def _quantize(module: torch.nn.Module, bits: Bits) -> None:
    """Linear layers inside the numbered ones, but not the adapters', keep their weights in `bits`."""
    for name in _linear_layers(module):
        parent, _, attribute = name.rpartition(".")
        linear = module.get_submodule(name)
        if ".lora_" not in name and isinstance(linear, torch.nn.Linear):
            setattr(module.get_submodule(parent), attribute, QuantizedLinear(linear, bits))


def _encoding(bits: Bits | None, codes: torch.Tensor, scales: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Takes a weight and puts it, encoded, where it belongs."""
    assert bits is not None

    def take(weight: torch.Tensor) -> None:
        found = QuantizedLinear.encode(weight, bits)
        codes.copy_(found[0])
        scales.copy_(found[1])

    return take


def _linear_layers(module: torch.nn.Module) -> list[str]:
    """Full names of the linear layers inside the numbered ones."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, torch.nn.Linear) and any(part.isdigit() for part in name.split("."))
    ]


def _import_peft() -> Any:
    try:
        bitsandbytes_functional()  # peft imports bitsandbytes too, and not in silence
        import peft
    except ImportError as error:
        raise ConfigError(f"LoRA needs peft and bitsandbytes: pip install 'swarm-train[lora]' ({error})") from None
    return peft
