"""The loop that a swarm is compared with: one process, the whole model, forward + backward + AdamW, nothing else.

Same model, initial values, data order, batch, clipping and schedule as the run that the configuration names, so its
losses are those of the synchronous swarm without compression. Appends the same JSON line per step to `--metrics`, with
`eval_loss` where the run would evaluate.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from launch.processes.devices import resolve_device
from launch.run.models import weights_for
from models.registry import factory_of
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.ids import Ticket
from swarm.feed.feed import Batch, Feed, open_feed
from swarm.policy.schedule import learning_rate
from swarm.stage.optimizers.decay import has_decay, norm_parameters


def train(
    config: RunConfig,
    metrics: Path,
    device: str,
    *,
    data: str | None = None,
    start: str | None = None,
    export: Path | None = None,
) -> None:
    """Run `config.total_steps` steps in fp32.

    Args:
        config: of the run that is compared; cut into whatever number of stages.
        metrics: gets a line per step.
        device: to compute on.
        data: the run's data, None for the built-in text.
        start: directory with the model's initial values, where no seed makes them.
        export: directory to write the trained model to.
    """
    feed = open_feed(config, data, None, None)
    whole = config.model_copy(update={"num_stages": 1})
    factory: Any = factory_of(whole, source=weights_for(whole, start))
    model = factory.build(0).to(device)
    optimizer = adamw(config, model)
    with metrics.open("a", buffering=1) as lines:
        for step in range(config.total_steps):
            began = time.monotonic()
            loss, tokens = one_step(config, feed, model, optimizer, step)
            seconds = time.monotonic() - began
            line = {"step": step + 1, "loss": loss, "tokens": tokens, "tokens_per_s": tokens / seconds, "seconds": seconds}
            if evaluates(config, step):
                line["eval_loss"] = evaluated(feed, model)
            lines.write(json.dumps(line) + "\n")
    if export is not None:
        factory.save_pretrained({name: p.detach().cpu() for name, p in model.named_parameters()}, export)


def adamw(config: RunConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        decay_groups(config, model), lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
    )


def decay_groups(config: RunConfig, model: torch.nn.Module) -> list[dict[str, object]]:
    """What is trained, with the weight decay that the run has for it."""
    norms = norm_parameters(model)
    groups: dict[bool, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(has_decay(name, norms, config.no_decay), []).append(parameter)
    return [{"params": params, "weight_decay": config.weight_decay * decays} for decays, params in groups.items()]


def one_step(config, feed, model, optimizer, step: int) -> tuple[float, int]:
    """One optimizer step; returns the mean loss and the number of tokens."""
    loss_sum, tokens = 0.0, 0
    for index in range(config.tickets_per_step):
        outputs = forward(model, feed.batch(Ticket(step, index)))
        outputs["loss_sum"].backward()
        loss_sum += float(outputs["loss_sum"].detach())
        tokens += int(outputs["tokens"])
    for parameter in model.parameters():
        parameter.grad.div_(tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum / tokens, tokens


def forward(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    inputs, labels = ({n: torch.from_numpy(a).to(device) for n, a in part.items()} for part in (batch.inputs, batch.labels))
    return model(inputs, labels)


def evaluates(config: RunConfig, step: int) -> bool:
    """Whether the run would evaluate after `step`."""
    is_due = config.eval_every > 0 and (step + 1) % config.eval_every == 0
    return config.eval_samples > 0 and (is_due or step + 1 == config.total_steps)


def evaluated(feed: Feed, model: torch.nn.Module) -> float:
    """Mean loss per token on the held-out samples."""
    model.eval()
    with torch.no_grad():
        outputs = [forward(model, batch) for batch in feed.eval_batches()]
    model.train()
    return sum(float(x["loss_sum"]) for x in outputs) / sum(int(x["tokens"]) for x in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run's configuration, as JSON")
    parser.add_argument("--metrics", type=Path, required=True, help="file to append a line per step to")
    parser.add_argument("--threads", type=int, required=True, help="threads that torch computes with")
    parser.add_argument("--device", default="cpu", help="to compute on, or auto (default: cpu)")
    parser.add_argument("--data", metavar="PATH", help="the run's data (default: the built-in text)")
    parser.add_argument("--model", metavar="DIR", help="initial values, where no seed makes them")
    parser.add_argument("--export", metavar="DIR", type=Path, help="write the trained model there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(
        parse_config_bytes(options.run.read_bytes()),
        options.metrics,
        resolve_device(options.device),
        data=options.data,
        start=options.model,
        export=options.export,
    )


if __name__ == "__main__":
    main()
