"""What a swarm on GPUs is compared with, over the same stage modules: one process, and NCCL pipelining.

`plain`: one process, one GPU, all layers; forward and backward of one micro-batch after another.
`nccl`: `torch.distributed.pipelining` Schedule1F1B, one process a GPU; started once for each rank.
Parameters and gradient sums are in the precision of the run; there is no optimizer step. Prints a JSON list of tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.causal_lm import CausalLMFactory
from models.cut import CausalLMStage
from models.registry import factory_of
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.stage.compute import PRECISION_DTYPES

WARMUP = 8


def stage_on(
    factory: CausalLMFactory, span: range | None, device: torch.device, dtype: torch.dtype, *, compile: bool = False
) -> CausalLMStage:
    """Layers `span` with random values drawn on the device: which values does not matter for speed."""
    skeleton = factory.skeleton()
    stage = CausalLMStage(skeleton, span).to_empty(device=device)
    with torch.no_grad():
        stage.apply(skeleton._init_weights)
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(dtype)
    for block in stage.blocks if compile else ():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return stage.train()


def tokens_like(config: RunConfig, num: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (num * config.micro_batch_size, config.sequence_length), device=device)


def plain(config: RunConfig, factory: CausalLMFactory, options: argparse.Namespace) -> list[float]:
    device = torch.device("cuda:0")
    model = stage_on(factory, None, device, PRECISION_DTYPES[config.precision], compile=options.compile)
    ids = tokens_like(config, 1, device)

    def run(num: int) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(num):
            model({"input_ids": ids}, {"labels": ids})["loss_sum"].backward()
        torch.cuda.synchronize()
        return num * ids.numel() / (time.monotonic() - began)

    run(WARMUP)
    return [run(options.micro_batches) for _ in range(options.repetitions)]


class _StagePart(torch.nn.Module):
    """A stage as `torch.distributed.pipelining` wants it: a tensor in, a tensor out; the loss comes after."""

    def __init__(self, stage: CausalLMStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage.hidden_states({"input_ids" if self.stage.is_first else "hidden_states": x})

    def loss(self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        assert self.stage.tail is not None
        return self.stage.tail.loss_sum(hidden_BTD.flatten(0, 1), labels_BT.reshape(-1))


def nccl(config: RunConfig, factory: CausalLMFactory, options: argparse.Namespace) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    dtype, micro_batches = PRECISION_DTYPES[config.precision], options.micro_batches
    part = _StagePart(stage_on(factory, factory.spans[rank], device, dtype, compile=options.compile))
    stage = PipelineStage(part, rank, size, device)

    def run(schedule: Any, num: int) -> float:
        ids = tokens_like(config, num, device)
        dist.barrier()
        torch.cuda.synchronize()
        began = time.monotonic()
        if rank == 0:
            schedule.step(ids)
        elif rank == size - 1:
            schedule.step(target=ids, return_outputs=False)
        else:
            schedule.step()
        torch.cuda.synchronize()
        dist.barrier()
        return ids.numel() / (time.monotonic() - began)

    schedule = Schedule1F1B(stage, micro_batches, loss_fn=part.loss, scale_grads=False)
    run(schedule, micro_batches)
    rates = [run(schedule, micro_batches) for _ in range(options.repetitions)]
    dist.destroy_process_group()
    return rates if rank == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plain", "nccl"))
    parser.add_argument("--run", type=Path, required=True, help="a run's configuration, as JSON")
    parser.add_argument("--micro-batches", type=int, required=True, help="micro-batches per repetition")
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers")
    options = parser.parse_args()
    config = parse_config_bytes(options.run.read_bytes())
    factory = factory_of(config)
    assert isinstance(factory, CausalLMFactory)
    measure = {"plain": plain, "nccl": nccl}[options.kind]
    rates = measure(config, factory, options)
    if rates:
        print(json.dumps(rates))


if __name__ == "__main__":
    main()
