"""LAMB as the paper writes it (arXiv 1904.00962, algorithm 2), tensor by tensor: what `--optimizer lamb` is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class ReferenceLamb(torch.optim.Optimizer):
    """The slow twin of `swarm.stage.optimizers.lamb`."""

    def __init__(
        self, params: Iterable[Any], *, betas: tuple[float, float], eps: float, lr: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))
                state["step"] += 1
                state["first"] = beta1 * state["first"] + (1 - beta1) * parameter.grad
                state["second"] = beta2 * state["second"] + (1 - beta2) * parameter.grad**2
                first = state["first"] / (1 - beta1 ** state["step"])
                second = state["second"] / (1 - beta2 ** state["step"])
                direction = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                own, way = float(parameter.norm()), float(direction.norm())
                trust = own / way if own > 0 and way > 0 else 1.0
                parameter -= group["lr"] * trust * direction
