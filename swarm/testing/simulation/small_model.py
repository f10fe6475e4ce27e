"""A model, data and a configuration so small that a whole run takes a moment, and the plain PyTorch loop over them.

`one_process` is what promise 2 compares with. Knows no swarm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarm.base.config import RunConfig
from swarm.base.ids import Ticket
from swarm.peer.trainer.reports import FeedLike
from swarm.policy.schedule import learning_rate
from swarm.stage.module import Tensors, Tie
from swarm.testing.simulation.reference_lamb import ReferenceLamb

WIDTH = 6
CLASSES = 4


class SmallStage(torch.nn.Module):
    """Linear + tanh; the last stage classifies and sums the cross entropy over the rows that count.

    If tied, the last stage first applies a copy of the first one's weight.
    """

    def __init__(self, stage: int, num_stages: int, dtype: torch.dtype, *, tied: bool = False) -> None:
        super().__init__()
        last = stage == num_stages - 1
        layer = torch.nn.Linear(WIDTH, CLASSES if last else WIDTH, dtype=dtype)
        generator = torch.Generator().manual_seed(1000 + stage)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.4
        self.last = last
        setattr(self, f"layer{stage}", layer)
        self._layer_name = f"layer{stage}"
        if tied and last:
            self.copy = torch.nn.Parameter(SmallStage(0, num_stages, dtype).layer.weight.detach().clone())
        self.tied = tied and last

    @property
    def layer(self) -> torch.nn.Linear:
        """The linear layer, whose name in the state dict holds the stage's number."""
        layer = getattr(self, self._layer_name)
        assert isinstance(layer, torch.nn.Linear)
        return layer

    def share(self, first: SmallStage) -> None:
        """Use the first stage's own weight in place of a copy, as one process does."""
        weight = first.layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        self.copy = weight

    def forward(self, inputs: Tensors, labels: Tensors | None) -> Tensors:
        """The boundary `x` [B, WIDTH], or at the last stage the sum of losses and the number of tokens."""
        layer = self.layer
        x = inputs["x"].to(layer.weight.dtype)
        x = layer(torch.tanh(x @ self.copy.T) if self.tied else x)
        if not self.last:
            return {"x": torch.tanh(x)}
        assert labels is not None
        target = labels["y"]
        loss = torch.nn.functional.cross_entropy(x, target, reduction="sum", ignore_index=-100)
        return {"loss_sum": loss, "tokens": (target != -100).sum()}


@dataclass
class SmallFactory:
    """Builds the stages of the small model; each with `padding` parameters that nothing uses, to make averages larger."""

    num_stages: int
    dtype: torch.dtype = torch.float64
    tied: bool = False
    padding: int = 0

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The first layer's weight and its copy in the last stage, if the model is tied."""
        return (Tie(((0, "layer0.weight"), (self.num_stages - 1, "copy"))),) if self.tied else ()

    def build(self, stage: int) -> torch.nn.Module:
        """The module of one stage."""
        module = SmallStage(stage, self.num_stages, self.dtype, tied=self.tied)
        if self.padding:
            module.padding = torch.nn.Parameter(torch.zeros(self.padding, dtype=self.dtype))
        return module


@dataclass
class _Batch:
    inputs: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


@dataclass
class SmallFeed:
    """Samples drawn from the ticket alone; rows are masked at random, so tickets hold different numbers of tokens."""

    config: RunConfig
    data_digest: str = ""

    def batch(self, ticket: Ticket) -> _Batch:
        """The samples of one ticket."""
        rng = np.random.default_rng([self.config.seed, ticket.step, ticket.index])
        size = self.config.micro_batch_size
        x = rng.standard_normal((size, WIDTH))
        y = rng.integers(0, CLASSES, size)
        y[1:][rng.random(size - 1) < 0.3] = -100
        dtype = np.float64 if self.config.precision == "fp64" else np.float32
        return _Batch({"x": x.astype(dtype)}, {"y": y})

    def eval_batches(self) -> list[_Batch]:
        """The samples of an evaluation."""
        return [self.batch(Ticket(10**6, index)) for index in range(self.config.eval_tickets)]


def small_config(**changes: object) -> RunConfig:
    """The configuration of a run of the small model; `changes` replace its fields."""
    base: dict[str, object] = {
        "num_stages": 3,
        "micro_batch_size": 4,
        "target_batch_size": 32,
        "total_steps": 4,
        "precision": "fp64",
        "compression": "none",
        "warmup_steps": 2,
        "learning_rate": 0.05,
        "eval_samples": 0,
        "checkpoint_every": 0,
        "max_grad_norm": 0.3,
    }
    return RunConfig(**{**base, **changes})


@dataclass
class PlainResult:
    """What one plain process came to."""

    losses: list[float]
    parameters: torch.Tensor
    #: What `clip_grad_norm_` returned.
    grad_norms: list[float]


def add_gradients(
    stages: Sequence[torch.nn.Module], feed: FeedLike, config: RunConfig, step: int, indexes: Iterable[int] | None = None
) -> tuple[float, int]:
    """Sums over a step's tickets (all, or those of `indexes`): of gradients into `stages`, of loss and tokens as the result."""
    loss_sum, tokens = 0.0, 0
    for index in range(config.tickets_per_step) if indexes is None else indexes:
        batch = feed.batch(Ticket(step, index))
        boundary: Tensors = {n: torch.from_numpy(a) for n, a in batch.inputs.items()}
        labels = {n: torch.from_numpy(a) for n, a in batch.labels.items()}
        for stage in stages:
            boundary = stage(boundary, labels if stage is stages[-1] else None)
        boundary["loss_sum"].backward()
        loss_sum += float(boundary["loss_sum"].detach())
        tokens += int(boundary["tokens"])
    return loss_sum, tokens


def plain_optimizer(config: RunConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The slow twin of the run's optimizer, all of whose parameters decay."""
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    if config.optimizer == "lamb":
        return ReferenceLamb(parameters, lr=config.learning_rate, betas=betas, eps=config.epsilon, weight_decay=decay)
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=betas, eps=config.epsilon, weight_decay=decay, foreach=False
    )


def one_process(config: RunConfig, *, feed: SmallFeed | None = None, skip: Collection[int] = ()) -> PlainResult:
    """The same training in one plain PyTorch process: torch's own AdamW, or LAMB, and clip_grad_norm_, one whole model.

    As with a GradScaler a step whose gradient is not finite is skipped, and so are the steps of `skip`.
    """
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    tied = bool(config.model_options.get("tied"))
    stages = [SmallStage(k, config.num_stages, dtype, tied=tied) for k in range(config.num_stages)]
    if tied:
        stages[-1].share(stages[0])
    parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    optimizer = plain_optimizer(config, parameters)
    feed = feed or SmallFeed(config)
    losses, grad_norms = [], []
    history: list[list[torch.Tensor]] = []
    for step in range(config.total_steps):
        history.append([p.detach().clone() for p in parameters])
        with torch.no_grad():
            current = [p.detach().clone() for p in parameters]
            for p, old in zip(parameters, history[config.base_step(step)], strict=True):
                p.copy_(old)
        optimizer.zero_grad()
        loss_sum, tokens = add_gradients(stages, feed, config, step)
        with torch.no_grad():
            for p, now in zip(parameters, current, strict=True):
                p.copy_(now)
        for p in parameters:
            assert p.grad is not None
            p.grad /= tokens
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        if math.isfinite(norm) and step not in skip:
            optimizer.step()
        losses.append(loss_sum / tokens)
        grad_norms.append(norm)
    everything = torch.cat([p.detach().reshape(-1) for stage in stages for p in stage.parameters()])  # copies too
    return PlainResult(losses, everything, grad_norms)
