"""A model whose initial values lie in a directory or on a hub. Owns which tensors a stage needs and their accounting.

The cut is `causal_lm`'s, the files are `shards`'. Every tensor of the files belongs to a parameter, every parameter has
one, and the digests are those of the run: anything else is refused by name, before anything is allocated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from models.causal_lm import CausalLMFactory
from models.shards import Entry, Shards, Source, block_digests, block_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.stage.module import replace_parameters

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
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
        self._names = frozenset(name for name, _ in self.cut.skeleton().named_parameters())
        #: Of tied tensors: name -> the name under which the model lists it.
        self._tied = self.cut.ties
        self.num_stages = self.cut.num_stages
        self.has_values = source is not None
        self._shards = Shards(source) if source is not None else None
        if self._shards is not None:
            self._account(self._shards)

    @property
    def config(self) -> Any:
        """Of the Hugging Face model."""
        return self.cut.config

    def _account(self, shards: Shards) -> None:
        """Strict in both directions; a head that is tied to the embedding may be left out, or be there twice."""
        wanted = self._names
        present = {name for name in shards.names if not _COMPUTED.search(name)}
        where = f"model {shards.source.name}"
        missing = sorted(name for name in wanted if name not in present)
        unexpected = sorted(present - wanted - self._tied.keys())
        if missing:
            raise ConfigError(f"{where}: {len(missing)} tensors are missing, first {missing[0]}")
        if unexpected:
            raise ConfigError(f"{where}: {len(unexpected)} tensors belong to no parameter, first {unexpected[0]}")

    # ------------------------------------------------------------------------------------------------ stages

    def outline(self, stage: int) -> torch.nn.Module:
        return self.cut.outline(stage)

    def build(self, stage: int) -> torch.nn.Module:
        """The module of `stage` on the CPU, in fp64 if the run's precision is that, else in fp32."""
        return self.filled(self.outline(stage), stage, self.load)

    def filled(
        self, module: torch.nn.Module, stage: int, load: Callable[[int, Mapping[str, torch.Tensor]], None]
    ) -> torch.nn.Module:
        """An outline with memory, and with the values that `load` gives."""
        dtype = torch.float64 if self._run.precision == "fp64" else torch.float32
        replace_parameters(
            module, lambda _, p: torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype)
        )
        load(stage, {name: parameter.data for name, parameter in module.named_parameters()})
        return module

    def load(
        self, stage: int, into: Mapping[str, torch.Tensor],
        take: Mapping[str, Callable[[torch.Tensor], None]] | None = None, *, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """As a `StreamingFactory` does. Parameters that `take` names are given to it instead, one at a time on `device`."""
        assert self._shards is not None, "this machine has no files"
        shards = self._shards
        targets = {self._file_name(name): target for name, target in into.items()}
        takers = {self._file_name(name): taker for name, taker in (take or {}).items()}
        blocks = {block_of(name) for name in (*targets, *takers)}
        names = [name for name in sorted(shards.names) if block_of(name) in blocks]
        by_file = sorted({shards.file_of(name) for name in names} & self._run.weights.keys())
        self._verify({file: shards.digest_of_file(file) for file in by_file})
        if by_file:
            names = sorted({*targets, *takers})
        entries = {name: shards.entry(name) for name in names}
        for name, wanted in targets.items():
            entry = entries[name]
            if entry.shape != tuple(wanted.shape):
                raise ConfigError(f"{entry.path}: {name} has shape {entry.shape}, the model {tuple(wanted.shape)}")
        leaves: dict[str, tuple[Entry, bytes]] = {}
        for name, entry in entries.items():
            digest = hashlib.sha256()
            taker = takers.get(name)
            target = targets.get(name) if taker is None else torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device=device)
            shards.read(entry, _Copy(entry, target), digest)
            if taker is not None and target is not None:
                taker(target)
            leaves[name] = (entry, digest.digest())
        if not by_file:
            self._verify(block_digests(leaves))

    def _file_name(self, name: str) -> str:
        """What the files call a parameter: of tied ones they may hold only the other."""
        assert self._shards is not None
        return name if name in self._shards.names else self._tied[name]

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

    def save_pretrained(self, params: Mapping[str, torch.Tensor], directory: Any) -> None:
        """See `CausalLMFactory.save_pretrained`."""
        self.cut.save_pretrained(params, directory)


class _Copy:
    """Puts a tensor's bytes, as they come, into its place; None takes nothing."""

    def __init__(self, entry: Entry, target: torch.Tensor | None) -> None:
        self._dtype = _DTYPES[entry.dtype]
        self._target = None if target is None else target.view(-1)

    def __call__(self, offset: int, chunk: memoryview) -> None:
        if self._target is not None and len(chunk):
            values = torch.frombuffer(chunk, dtype=self._dtype)
            start = offset // self._dtype.itemsize
            self._target[start : start + len(values)].copy_(values)
