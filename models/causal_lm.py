"""Hugging Face causal LMs cut by layer. Owns the cut, the boundary, the loss and the export; must not know the swarm.

A stage is the model's own code over a part of its layers: the layer list keeps its full length (so that whatever is
looked up by layer number stays right) with pass-through modules in the places of others, and the model's own forward
makes masks and rotary embeddings. Nothing of another stage is ever allocated. Parameter names are exactly those of the
Hugging Face `state_dict`, in every cut.

Shapes: B batch, T tokens of a sample, D hidden size, N = B * T, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, masking_utils

from models.byte_tokenizer import write_byte_tokenizer
from models.initial import initialize
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, StorageError
from swarm.feed.tokenizers import ByteTokenizer
from swarm.stage.module import Tensors

#: Families whose cut equals their own forward: tests/unit/models/test_causal_lm.py tries each, multipliers off default.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "phi3")
#: Logits of at most this many elements exist at a time (256 MiB in fp32). More are computed in chunks, and once more in
#: the backward: with 2,048 tokens and a vocabulary of 32,000 that would cost the last stage a twentieth of its time.
MAX_LOGIT_ELEMENTS = 2**26
IGNORED_LABEL = -100
#: Integer inputs that every stage needs.
_HANDED_ON = ("attention_mask", "position_ids")


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
        options: `model_type` (one of `MODEL_TYPES`), optionally `attn_implementation` (`sdpa` or `eager`), and fields
            of the family's Hugging Face configuration.

    Raises:
        ConfigError: one line naming the option and what is wrong with it.
    """

    def __init__(self, run: RunConfig, options: Mapping[str, Any]) -> None:
        self.num_stages = run.num_stages
        self._run = run
        self._dtype = torch.float64 if run.precision == "fp64" else torch.float32
        self.config = _config_of(options, run)
        self.vocab_size: int = self.config.vocab_size
        num_layers = self.config.num_hidden_layers
        if run.num_stages > num_layers:
            raise ConfigError(f"num_stages {run.num_stages} is more than the model's {num_layers} layers")
        if self.config.tie_word_embeddings and run.num_stages > 1:
            raise ConfigError("tie_word_embeddings: tied embeddings need num_stages 1, or set it to false")
        self.spans = balanced_spans(num_layers, run.num_stages)

    def build(self, stage: int) -> CausalLMStage:
        """The module of `stage`, on the CPU, with its initial values."""
        return self._build(self.spans[stage])

    def build_whole(self) -> CausalLMStage:
        """All stages as one module, with the same parameter names and initial values."""
        return self._build(range(self.config.num_hidden_layers))

    def export_state_dict(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All stages' parameters as the `state_dict` of the Hugging Face model (the names are the same).

        Raises:
            ValueError: if a parameter is missing, unknown or of another shape.
        """
        wanted = {name: tuple(p.shape) for name, p in self._skeleton().named_parameters()}
        given = {name: tuple(p.shape) for name, p in params.items()}
        wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{len(wrong)} parameters do not fit, first {name}: {given.get(name)} instead of {wanted.get(name)}"
            )
        return {name: params[name].detach().cpu().contiguous() for name in wanted}

    def save_pretrained(self, params: Mapping[str, torch.Tensor], directory: str | os.PathLike[str]) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads; an old one stays until the new is whole.

        With byte tokens, a `tokenizer.json` that `AutoTokenizer` loads is written too. A run that was trained in fp64
        is loaded with `dtype=torch.float64`; it then differs from the run by the fp32 casts inside transformers.

        Raises:
            StorageError: if the directory cannot be written.
            ValueError: see `export_state_dict`.
        """
        from safetensors.torch import save_file

        state = self.export_state_dict(params)
        config = self.config.to_dict()
        config.update(architectures=[type(self._skeleton()).__name__], dtype=str(self._dtype).removeprefix("torch."))
        config.pop("_attn_implementation", None)
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
            partial = path / "model.safetensors.partial"
            save_file(state, partial, metadata={"format": "pt"})
            os.replace(partial, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            if self.vocab_size == 256 and self._run.tokenizer_digest in ("", ByteTokenizer.digest):
                write_byte_tokenizer(path)
        except Exception as error:  # safetensors raises its own type for a full disk
            raise StorageError(f"cannot write the model to {path}: {error}") from error

    def _skeleton(self) -> PreTrainedModel:
        """The whole model without memory."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, attn_implementation=self.config._attn_implementation)

    def _build(self, span: range) -> CausalLMStage:
        lm = self._skeleton()
        stage = CausalLMStage(lm, span)
        stage.to_empty(device="cpu")
        if self.config.tie_word_embeddings and stage.head is not None:
            lm.get_output_embeddings().weight = lm.get_input_embeddings().weight
        initialize(stage, lm._init_weights, self._run.seed)
        for parameter in stage.parameters():  # not the buffers: rotary frequencies are fp32 in every precision
            parameter.data = parameter.data.to(self._dtype)
        return stage


class CausalLMStage(torch.nn.Module):
    """Layers `span` of `lm`; the first stage has the embedding, the last one the final norm, the head and the loss.

    Called as `stage(inputs, labels)`:

    * `inputs`: `input_ids` int64 [B, T] at the first stage, else `hidden_states` [B, T, D] of any floating dtype (cast
      to that of the parameters); optionally `attention_mask` and `position_ids` [B, T], handed on unchanged.
    * `labels`: at the last stage `labels` int64 [B, T], already shifted: `labels[t]` is the token after t, or -100.
    """

    def __init__(self, lm: PreTrainedModel, span: range) -> None:
        super().__init__()
        base: Any = getattr(lm, lm.base_model_prefix)
        self.span = span
        self.is_first = span.start == 0
        self.is_last = span.stop == lm.config.num_hidden_layers
        self.max_logit_elements = MAX_LOGIT_ELEMENTS
        self._logits_config = lm.config
        self._base_name = lm.base_model_prefix
        self._head_name: str | None = None
        for number in range(lm.config.num_hidden_layers):
            if number not in span:
                base.layers[number] = (_Entry if number == span.start - 1 else _PassThrough)(base.layers[number])
        if not self.is_first:
            base.embed_tokens = torch.nn.Identity()
        if not self.is_last:
            base.norm = torch.nn.Identity()
        self.add_module(self._base_name, base)
        if self.is_last:
            head = lm.get_output_embeddings()
            self._head_name = next(name for name, module in lm.named_children() if module is head)
            self.add_module(self._head_name, head)

    @property
    def head(self) -> torch.nn.Linear | None:
        return None if self._head_name is None else getattr(self, self._head_name)

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        if not self.is_last:
            handed_on = {name: inputs[name] for name in _HANDED_ON if name in inputs}
            return {"hidden_states": self.hidden_states(inputs)} | handed_on
        if labels is None:
            raise ValueError("the last stage needs labels")
        labels_N = labels["labels"].reshape(-1)
        hidden_ND = self.hidden_states(inputs).flatten(0, 1)
        return {"loss_sum": self._loss_sum(hidden_ND, labels_N), "tokens": (labels_N != IGNORED_LABEL).sum()}

    def logits(self, inputs: Tensors) -> torch.Tensor:
        """Logits [B, T, V] of the last stage."""
        assert self.head is not None, "only the last stage has logits"
        return self._scaled(F.linear(self.hidden_states(inputs), self.head.weight, self.head.bias))

    def hidden_states(self, inputs: Tensors) -> torch.Tensor:
        """What this stage's last layer (and, at the end, the final norm) gives: [B, T, D] in the parameters' dtype."""
        dtype = next(self.parameters()).dtype  # of this call: `functional_call` swaps parameters
        given = {name: inputs.get(name) for name in _HANDED_ON}
        base = getattr(self, self._base_name)
        own_positions = _own_positions.set("position_ids" not in inputs)
        try:
            return self._run(base, inputs, given, dtype)
        finally:
            _own_positions.reset(own_positions)

    def _run(
        self, base: Any, inputs: Tensors, given: dict[str, torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor:
        with _Fp64() if dtype == torch.float64 else nullcontext():
            if self.is_first:
                return base(input_ids=inputs["input_ids"], use_cache=False, **given).last_hidden_state
            hidden_BTD = inputs["hidden_states"].to(dtype)
            token = _entering.set(hidden_BTD)
            try:
                # The model sees the tensor for its shape and dtype alone; `_Entry` brings the one with a gradient.
                return base(inputs_embeds=hidden_BTD.detach(), use_cache=False, **given).last_hidden_state
            finally:
                _entering.reset(token)

    def _loss_sum(self, hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """Sum of cross entropies in fp32 or wider; logits exist for one chunk of tokens at a time."""
        assert self.head is not None
        weight, bias = self.head.weight, self.head.bias
        chunk = max(1, self.max_logit_elements // weight.shape[0])
        if len(labels_N) <= chunk:
            return self._chunk_loss(hidden_ND, weight, bias, labels_N)
        # The weight is an argument: the recomputation runs when `functional_call` has put the old ones back.
        parts = [
            checkpoint(self._chunk_loss, hidden, weight, bias, labels, use_reentrant=False, preserve_rng_state=False)
            for hidden, labels in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True)
        ]
        return torch.stack(parts).sum()

    def _chunk_loss(
        self, hidden_ND: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels_N: torch.Tensor
    ) -> torch.Tensor:
        logits_NV = self._scaled(F.linear(hidden_ND, weight, bias))
        wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        return F.cross_entropy(wide_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """What some families do to logits after the head."""
        divisor = getattr(self._logits_config, "logits_scaling", None)
        if divisor is not None:  # granite
            logits = logits / divisor
        cap = getattr(self._logits_config, "final_logit_softcapping", None)
        if cap is not None:  # gemma
            logits = torch.tanh(logits / cap) * cap
        return logits


#: Positions are the model's own 0, 1, 2, ... in this call.
_own_positions: ContextVar[bool] = ContextVar("own_positions", default=False)
_find_packed = masking_utils.find_packed_sequence_indices


def _find_packed_unless_known(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Whether samples are packed is read off the positions, and a GPU is waited for: not where the answer is known."""
    return None if _own_positions.get() else _find_packed(position_ids)


masking_utils.find_packed_sequence_indices = _find_packed_unless_known

#: The tensor that enters the stage in this call, for its `_Entry`.
_entering: ContextVar[torch.Tensor] = ContextVar("entering")


class _PassThrough(torch.nn.Module):
    """Stands in the place of another stage's layer; keeps what the forward may ask of it (attention type)."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and name not in self.__dict__:
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class _Entry(_PassThrough):
    """Stands right before the stage's first layer and gives it the stage's input.

    Not what the model made of `inputs_embeds`: some families scale it (granite, gemma).
    """

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return _entering.get()


class _Fp64(TorchFunctionMode):
    """Makes every cast to fp32 in the model's code (norms, softmax, rotary angles) a cast to fp64.

    fp64 exists to make a difference unmistakable. With the casts to fp32, another order of summation tips roundings:
    after 20 steps of llama-tiny, micro-batches of 8 and of 64 differ by 4e-10 in the loss, without them by 3e-16; the
    gradients of a CPU and a GPU (H100) differ by 4e-8 of their norm, without them by 3e-15.
    """

    _CASTS = (torch.Tensor.to, F.softmax, torch.softmax, torch.Tensor.softmax)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in self._CASTS:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _config_of(options: Mapping[str, Any], run: RunConfig) -> PreTrainedConfig:
    """Validate `options` into the configuration of a Hugging Face model."""
    fields = dict(options)
    model_type = fields.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"model_options.model_type {model_type!r} is none of {', '.join(MODEL_TYPES)}")
    attention = fields.pop("attn_implementation", "sdpa")
    if attention not in ("sdpa", "eager"):
        raise ConfigError(f"model_options.attn_implementation {attention!r} is none of sdpa, eager")
    config_class: Any = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(config_class).parameters) | set(getattr(config_class, "__dataclass_fields__", ()))
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ConfigError(f"model_options.{unknown[0]}: the {model_type} configuration has no such field")
    fields.setdefault("max_position_embeddings", max(2048, run.sequence_length))
    try:
        config = config_class(**fields, attn_implementation=attention)
    except Exception as error:  # transformers raises several kinds for a field of the wrong type or value
        text = " ".join(str(error).split())
        raise ConfigError(f"model_options: {text[:300]}") from None
    if config.max_position_embeddings < run.sequence_length:
        raise ConfigError(
            f"sequence_length {run.sequence_length} is over the model's "
            f"max_position_embeddings {config.max_position_embeddings}"
        )
    if getattr(config, "attention_dropout", 0):
        raise ConfigError("model_options.attention_dropout: dropout inside attention cannot be repeated; use 0")
    return config
