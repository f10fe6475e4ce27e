"""One stage of a Hugging Face causal LM as a module. Owns the cut and the call; must not know configurations, values of
parameters, files or the swarm.

A stage is the model's own code over a part of its layers: the layer list keeps its full length (so that whatever is
looked up by layer number stays right), and stand-ins take the places of what other stages have. Nothing of another
stage is ever allocated. Parameter names are exactly those of the Hugging Face `state_dict`, in every cut.

Shapes: B batch, T tokens of a sample, D hidden size, N = B * T, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from models.anatomy import anatomy_of
from models.boundary import (
    HANDED_ON,
    HIDDEN,
    Absent,
    BoundaryEntry,
    Crossing,
    PassThrough,
    carry_per_layer_inputs,
    crossing,
    leave_after,
)
from models.compressors import Compression
from models.loss import IGNORED_LABEL, LossHead, balancing_of, precise
from models.masks import change_masks, samples_of
from swarm.base.errors import ConfigError
from swarm.stage.module import Tensors

#: Fields of a configuration that make its model draw random numbers in training.
_DRAWS = re.compile(r"^(?!classifier|summary).*(drop|jitter)")


class CausalLMStage(torch.nn.Module):
    """Layers `span` of `lm`; the first stage has the embedding, the last one the final norm, the head and the loss.

    Called as `stage(inputs, labels)`:

    * `inputs`: `input_ids` int64 [B, T] at the first stage, else the boundary of the stage before (see `boundary.py`;
      floating tensors are cast to the parameters' dtype); optionally `attention_mask` and `position_ids` [B, T].
    * `labels`: at the last stage `labels` int64 [B, T], already shifted: `labels[t]` is the token after t, or -100.

    Args:
        lm: the whole model, usually without memory. It is taken apart.
        span: numbers of the stage's layers; all of them if not given.
        compression: of hidden states after some layers.

    Raises:
        ConfigError: if the model cannot be cut.
    """

    def __init__(self, lm: PreTrainedModel, span: range | None = None, *, compression: Compression | None = None) -> None:
        super().__init__()
        change_masks()
        anatomy = anatomy_of(lm)
        base = lm.get_submodule(anatomy.base)
        layers: Any = getattr(base, anatomy.layers)
        self.anatomy = anatomy
        self.num_layers = len(layers)
        self.span = span = range(self.num_layers) if span is None else span
        self.is_first = span.start == 0
        self.is_last = span.stop == self.num_layers
        self.balancing = balancing_of(lm)
        self._entering_size = int(getattr(lm.config, "hidden_size", 0))
        self._num_streams = int(getattr(lm.config, "altup_num_inputs", 1))
        self.reads_tokens = "input_ids" in inspect.signature(layers[span.start].forward).parameters
        for number in range(self.num_layers):
            if number not in span:
                layers[number] = (BoundaryEntry if number == span.start - 1 else PassThrough)(layers[number], anatomy)
        if any(value for name, value in vars(lm.config).items() if _DRAWS.match(name)):
            for module in (*(layers[number] for number in span), *(getattr(base, name) for name in anatomy.first)):
                module.draws_at_random = True  # families call dropout as a function: the engine cannot see it there
        for name in (() if self.is_first else anatomy.first) + (() if self.is_last else anatomy.last):
            setattr(base, name, _absent(getattr(base, name)))
        carry_per_layer_inputs(base, span, self.num_layers)
        if not self.is_last:
            leave_after(layers[span.stop - 1], anatomy)
        root = anatomy.base.split(".")[0]
        self.add_module(root, getattr(lm, root))
        self.tail: LossHead | None = None
        if self.is_last:
            for name, child in lm.named_children():
                if name != root:
                    self.add_module(name, child)
            self.tail = LossHead(lm, root)
        self._narrow: str | None = None
        self._widen: str | None = None
        if compression is not None:
            self._compress(compression, layers)

    def _compress(self, compression: Compression, layers: Any) -> None:
        """Compressors, by the number of the layer that they come after: whole inside the stage, half at its ends."""
        with torch.device("meta"):
            self.compressors = torch.nn.ModuleDict()
            for number in sorted(compression.after):
                parts = torch.nn.ModuleDict()
                if number in self.span:
                    parts["down"] = compression.down()
                if number + 1 in self.span:
                    parts["up"] = compression.up()
                if len(parts) == 2:
                    layers[number].register_forward_hook(_Compressed(self, number))
                elif "down" in parts:
                    self._narrow = f"compressors.{number}.down"
                elif "up" in parts:
                    self._widen, self._entering_size = f"compressors.{number}.up", compression.width
                if parts:
                    self.compressors[str(number)] = parts

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """This stage's own layers: what `torch.compile` is used on."""
        layers = getattr(self.get_submodule(self.anatomy.base), self.anatomy.layers)
        return [layers[number] for number in self.span]

    def example(self, num_samples: int, sequence_length: int) -> tuple[Tensors, Tensors | None]:
        """Inputs and labels of the usual shapes.

        Raises:
            ConfigError: this family hands more than hidden states to the next stage.
        """
        anatomy = self.anatomy
        more = anatomy.streams is not None or anatomy.shared is not None or any(anatomy.returns or ())
        if more or self.reads_tokens or self.balancing is not None:
            raise ConfigError("--compile: stages of this model hand on more than hidden states; it runs without --compile")
        ids = torch.zeros(num_samples, sequence_length, dtype=torch.int64)
        hidden = torch.zeros(*ids.shape, self._entering_size)
        return {"input_ids": ids} if self.is_first else {HIDDEN: hidden}, {"labels": ids} if self.is_last else None

    def largest_inputs(self, num_samples: int, sequence_length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what enters and has not the samples as its first dimension: routers' sums, and streams that come first."""
        largest: dict[str, tuple[int, ...]] = {}
        if self.balancing is not None:
            largest |= dict.fromkeys(("router_counts", "router_sums"), (self.balancing.num_experts,))
        if self.anatomy.streams == 0:
            largest[HIDDEN] = (self._num_streams, num_samples, sequence_length, self._entering_size)
        return largest

    def forward(self, inputs: Tensors, labels: Tensors | None = None) -> Tensors:
        """Compute the stage: what the next one gets, or the sum of losses and the number of tokens."""
        current = self._crossing(inputs)
        hidden_BTD, router_logits = self._run(current)
        sums: Tensors = {}
        if self.balancing is not None:
            with precise(current.dtype):
                sums = self.balancing.add(inputs, router_logits, inputs.get("attention_mask"))  # in fp32, as they came
        if self.tail is None:
            handed_on = {name: inputs[name] for name in (*HANDED_ON, *(["input_ids"] * self.reads_tokens)) if name in inputs}
            return current.leaving | sums | handed_on
        if labels is None:
            raise ValueError("the last stage needs labels")
        labels_N = labels["labels"].reshape(-1)
        loss_sum = self.tail.loss_sum(hidden_BTD.flatten(0, 1), labels_N)
        tokens = (labels_N != IGNORED_LABEL).sum()
        if self.balancing is not None:
            loss_sum = loss_sum + tokens * self.balancing.loss(sums)
        return {"loss_sum": loss_sum, "tokens": tokens}

    def logits(self, inputs: Tensors) -> torch.Tensor:
        """Logits [B, T, V] of the last stage."""
        assert self.tail is not None, "only the last stage has logits"
        hidden_BTD = self.hidden_states(inputs)
        return self.tail.logits(hidden_BTD.flatten(0, 1)).unflatten(0, hidden_BTD.shape[:2])

    def hidden_states(self, inputs: Tensors) -> torch.Tensor:
        """What this stage's last layer (and, at the end, the final norm) gives, in the parameters' dtype."""
        return self._run(self._crossing(inputs))[0]

    def _crossing(self, inputs: Tensors) -> Crossing:
        # Of this call: the engine swaps parameters. Quantised ones are whole numbers.
        dtype = next(p.dtype for p in self.parameters() if p.is_floating_point())
        return Crossing(inputs, dtype, self.anatomy)

    def _run(self, current: Crossing) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Hidden states, and the router logits of this stage's layers where the loss needs them."""
        base: Any = self.get_submodule(self.anatomy.base)
        entering = current.entering
        if self._widen is not None:
            entering[HIDDEN] = self.get_submodule(self._widen)(entering[HIDDEN])
        options: dict[str, Any] = {name: entering[name] for name in HANDED_ON if name in entering}
        if self.balancing is not None:
            options["output_router_logits"] = True
        if self.is_first or self.reads_tokens:
            options["input_ids"] = entering["input_ids"]
        else:
            # The model sees the tensor for its shape and dtype alone; `BoundaryEntry` brings the one with a gradient.
            options["inputs_embeds"] = current.placeholder()
        token = crossing.set(current)
        # A mask from outside says itself what is looked at.
        samples = None if "attention_mask" in entering else entering.get("position_ids")
        try:
            with precise(current.dtype), samples_of(samples):
                output = base(use_cache=False, **options)
        finally:
            crossing.reset(token)
        if self._narrow is not None:
            current.leaving[HIDDEN] = self.get_submodule(self._narrow)(current.leaving[HIDDEN])
        hidden = output.last_hidden_state if self.is_last else current.leaving[HIDDEN]
        return hidden, (output.router_logits or ()) if self.balancing is not None else ()


class _Compressed:
    """A hook on a layer inside a stage: narrows what it returned, and widens it again."""

    def __init__(self, stage: CausalLMStage, number: int) -> None:
        self._stage = weakref.ref(stage)  # a layer must not hold the stage that holds it
        self._number = str(number)

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        stage = self._stage()
        assert stage is not None
        parts: Any = stage.compressors[self._number]
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        compressed = parts["up"](parts["down"](hidden))
        return (compressed, *rest) if isinstance(output, tuple) else compressed


def _absent(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleList(Absent() for _ in module) if isinstance(module, torch.nn.ModuleList) else Absent()
