"""What single operations of a stage take on a CUDA device, in ms of the device and of the thread that asks for them.

A stage of 4 Llama blocks (hidden 4096, ffn 11008) with a head for 32,000 tokens, gradients in bf16, the sum in fp32; and
one boundary tensor of 2,048 x 4,096. "of 1 micro-batch" is per micro-batch where several are added together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import machine, publish
from swarm.stage.accumulator import LARGEST
from swarm.stage.gpu.kernels import MAX_TOGETHER, Summand, add_together, survey
from swarm.wire.compression import CODECS, code_tensor, decode_coded

REPETITIONS = 20


def timed(name: str, work: Callable[[], Any], *, per: int = 1) -> dict[str, Any]:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        work()
    asked = time.perf_counter()
    torch.cuda.synchronize()
    device_ms, thread_ms = (1e3 * (t - began) / REPETITIONS for t in (time.perf_counter(), asked))
    return {"operation": name, "device ms": device_ms, "thread ms": thread_ms, "of 1 micro-batch": device_ms / per}


def main() -> None:
    block = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2
    shapes = [*block * 4, (32000, 4096), (4096,)]
    device = torch.device("cuda")

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]

    totals = [torch.zeros(shape, device=device) for shape in shapes]
    valid = torch.ones(1, dtype=torch.int32, device=device)
    summands = [Summand(drawn(), valid, 1.0) for _ in range(MAX_TOGETHER)]
    gradients: Any = summands[0].gradients
    halves = drawn()
    boundary = torch.randn(2048, 4096, device=device, dtype=torch.bfloat16)
    spec, coded, _ = code_tensor("x", boundary, CODECS["8bit"], "input")
    pinned = torch.empty(coded.numel(), dtype=torch.uint8, pin_memory=True)
    rows = [
        timed("bf16 += bf16, as a plain loop sums", lambda: [a.add_(b) for a, b in zip(halves, gradients, strict=True)]),
        timed("fp32 += bf16, torch", lambda: [a.add_(b) for a, b in zip(totals, gradients, strict=True)]),
        *(
            timed(f"fp32 += {n} x bf16, add_together", lambda n=n: add_together(totals, summands[:n]), per=n)
            for n in range(1, MAX_TOGETHER + 1)
        ),
        timed("is every gradient within bounds", lambda: survey(gradients, LARGEST, device)),
        timed("the same, and their norm", lambda: survey(gradients, LARGEST, device).norm()),
        timed("quantise a boundary tensor", lambda: code_tensor("x", boundary, CODECS["8bit"], "input")),
        timed("dequantise it", lambda: decode_coded(spec, coded)),
        timed("copy it to pinned memory", lambda: pinned.copy_(coded, non_blocking=True)),
        timed("copy it from pinned memory", lambda: coded.copy_(pinned, non_blocking=True)),
    ]
    facts = machine() | {"card": torch.cuda.get_device_name(), "parameters": sum(t.numel() for t in totals)}
    publish("gpu_kernels", facts=facts, tables={"Operations of a stage": rows})


if __name__ == "__main__":
    main()
