"""The layers that `wan.py` measures: their shapes, their configuration, and one stage of them alone in a loop on a card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from models.registry import factory_of
from swarm.base.config import TIMING_PRESETS, RunConfig, parse_config_bytes
from swarm.base.ids import MAX_TICKETS, Ticket
from swarm.lifecycle.commit_record import genesis_record
from swarm.stage.compute import StageCompute
from swarm.stage.versions import make_version


@dataclass(frozen=True)
class Shape:
    """One layer of 12 hidden^2 parameters, and the tokens of a micro-batch."""

    hidden: int
    ffn: int
    heads: int
    sequence: int
    micro_batch: int
    #: Hidden states are narrowed so many times at the boundary.
    bottleneck: int = 1

    @property
    def num_parameters(self) -> int:
        return self.hidden * (4 * self.hidden + 3 * self.ffn)

    @property
    def width(self) -> int:
        return self.hidden // self.bottleneck


SHAPES = {
    "base": Shape(768, 2048, 12, 512, 32),
    "xxlarge": Shape(4096, 10928, 32, 512, 8),
    "gpt3": Shape(12288, 32768, 96, 2048, 1),
    "gpt3-bottleneck": Shape(12288, 32768, 96, 2048, 1, bottleneck=2),
    "tiny": Shape(64, 128, 2, 32, 4),
}


def config_of(shape: Shape, precision: str) -> RunConfig:
    narrow = {"compressor": "bottleneck", "compressor_factor": shape.bottleneck} if shape.bottleneck > 1 else {}
    return RunConfig(
        name="wan",
        model="causal-lm",
        num_stages=2,
        sequence_length=shape.sequence,
        micro_batch_size=shape.micro_batch,
        model_options={
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": 2,
            "num_attention_heads": shape.heads,
            "vocab_size": 256,
            **narrow,
        },
        target_batch_size=shape.micro_batch * MAX_TICKETS,
        total_steps=10,
        eval_samples=0,
        checkpoint_every=0,
        precision=precision,
        compression="8bit",
        timing=TIMING_PRESETS["wan"] | {"genesis_quiet_s": 1.0},
    )


def alone(config_path: Path, device: str, seconds: float) -> float:
    """Tokens/s of the last stage's forward and backward in a loop on one device; runs in a process of its own."""
    config = parse_config_bytes(config_path.read_bytes())
    compute = StageCompute(factory_of(config), 1, precision=config.precision, seed=0, device=device)
    record = genesis_record(config, "0" * 64, (0, ""), ((), ()))
    version = make_version(record, compute.layout, compute.initial_masters(), compute.dtype)
    shape = (config.micro_batch_size, config.sequence_length)
    width = config.model_options["hidden_size"] // config.model_options.get("compressor_factor", 1)
    hidden = torch.randn(*shape, width, dtype=compute.dtype, device=device)
    labels = {"labels": torch.randint(0, 256, shape, device=device)}

    def run(num: int) -> None:
        for index in range(num):
            activation = compute.forward(version, Ticket(0, index), {"hidden_states": hidden}, labels, keep_graph=True)
            compute.backward(activation, None)
        if device != "cpu":
            torch.cuda.synchronize(device)

    run(5)
    began, done = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        run(10)
        done += 10
    return done * hidden.shape[0] * hidden.shape[1] / (time.monotonic() - began)
