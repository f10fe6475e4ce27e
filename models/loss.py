"""Logits and loss of the last stage, and the routers' balancing loss over all stages. Owns the loss's sums and its
memory bound; must not know layers or the swarm.

The engine adds up sums over tickets and divides once by the tokens of the step. A causal LM's loss is a mean over the
tokens of a micro-batch, so its sum is the sum of cross entropies. The balancing loss of mixtures of experts (Switch
Transformer, arXiv 2101.03961, section 2.2) is no sum over tokens: it multiplies two means over all rows (tokens times
layers) of a micro-batch. It enters the sum times the micro-batch's counted tokens: a step's loss is then the
token-weighted mean of what transformers computes for each micro-batch, whoever computed it.

Shapes: B batch, T tokens of a sample, D hidden size, N = B * T, V vocabulary, E experts.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from swarm.base.errors import ConfigError
from swarm.stage.module import Tensors

#: Logits of at most this many elements exist at a time (256 MiB in fp32). More are computed in chunks, and once more in
#: the backward: with 2,048 tokens and a vocabulary of 32,000 that would cost the last stage a twentieth of its time.
MAX_LOGIT_ELEMENTS = 2**26
IGNORED_LABEL = -100


class LossHead:
    """What the causal LM does after its base model, by its own forward: head, multipliers, caps.

    Args:
        lm: the model; its base is taken out of it.
        base_name: the attribute that holds the base.
    """

    def __init__(self, lm: PreTrainedModel, base_name: str) -> None:
        self.lm = lm
        self.max_logit_elements = MAX_LOGIT_ELEMENTS
        self._given = _Given()
        setattr(lm, base_name, self._given)
        takes = inspect.signature(inspect.unwrap(type(lm).forward)).parameters
        self._options = {"output_router_logits": False} if "output_router_logits" in takes else {}

    def logits(self, hidden_ND: torch.Tensor, parameters: Tensors | None = None) -> torch.Tensor:
        """Logits [N, V].

        Args:
            hidden_ND: what the final norm returned.
            parameters: of `lm`, by name; the module's present ones if not given.
        """
        hidden_1ND = self._given.hidden_states = hidden_ND.unsqueeze(0)
        options = {"inputs_embeds": hidden_1ND, "use_cache": False, **self._options}
        try:
            with precise(hidden_ND.dtype):
                output = self.lm(**options) if parameters is None else functional_call(self.lm, parameters, (), options)
        finally:
            self._given.hidden_states = None
        return output.logits[0]

    def loss_sum(self, hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """Sum of cross entropies in fp32 or wider; logits exist for one chunk of tokens at a time."""
        chunk = max(1, self.max_logit_elements // self.lm.config.vocab_size)
        if len(labels_N) <= chunk:
            return self._chunk_loss(hidden_ND, labels_N, None)
        # The parameters are arguments: the recomputation runs when the engine has put the old ones back.
        parameters = dict(self.lm.named_parameters())
        parts = [
            checkpoint(self._chunk_loss, hidden, labels, parameters, use_reentrant=False, preserve_rng_state=False)
            for hidden, labels in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True)
        ]
        return torch.stack(parts).sum()

    def _chunk_loss(self, hidden_ND: torch.Tensor, labels_N: torch.Tensor, parameters: Tensors | None) -> torch.Tensor:
        logits_NV = self.logits(hidden_ND, parameters)
        wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        return F.cross_entropy(wide_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")


class _Given(torch.nn.Module):
    """Stands for the base model and answers with given hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None

    @property
    def decoder(self) -> _Given:
        """Some bases keep their layers in a decoder, which their causal LM calls itself."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self.hidden_states)


class _Output:
    """A base model's output: hidden states and nothing else."""

    def __init__(self, last_hidden_state: torch.Tensor | None) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return (self.last_hidden_state,)[index]


class Balancing:
    """The routers' balancing loss of one model, from sums that each stage adds its layers' part to."""

    def __init__(self, lm: Any) -> None:
        self.num_experts: int = lm.num_experts
        self.num_chosen: int = lm.num_experts_per_tok
        self.coefficient: float = lm.router_aux_loss_coef

    def add(self, sums: Tensors, router_logits: tuple[torch.Tensor, ...], mask_BT: torch.Tensor | None) -> Tensors:
        """`sums` (empty at the first layer) and the rows of further layers.

        Args:
            sums: `router_counts` int64 [E], how often each expert was chosen, and `router_sums` [E], its summed
                probability.
            router_logits: [N, E] of each layer.
            mask_BT: rows of masked tokens do not count.
        """
        counts, probabilities = sums.get("router_counts"), sums.get("router_sums")
        for logits_NE in router_logits:
            weights_NE = F.softmax(logits_NE, dim=-1)
            chosen = weights_NE.topk(self.num_chosen, dim=-1).indices
            wide_NE = weights_NE if weights_NE.dtype == torch.float64 else weights_NE.float()
            ones = chosen.new_ones(chosen.shape)
            if mask_BT is not None:
                mask_N = mask_BT.reshape(-1)
                wide_NE = wide_NE * mask_N.unsqueeze(-1).to(wide_NE.dtype)
                ones = ones * mask_N.unsqueeze(-1).to(ones.dtype)
            own = chosen.new_zeros(self.num_experts).scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))
            counts = own if counts is None else counts + own
            probabilities = wide_NE.sum(0) if probabilities is None else probabilities + wide_NE.sum(0)
        return {} if counts is None or probabilities is None else {"router_counts": counts, "router_sums": probabilities}

    def loss(self, sums: Tensors) -> torch.Tensor | float:
        """The balancing loss of a micro-batch, times its coefficient."""
        if not sums:
            return 0.0
        counts, probabilities = sums["router_counts"], sums["router_sums"]
        rows = (counts.sum() / self.num_chosen).clamp(min=1)
        product = (counts / rows * (probabilities / rows)).sum()
        return self.coefficient * self.num_experts * product


def balancing_of(lm: PreTrainedModel) -> Balancing | None:
    """The balancing loss that the model's own forward adds, None if it adds none (as `output_router_logits` says).

    Raises:
        ConfigError: if it is of a kind that is not known here.
    """
    function = getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
    forward = inspect.unwrap(type(lm).forward)
    if function is None or function.__name__ not in forward.__code__.co_names:
        return None
    if not getattr(lm.config, "output_router_logits", False) or not getattr(lm.config, "is_moe", True):
        return None
    if list(inspect.signature(function).parameters) != ["gate_logits", "num_experts", "top_k", "attention_mask"]:
        raise ConfigError(
            f"model_options.output_router_logits: the balancing loss of {lm.config.model_type} is of its own kind, "
            "which cannot be cut into stages; set it to false"
        )
    return Balancing(lm)


def precise(dtype: torch.dtype) -> Any:
    """The context in which a model's code runs that computes in `dtype`."""
    return _Fp64() if dtype == torch.float64 else nullcontext()


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
