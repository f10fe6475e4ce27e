"""Frozen linear layers whose weight is kept in 8 or 4 bits (QLoRA, arXiv 2305.14314), coded by bitsandbytes. Owns the code;
must not know models.

The weight is decoded for each use and never saved for the backward, so an autograd graph holds no copy of it. 4 bits (NF4) need a
CUDA device; 8 bits (blockwise dynamic) do without.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from functools import cache
from typing import Any, Literal

import torch

from swarm.base.errors import ConfigError

Bits = Literal[4, 8]
#: Elements that share a scale.
_BLOCK = {8: 256, 4: 64}


class QuantizedLinear(torch.nn.Linear):
    """As `linear`, which has no memory yet; `take` gives it its weight.

    Its parameters are `codes` (uint8) and `scales` (fp32 numbers kept as int32, so that no cast of the model's precision
    touches them), and the bias, if there is one.
    """

    def __init__(self, linear: torch.nn.Linear, bits: Bits) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        del self.weight
        self._bits = bits
        self._size = linear.in_features * linear.out_features
        if self._size % 2:
            raise ConfigError(f"lora.bits: a layer of {linear.out_features} x {linear.in_features} is not supported")
        self.bias = linear.bias
        num_scales = math.ceil(self._size / _BLOCK[bits])
        self.codes = _frozen(torch.empty(self._size * bits // 8, dtype=torch.uint8, device="meta"))
        self.scales = _frozen(torch.empty(num_scales, dtype=torch.int32, device="meta"))

    @staticmethod
    def encode(weight: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
        """`codes` and `scales` of a weight.

        Raises:
            ConfigError: 4 bits without a CUDA device.
        """
        functional = bitsandbytes_functional()
        if bits == 8:
            codes, state = functional.quantize_blockwise(weight.float().reshape(-1), blocksize=_BLOCK[8])
            return codes, state.absmax.float().view(torch.int32)
        if not weight.is_cuda:
            raise ConfigError("lora.bits 4: needs a CUDA device; use bits=8 on a CPU")
        codes, state = functional.quantize_4bit(weight.float(), blocksize=_BLOCK[4], quant_type="nf4")
        return codes.reshape(-1), state.absmax.float().view(torch.int32)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out, in]."""
        functional = bitsandbytes_functional()
        scales, shape = self.scales.view(torch.float32), (self.out_features, self.in_features)
        if self._bits == 8:
            flat = functional.dequantize_blockwise(self.codes, absmax=scales, blocksize=_BLOCK[8])
            return flat.view(shape).to(dtype)
        state = functional.QuantState(
            absmax=scales,
            shape=torch.Size(shape),
            code=_nf4(self.codes.device),
            blocksize=_BLOCK[4],
            quant_type="nf4",
            dtype=dtype if dtype != torch.float64 else torch.float32,
        )
        return functional.dequantize_4bit(self.codes.view(-1, 1), state).view(shape).to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As a linear layer with the decoded weight."""
        output = _Matmul.apply(input, self)
        return output if self.bias is None else output + self.bias


class _Matmul(torch.autograd.Function):
    """`input @ weight.T` with a weight that is decoded in the forward and once more in the backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(input, layer.decoded(input.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.decoded(gradient.dtype), None


def _nf4(device: torch.device) -> torch.Tensor:
    return bitsandbytes_functional().get_4bit_type("nf4", device=str(device))


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


@cache
def bitsandbytes_functional() -> Any:
    """`bitsandbytes.functional`, imported at first use and in silence.

    On some processors its import looks for a package named `kernels`, which fetches code from a hub when it is
    installed, and warns when it is not. Neither is wanted. It also wraps fallback kernels, which nothing here calls, in
    `torch.compile`, whose machinery takes 0.9 s of CPU to load; it does without where that fails.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, hide = log.level, "kernels" not in sys.modules
    log.setLevel(logging.ERROR)
    compile_, torch.compile = torch.compile, _refuse_to_compile
    if hide:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # makes `import kernels` an ImportError
    try:
        return importlib.import_module("bitsandbytes.functional")
    finally:
        log.setLevel(level)
        torch.compile = compile_
        if hide:
            del sys.modules["kernels"]


def _refuse_to_compile(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not compiled: only the fallback kernels of bitsandbytes would be")
