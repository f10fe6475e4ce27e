"""What ways to code activations in about 8 bits cost on a real checkpoint: error, bytes, and time per value.

The model is SmolLM2-135M-Instruct (`smollm2.py` writes it). One process computes the gradients of all parameters on a text,
with and without a code at the boundaries of 3, 5 and 11 stages, where activations and their gradients pass through it; the
relative error is that of all gradients as one vector. After layer 11 the first token's norm is about 170 times the median's:
"token" columns are the errors of single tokens' activations there. Candidates are written for brevity; the two that matter
are what the wire carried before (blocks of 4,096 in the dynamic code of bitsandbytes) and what it carries now.

    python -m benchmarks.training.wire_codes --model DIR               # the table of errors and bytes
    python -m benchmarks.training.wire_codes --cost                    # ns per value on one thread, old and new in turns
    python -m benchmarks.training.wire_codes --gpu                     # the same on a CUDA device, and that bits agree
    python -m benchmarks.training.wire_codes --model DIR --lora 200    # losses of so many steps with adapters
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, publish
from benchmarks.training.smollm2 import write
from benchmarks.training.wire_candidates import (
    NEW,
    OLD,
    Coder,
    by_new,
    by_old,
    candidates,
    new_decode,
    new_encode,
    old_decode,
    old_encode,
)
from swarm.wire import scaled
from swarm.wire.messages import BLOCK_SIZE

STAGES = (3, 5, 11)
#: Whose output has a token with the largest norm.
OUTLIER_LAYER = 11
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
#: MB of the tensors whose coding is timed.
CPU_SIZES, GPU_SIZES = (1 / 4, 1, 4, 16, 64), (1, 4, 16, 64)


# ---------------------------------------------------------------------------------------------------- errors


class Boundary(torch.autograd.Function):
    """A tensor and its gradient pass through a code."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, code: Coder) -> torch.Tensor:
        ctx.code = code
        return code(x.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.code(gradients[0]), None


class Cut:
    """A model whose layers hand their output on through a code where a stage would end."""

    def __init__(self, directory: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
        self.device = device
        self._ends: set[int] = set()
        self._code: Coder | None = None
        #: What layer `OUTLIER_LAYER` handed on last.
        self.seen = torch.empty(0)
        for number, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(lambda *called, number=number: self._hand_on(number, called[-1]))

    def _hand_on(self, number: int, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if number == OUTLIER_LAYER:
            self.seen = hidden.detach()
        if self._code is None or number not in self._ends:
            return output
        coded = Boundary.apply(hidden, self._code)
        return (coded, *output[1:]) if isinstance(output, tuple) else coded

    def set(self, code: Coder | None, num_stages: int) -> None:
        num_layers = len(self.model.model.layers)
        self._code = code
        self._ends = {round(stage * num_layers / num_stages) - 1 for stage in range(1, num_stages)}

    def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens_BT, labels=tokens_BT).loss
        return loss

    def gradients(self, tokens_BT: torch.Tensor) -> list[torch.Tensor]:
        self.model.zero_grad()
        self.loss(tokens_BT).backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def samples(directory: Path, sequence: int) -> torch.Tensor:
    """All of the built-in text [samples, sequence]."""
    from transformers import AutoTokenizer

    from swarm.feed.sources import builtin_records

    text = "\n".join(str(record["text"]) for _, record, _ in builtin_records())
    tokens = torch.tensor(AutoTokenizer.from_pretrained(directory)(text)["input_ids"])
    return tokens[: len(tokens) // sequence * sequence].view(-1, sequence)


def errors(options: argparse.Namespace) -> None:
    cut = Cut(options.model, options.device)
    tokens_BT = samples(options.model, options.sequence)[: options.batch].to(options.device)
    cut.set(None, 1)
    exact = cut.gradients(tokens_BT)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in exact))
    hidden = cut.seen.reshape(-1, cut.seen.shape[-1])
    norms = hidden.norm(dim=1)
    rows = []
    for name, (code, bytes_of) in candidates().items():
        if options.codes and not any(part in name for part in options.codes):
            continue
        part = (code(hidden) - hidden).norm(dim=1) / norms
        row: dict[str, Any] = {
            "code": name,
            "bytes": bytes_of(hidden.numel(), hidden.shape[1]) / by_old_bytes(hidden.numel()),
            "worst token %": 100 * float(part.max()),
            "median token %": 100 * float(part.median()),
        }
        for num_stages in STAGES:
            cut.set(code, num_stages)
            off = sum(float((g - e).double().square().sum()) for g, e in zip(cut.gradients(tokens_BT), exact, strict=True))
            row[f"gradients, {num_stages} stages %"] = 100 * math.sqrt(off) / norm
        rows.append(row)
        print(f"  {row}", flush=True)
    facts = machine() | {
        "sequences": options.batch,
        "tokens in each": options.sequence,
        "largest norm, in medians": float(norms.max() / norms.median()),
    }
    publish(
        "wire_codes",
        facts=facts,
        tables={"Relative errors, and bytes by those of before": rows},
        draw=lambda figure: draw(figure, rows),
    )


def by_old_bytes(num: int) -> int:
    return num + 4 * math.ceil(num / BLOCK_SIZE)


def draw(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for row in rows:
        style = {OLD: "s-", NEW: "o-"}.get(row["code"], ":")
        axes.plot(STAGES, [row[f"gradients, {n} stages %"] for n in STAGES], style, label=f"{row['code']}, {row['bytes']:.3f}")
    axes.set(xlabel="stages", ylabel="relative error of all gradients, %", yscale="log", xticks=STAGES)
    axes.set_xticklabels(STAGES)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)


# ---------------------------------------------------------------------------------------------------- cost


def ns_per_value(works: Sequence[Callable[[], Any]], num: int, device: str, seconds: float) -> list[float]:
    """The least of many repetitions of each, taken in turns."""
    best = [math.inf] * len(works)
    for work in works:
        work()
    began, count = time.perf_counter(), 0
    while count < 5 or time.perf_counter() < began + seconds:
        for position, work in enumerate(works):
            best[position] = min(best[position], seconds_of(work, device))
        count += 1
    return [1e9 * one / num for one in best]


def seconds_of(work: Callable[[], Any], device: str) -> float:
    if device == "cpu":  # the thread's own time: others may use this core too
        began = time.thread_time()
        work()
        return time.thread_time() - began
    repeats = 20  # back to back, as a stage's thread runs ahead of its device: the slower of both counts
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def cost(options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), GPU_SIZES if device == "cuda" else CPU_SIZES):
        num = round(size * 2**20) // dtype.itemsize
        flat = torch.randn(num, device=device).to(dtype)
        old, new = old_encode(flat), new_encode(flat)
        encoding = [partial(old_encode, flat), partial(new_encode, flat)]
        decoding = [partial(old_decode, old, num, dtype), partial(new_decode, new, num, dtype)]
        if device == "cuda":  # what a device without Triton does
            encoding.append(partial(without_kernels, encoding[1]))
            decoding.append(partial(without_kernels, decoding[1]))
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "MB": size}
        for what, works in (("encode", encoding), ("decode", decoding)):
            each = ns_per_value(works, num, device, options.seconds)
            row |= {f"{what} old": each[0], f"{what} new": each[1], f"{what} new/old": each[1] / each[0]}
            if device == "cuda":
                row[f"{what} no Triton"] = each[2]
        both = [row["encode new"] + row["decode new"], row["encode old"] + row["decode old"]]
        row["both new/old"] = both[0] / both[1]
        rows.append(row)
        print(f"  {row}", flush=True)
    return rows


def without_kernels(work: Callable[[], Any]) -> Any:
    kernels, scaled._kernels = scaled._kernels, lambda: None
    try:
        return work()
    finally:
        scaled._kernels = kernels


def agreement() -> list[dict[str, Any]]:
    """Whether a CUDA device, with its kernels and without, has the bytes and the values of a CPU."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        cases = differ = 0
        sizes = (1, 63, 64, 65, 4095, 4096, 4097, 100_003, 2**20)
        for num, kind, rotate in itertools.product(sizes, range(6), (True, False)):
            flat = drawn(num, kind).to(dtype)
            if dtype == torch.float16 and kind in (1, 3):
                continue  # beyond its range
            here, bound = scaled.encode(flat, rotate=rotate)
            values = scaled.decode(here, num, dtype, rotated=rotate)
            there, coded_here = flat.cuda(), here.cuda()
            encode = partial(scaled.encode, there, rotate=rotate)
            decode = partial(scaled.decode, coded_here, num, dtype, rotated=rotate)
            for coded, bounds in (encode(), without_kernels(encode)):
                differ += not (torch.equal(coded.cpu(), here) and torch.equal(bounds.cpu(), bound))
            differ += sum(not torch.equal(got.cpu(), values) for got in (decode(), without_kernels(decode)))
            cases += 4
        bad = torch.ones(5000, dtype=dtype)
        bad[4097] = math.nan
        refused = not bool(scaled.encode(bad.cuda(), rotate=True)[1].isfinite().all())
        rows.append(
            {"dtype": str(dtype).removeprefix("torch."), "comparisons": cases, "that differ": differ, "NaN is seen": str(refused)}
        )
    return rows


def drawn(num: int, kind: int) -> torch.Tensor:
    """Of six kinds: normal, many decades, zeros among them, beneath normal numbers, halves between integers, outliers."""
    generator = torch.Generator().manual_seed(kind)
    values = torch.randn(num, generator=generator)
    decades = torch.randint(-25, 6, (num,), generator=generator)
    if kind == 1:
        return values * 10.0**decades
    if kind == 2:
        return values.masked_fill(decades > -20, 0.0)
    if kind == 3:
        return values * 1e-37
    if kind == 4:
        return torch.randint(-254, 255, (num,), generator=generator).div(2).index_fill(0, torch.arange(0, num, 64), 127.0)
    return values * torch.where(decades == 5, 1000.0, 1.0) if kind == 5 else values


# ---------------------------------------------------------------------------------------------------- adapters


def lora(options: argparse.Namespace) -> None:
    """Losses of the same steps with each code at the boundaries of 5 stages; the last samples are held out."""
    import peft

    rows = samples(options.model, options.sequence)
    train, held_out = rows[: -options.eval_samples], rows[-options.eval_samples :].to(options.device)
    table: list[dict[str, Any]] = []
    curves: dict[str, list[float]] = {}
    for name, code in (("none", None), (NEW, by_new), (OLD, by_old)):
        if code is not None and options.codes and not any(part in name for part in options.codes):
            continue
        cut = Cut(options.model, options.device)
        torch.manual_seed(0)
        adapted: Any = peft.get_peft_model(cut.model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
        cut.set(code, 5)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        losses = []
        for step in range(options.lora):
            batch = train[order[torch.arange(step * options.batch, (step + 1) * options.batch) % len(order)]]
            loss = cut.loss(batch.to(options.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if step % 10 == 9:
                print(f"  {name}: step {step + 1}, loss {statistics.mean(losses[-10:]):.4f}", flush=True)
        with torch.no_grad():
            validation = statistics.mean(float(cut.loss(part)) for part in held_out.split(1))
        curves[name] = losses
        row = {"boundaries": name, "last 50 steps": statistics.mean(losses[-50:]), "validation": validation}
        table.append(row | {"validation, to none %": 100 * (validation / (table or [row])[0]["validation"] - 1)})
        print(f"  {table[-1]}", flush=True)
    facts = machine() | {
        "steps": options.lora,
        "sequences of a step": options.batch,
        "tokens in each": options.sequence,
        "stages": 5,
        "held-out sequences": options.eval_samples,
        "adapters": LORA,
    }
    publish("wire_codes_lora", facts=facts, tables={"Losses after training adapters": table}, details=curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="where the checkpoint is, or will be written")
    parser.add_argument("--cost", action="store_true", help="time one thread")
    parser.add_argument("--gpu", action="store_true", help="time a CUDA device and compare its bits with a CPU's")
    parser.add_argument("--lora", type=int, metavar="STEPS", help="train adapters")
    parser.add_argument("--codes", nargs="+", metavar="PART", help="only those whose names hold one of these")
    parser.add_argument("--device", default="cpu", help="of the model (default: cpu)")
    parser.add_argument("--sequence", type=int, default=256, metavar="N", help="tokens of a sequence (default: 256)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default: 1)")
    parser.add_argument("--eval-samples", type=int, default=32, metavar="N", help="sequences held out (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=2e-4, metavar="X", help="of the adapters (default: 2e-4)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="for each timing (default: 1)")
    options = parser.parse_args()
    if options.model is not None:
        write(options.model)
    if options.gpu:
        facts = machine() | {"card": torch.cuda.get_device_name(), "Triton": str(scaled._kernels() is not None)}
        tables = {"CPU and GPU": agreement(), "ns per value": cost(options, "cuda")}
        publish("wire_codes_gpu", facts=facts, tables=tables)
    elif options.cost:
        publish("wire_codes_cpu", facts=machine(), tables={"ns per value, one thread": cost(options, "cpu")})
    elif options.model is None:
        parser.error("--model DIR: where the checkpoint is, or will be written")
    elif options.lora is not None:
        lora(options)
    else:
        errors(options)


if __name__ == "__main__":
    main()
