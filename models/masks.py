"""Which tokens a token may look at, where several samples share a row. Owns what is changed in transformers' masks; must
not know models, stages or where samples come from.

Positions that start again say where a sample begins. transformers reads that off them in its masks, but only in families
that hand it the positions; here every mask that transformers makes for a stage keeps the samples apart, in every family.
What looks back by other ways than a mask (recurrent states, convolutions, compressed keys) is not reached by this:
`packing.py` says where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from transformers import masking_utils

#: Attention implementations whose masks are kept apart: those that a run may name.
IMPLEMENTATIONS = ("sdpa", "eager")


class _Samples:
    """The samples of one call."""

    def __init__(self, position_ids: torch.Tensor | None) -> None:
        self._positions_BT = position_ids
        self._numbers_BT: torch.Tensor | None = None
        self._looked = False

    def apart(self, mask_function: Callable[..., Any], num_keys: int) -> Callable[..., Any] | None:
        """`mask_function` inside each sample and nothing across, or None if each row is one sample."""
        positions_BT = self._positions_BT
        if positions_BT is None or num_keys != positions_BT.shape[1]:
            return None
        if not self._looked:  # once a call: a GPU is waited for
            self._numbers_BT, self._looked = _find_packed(positions_BT), True
        numbers_BT = self._numbers_BT
        if numbers_BT is None:
            return None

        def inside(row: Any, head: Any, query: Any, key: Any) -> Any:
            own = mask_function(row, head, positions_BT[row, query], positions_BT[row, key])
            return own & (numbers_BT[row, query] == numbers_BT[row, key])

        return inside


_samples: ContextVar[_Samples | None] = ContextVar("samples", default=None)


@contextmanager
def samples_of(position_ids: torch.Tensor | None) -> Iterator[None]:
    """Masks that are made in this block keep apart the samples that `position_ids` [B, T] tell; None: a row is a sample."""
    token = _samples.set(_Samples(position_ids))
    try:
        yield
    finally:
        _samples.reset(token)


_find_packed = masking_utils.find_packed_sequence_indices


def _find_packed_elsewhere(position_ids: torch.Tensor) -> torch.Tensor | None:
    """transformers' own way, outside a stage's call: inside, the samples are known, and a GPU would be waited for."""
    return _find_packed(position_ids) if _samples.get() is None else None


def _keeping_apart(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        samples = _samples.get()
        if samples is not None:
            mask_function = options.get("mask_function", masking_utils.causal_mask_function)
            apart = samples.apart(mask_function, options["kv_length"])
            if apart is not None:
                options |= {"mask_function": apart, "allow_is_causal_skip": False}
        return make_mask(**options)

    return make


_is_tracing = masking_utils.is_tracing


def _is_tracing_values(tensor: torch.Tensor | None = None) -> bool:
    """Whether values of `tensor` cannot be looked at. Without one there are none, also while a CUDA graph is recorded:
    transformers before 5.18 makes a mask then, with which attention is slower than without."""
    return (tensor is not None or torch.compiler.is_compiling()) and _is_tracing(tensor)


@cache
def change_masks() -> None:
    """Have transformers make its masks as this module says, from now on and in the whole process. Only the first call counts.

    Outside of `samples_of` they stay as they are, except that one without positions is not made while a CUDA graph is recorded.
    """
    masking_utils.find_packed_sequence_indices = _find_packed_elsewhere
    masking_utils.is_tracing = _is_tracing_values
    for name in IMPLEMENTATIONS:
        masking_utils.AttentionMaskInterface.register(name, _keeping_apart(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name]))
