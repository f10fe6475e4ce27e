"""A model whose initial values lie in a directory or on a hub. Owns which tensors a stage needs and their accounting.

The cut is `causal_lm`'s, the files are `shards`'. Every tensor of the files belongs to a parameter, every parameter has
one, and the digests are those of the run: anything else is refused by name, before anything is allocated. What transformers
leaves out too (layers for drafting, another copy of the weights) is left out and told.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from models.causal_lm import CausalLMFactory
from models.cost import ModelCost
from models.files.conversion import Conversion, TensorConversion
from models.files.export import GENERATION_FILE, SHARD_BYTES, Form
from models.files.shards import Directory, ShardEntry, Shards, Source, block_digests, block_of, read_config
from models.files.stored_codes import FLOATS, method_of, refusal, require_full_precision
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.module import replace_parameters, saved_buffers

logger = logging.getLogger(__name__)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: What older versions of transformers saved though it is computed.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.bias$|\.masked_bias$")


class PretrainedFactory:
    """Builds the stages of a model from its files (a `swarm.stage.module.StreamingFactory`).

    Args:
        run: the run; `weights` states the digests.
        source: where the files are on this machine; None if it has none.

    Raises:
        ConfigError: one line naming what does not fit: the configuration, a tensor that is missing, or one too many.
    """

    def __init__(self, run: RunConfig, source: Source | None) -> None:
        self._run = run
        self.cut = CausalLMFactory(run, run.model_options, strict=False)
        if self.cut.compression is not None:
            raise ConfigError("model_options.compressor: a pretrained model has none; it is for training from scratch")
        self._names = frozenset(name for name, _ in self.cut.skeleton().named_parameters())
        #: Of tied tensors: name -> the name under which the model lists it.
        self._tied = self.cut.owners
        #: Between stages.
        self.ties = self.cut.ties
        self.num_stages = self.cut.num_stages
        self.has_values = source is not None
        self._shards = Shards(source) if source is not None else None
        self._conversion = Conversion(self.cut.skeleton())
        #: What of the files is not used, and why: for whoever started this.
        self.remarks: list[str] = []
        #: How each parameter comes from the files' tensors.
        self._conversions = self._account(self._shards) if self._shards is not None else {}
        for remark in self.remarks:
            logger.warning("%s", remark)

    @property
    def config(self) -> Any:
        """The configuration of the Hugging Face model."""
        return self.cut.config

    @property
    def cost(self) -> ModelCost:
        """What each layer, the embedding and the head cost."""
        return self.cut.cost

    @property
    def spans(self) -> list[range]:
        """Numbers of each stage's layers."""
        return self.cut.spans

    def _account(self, shards: Shards) -> dict[str, TensorConversion]:
        """Strict in both directions; a head that is tied to the embedding may be left out, or be there twice."""
        require_full_precision(shards.source.name, read_config(shards.source), dict.fromkeys(shards.names))
        present = [name for name in shards.names if not _COMPUTED.search(name)]
        conversions, unknown = self._conversion.conversions(present)
        made = {name: conversion for conversion in conversions for name in conversion.makes}
        left_out = self._left_out(unknown)
        unexpected = [name for name in unknown if name not in left_out]
        missing = sorted(self._names - made.keys())
        where = f"model {shards.source.name}"
        if missing:
            raise ConfigError(f"{where}: {len(missing)} tensors are missing, first {missing[0]}")
        if unexpected:
            raise ConfigError(f"{where}: {len(unexpected)} tensors belong to no parameter, first {unexpected[0]}")
        if left_out:
            self.remarks.append(
                f"{where}: {len(left_out)} tensors are left out, first {min(left_out)}: no part of the "
                f"{self.cut.num_layers} layers that are trained (layers for drafting are none)"
            )
        if shards.unused:
            more = f" and {len(shards.unused) - 1} more are" if shards.unused[1:] else " is"
            self.remarks.append(f"{where}: {shards.unused[0]}{more} not read: {shards.listed_in} lists the weights")
        return made

    def _left_out(self, unknown: list[str]) -> set[str]:
        """Of tensors that belong to no parameter: what the model's class says is none, and layers past the last one."""
        anatomy = self.cut.anatomy
        layer = re.compile(rf"(?:{re.escape(anatomy.base)}\.)?{re.escape(anatomy.layers)}\.(\d+)\.")
        ignored = [re.compile(pattern) for pattern in self.cut.skeleton()._keys_to_ignore_on_load_unexpected or ()]

        def is_left_out(name: str) -> bool:
            target = self._conversion.target_of(name)
            past = (found := layer.match(target)) is not None and int(found[1]) >= self.cut.num_layers
            return past or any(pattern.search(text) for pattern in ignored for text in (name, target))

        return {name for name in unknown if is_left_out(name)}

    # ------------------------------------------------------------------------------------------------ stages

    def outline(self, stage: int) -> torch.nn.Module:
        """The stage without memory."""
        return self.cut.outline(stage)

    def build(self, stage: int) -> torch.nn.Module:
        """The module of `stage` on the CPU, in fp64 if the run's precision is that, else in fp32."""
        return self.filled(self.outline(stage), stage, self.load)

    def filled(
        self, module: torch.nn.Module, stage: int, load: Callable[[int, Mapping[str, torch.Tensor]], None]
    ) -> torch.nn.Module:
        """An outline with memory, and with the values that `load` gives."""
        dtype = torch.float64 if self._run.precision == "fp64" else torch.float32
        replace_parameters(module, lambda _, p: torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype))
        load(stage, {name: parameter.data for name, parameter in module.named_parameters()} | saved_buffers(module))
        return module

    def load(
        self,
        stage: int,
        into: Mapping[str, torch.Tensor],
        take: Mapping[str, Callable[[torch.Tensor], None]] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """As a `StreamingFactory` does. Parameters that `take` names are given to it instead, one at a time on `device`."""
        assert self._shards is not None, "this machine has no files"
        shards = self._shards
        targets = {self._file_name(name): target for name, target in into.items()}
        takers = {self._file_name(name): taker for name, taker in (take or {}).items()}
        conversions = {id(r): r for name in (*targets, *takers) if (r := self._conversions.get(name)) is not None}
        needed = {name: conversion for conversion in conversions.values() for name, _ in conversion.sources}
        blocks = {block_of(name) for name in needed}
        names = [name for name in sorted(shards.names) if block_of(name) in blocks]
        by_file = sorted({shards.file_of(name) for name in names} & self._run.weights.keys())
        self._verify({file: shards.digest_of_file(file) for file in by_file})
        if by_file:
            names = sorted(needed)
        entries = {name: shards.entry(name) for name in names}
        for name, conversion in needed.items():
            self._require_values(name, entries[name], [targets[x] for x in conversion.makes if x in targets])
            if conversion.rule is None and conversion.makes[0] in targets:
                _require_shape(conversion.makes[0], entries[name].shape, targets[conversion.makes[0]], str(entries[name].path))
        leaves: dict[str, tuple[ShardEntry, bytes]] = {}
        gathered: dict[str, torch.Tensor] = {}
        for name, entry in entries.items():
            digest, found = hashlib.sha256(), needed.get(name)
            is_direct = found is not None and found.rule is None and found.makes[0] in targets
            place = targets[found.makes[0]] if found is not None and is_direct else None
            if found is not None and not is_direct:
                place = gathered[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device=device)
            shards.read(entry, _Copy(entry, place), digest)
            leaves[name] = (entry, digest.digest())
            if found is not None and not is_direct and all(source in gathered for source, _ in found.sources):
                self._make(found, {source: gathered.pop(source) for source, _ in found.sources}, targets, takers)
        if not by_file:
            self._verify(block_digests(leaves))

    def _require_values(self, name: str, entry: ShardEntry, targets: Sequence[torch.Tensor]) -> None:
        """Codes in place of the values of a parameter; a buffer may hold whole numbers."""
        if entry.dtype not in FLOATS and all(target.is_floating_point() for target in targets):
            assert self._shards is not None
            method = method_of(read_config(self._shards.source))
            raise refusal(self._source_name, method, f"{name} is of type {entry.dtype}")

    def _make(
        self,
        conversion: TensorConversion,
        tensors: dict[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        takers: Mapping[str, Callable[[torch.Tensor], None]],
    ) -> None:
        """Hand over what the files' `tensors` make."""
        if conversion.rule is None:
            made = {conversion.makes[0]: tensors[conversion.sources[0][0]]}
        else:
            try:
                made = self._conversion.make(conversion, tensors)
            except (RuntimeError, ValueError, IndexError) as error:  # a part is missing, or of another shape
                reason = " ".join(str(error).split())[:200]
                what = f"the {len(tensors)} tensors that make {conversion.makes[0]}"
                raise ConfigError(f"model {self._source_name}: {what} do not fit together: {reason}") from None
        for name, value in made.items():
            if name in takers:
                takers[name](value)
            elif name in targets:
                _require_shape(name, tuple(value.shape), targets[name], f"model {self._source_name}")
                targets[name].copy_(value)

    @property
    def _source_name(self) -> str:
        assert self._shards is not None
        return self._shards.source.name

    def _file_name(self, name: str) -> str:
        """What the files call a parameter: copies of a tied one all take the value that the model lists."""
        return self._tied.get(name, name)

    def _verify(self, found: Mapping[str, str]) -> None:
        assert self._shards is not None
        for block, digest in found.items():
            expected = self._run.weights.get(block, "")
            if digest != expected:
                raise ConfigError(
                    f"model {self._shards.source.name} is not the run's: {block} has digest {digest[:12]}, "
                    f"the run {expected[:12] or 'none'}; give the same model as the run's creator, or none"
                )

    # ------------------------------------------------------------------------------------------------ export

    @property
    def base_dtype(self) -> torch.dtype:
        """What the base's configuration says that its parameters are kept in."""
        options = self._run.model_options
        dtype = getattr(torch, str(options.get("dtype") or options.get("torch_dtype")).removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32

    def form(self, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES) -> Form:
        """What the base's files are like, as far as this machine knows; with `dtype`, all is of that."""
        if self._shards is None:
            return Form(dtype=dtype or self.base_dtype, shard_bytes=shard_bytes)
        shards, generation = self._shards, self._shards.source.path(GENERATION_FILE)
        is_here = isinstance(shards.source, Directory)  # a hub's files would be fetched for it
        floats = {name: kind for name in shards.names if is_here and (kind := shards.entry(name).dtype) in FLOATS}
        return Form(
            dtype=dtype or self.base_dtype,
            dtypes={} if dtype is not None else {name: _DTYPES[kind] for name, kind in floats.items()},
            names=shards.names,
            generation=None if generation is None else generation.read_bytes(),
            shard_bytes=shard_bytes,
        )

    def save_pretrained(self, params: Mapping[str, torch.Tensor], directory: Any, form: Form | None = None) -> None:
        """See `CausalLMFactory.save_pretrained`; by default the files are like the base's.

        Raises:
            ConfigError: the model's files hold buffers, which no run trains, and they are not here.
        """
        buffers: dict[str, torch.Tensor] = {}
        for stage in range(self.num_stages):
            own = saved_buffers(self.outline(stage))
            if own and not self.has_values:
                raise ConfigError(f"{min(own)} is not trained and comes from the model's files: name them with --model")
            if own:
                self.load(stage, own)
                buffers |= own
        self.cut.save_pretrained(params, directory, buffers, form or self.form())


def _require_shape(name: str, shape: tuple[int, ...], target: torch.Tensor, where: str) -> None:
    if shape != tuple(target.shape):
        raise ConfigError(f"{where}: {name} has shape {shape}, the model {tuple(target.shape)}")


class _Copy:
    """Puts a tensor's bytes, as they come, into its place; None takes nothing."""

    def __init__(self, entry: ShardEntry, target: torch.Tensor | None) -> None:
        self._dtype = _DTYPES.get(entry.dtype, torch.uint8)
        self._target = None if target is None else target.view(-1)

    def __call__(self, offset: int, chunk: memoryview) -> None:
        if self._target is not None and len(chunk):
            values = torch.frombuffer(chunk, dtype=self._dtype)
            start = offset // self._dtype.itemsize
            self._target[start : start + len(values)].copy_(values)
