"""Whether a model that is cut into three stages is the model: every causal LM family that transformers can pipeline.

For a small model of each family, with every multiplier, cap and window off its default (`shrunken.py`), three stages
that pass named tensors as the engine does are compared with transformers' own forward and backward in fp32: logits,
loss (the routers' balancing loss included) and the gradient of every parameter, unpadded, left- and right-padded, with
the head apart from the embedding and tied to it. Beside it stands whether examples that share a sample see each other: what
the stages give for packed examples is compared with what they give for each alone, and with `models/packing.py`.

    python -m tests.unit.models.parity --all                                   # the table
    python -m tests.unit.models.parity --all --write models/ARCHITECTURES.md   # and as a page
    python -m tests.unit.models.parity llama mixtral                           # only these
"""

from __future__ import annotations

import argparse
import logging
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from models.causal_lm import CausalLMFactory
from models.cut import CausalLMStage
from models.packing import SHOWN_LAYERS, why_apart
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.examples import Example, Examples
from swarm.feed.packing import PackedExamples
from swarm.stage.module import Tensors
from tests.unit.models.shrunken import ADAPTERS, VOCAB, families_with_a_plan, shrunken, still_at_default

B, T = 3, 12
NUM_STAGES = 3
TOLERANCE = 1e-5
PADDINGS = ("none", "left", "right")
#: Tokens of examples that share a sample, longer than every window and choice of tokens, and what they share.
LENGTHS = (8, 10, 6)
SHARED_T = 24
#: What transformers takes by default, and the other one.
ATTENTION = (None, "eager")


@dataclass(frozen=True)
class Result:
    """Of one family: the largest difference found, or why it is not cut."""

    model_type: str
    outcome: str  # passed, refused, failed
    detail: str
    #: Whether examples share samples, and what was found.
    shared: str = ""


def sample(padding: str) -> tuple[Tensors, Tensors]:
    """Inputs and labels, already shifted; the last label of each sample is ignored, since transformers has none."""
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(0, VOCAB, (B, T), generator=generator)}
    labels = inputs["input_ids"].roll(-1, 1)
    labels[0, 3:5] = -100
    labels[:, -1] = -100
    if padding != "none":
        mask = torch.ones(B, T, dtype=torch.int64)
        mask[1, slice(0, 4) if padding == "left" else slice(T - 4, T)] = 0
        mask[2, slice(0, 1) if padding == "left" else slice(T - 1, T)] = 0
        labels[mask == 0] = -100
        inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return inputs, {"labels": labels}


def of_stages(stages: list[CausalLMStage], inputs: Tensors, labels: Tensors) -> tuple[Tensors, torch.Tensor, Tensors]:
    """Output, logits and gradients by name, each stage's graph by itself, as the engine does."""
    parameters = [{n: p.detach().clone().requires_grad_() for n, p in stage.named_parameters()} for stage in stages]
    entered, left = [], []
    outputs = inputs
    for stage, own in zip(stages, parameters, strict=True):
        leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in outputs.items()}
        outputs = torch.func.functional_call(stage, own, (leaves, labels if stage.is_last else None))
        entered.append(leaves)
        left.append(outputs)
    logits = torch.func.functional_call(_Logits(stages[-1]), {f"stage.{n}": p for n, p in parameters[-1].items()}, (entered[-1],))
    gradients: Tensors = {}
    coming: Tensors = {"loss_sum": torch.ones(())}
    for own, leaves, outputs in zip(reversed(parameters), reversed(entered), reversed(left), strict=True):
        heads = [n for n, t in outputs.items() if t.requires_grad]
        wanted = {**{f"<{n}": t for n, t in leaves.items() if t.requires_grad}, **own}
        found = torch.autograd.grad(
            [outputs[n] for n in heads], list(wanted.values()), [coming[n] for n in heads], allow_unused=True
        )
        by_name = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found, strict=True)}
        coming = {n.removeprefix("<"): g for n, g in by_name.items() if n.startswith("<")}
        gradients |= {n: g for n, g in by_name.items() if not n.startswith("<")}
    return left[-1], logits.detach(), gradients


class _Logits(torch.nn.Module):
    def __init__(self, stage: CausalLMStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Tensors) -> torch.Tensor:
        return self.stage.logits(inputs)


def of_transformers(model: Any, inputs: Tensors, labels: Tensors) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Mean loss, logits and the gradients of the loss times the counted tokens."""
    model.zero_grad(set_to_none=True)
    unshifted = torch.full_like(labels["labels"], -100)
    unshifted[:, 1:] = labels["labels"][:, :-1]
    output = model(**inputs, labels=unshifted, use_cache=False)
    tokens = (labels["labels"] != -100).sum()
    (output.loss * tokens).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return output.loss.detach(), output.logits.detach(), gradients


def difference(found: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Largest difference of an element, over the larger of 1 and `scale`."""
    if found.shape != expected.shape:
        return float("inf")
    worst = (found - expected).abs().max().item() if found.numel() else 0.0
    return worst / max(1.0, scale) if worst == worst else float("inf")


def compare(model_type: str, *, paddings: tuple[str, ...] = PADDINGS, **changes: Any) -> float:
    """The largest difference between the cut and the whole model.

    Raises:
        ConfigError: if the family cannot be cut.
        AssertionError: if a parameter is in no stage, or in two, or has other values in another cut.
    """
    options = {**shrunken(model_type), **changes}
    run = RunConfig(num_stages=NUM_STAGES, precision="fp32", sequence_length=T, seed=5)
    factory = CausalLMFactory(run, options)
    left_at_default = still_at_default(factory.config)
    assert not left_at_default, f"at their defaults: {', '.join(left_at_default)}"
    stages = [factory.build(stage).train() for stage in range(NUM_STAGES)]
    whole = AutoModelForCausalLM.from_config(factory.config, attn_implementation=factory.config._attn_implementation)
    state = {name: value for stage in stages for name, value in stage.state_dict().items()}
    for name, owner in factory.owners.items():
        assert torch.equal(state[name], state[owner]), f"copies of {owner} differ"
    missing, unexpected = whole.load_state_dict(state, strict=False)
    assert not missing, f"in no stage: {missing}"
    assert not unexpected, f"not in the model: {unexpected}"
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert len(names) == len(set(names)), "a parameter is in two stages"
    for name, value in factory.build_whole().named_parameters():
        assert torch.equal(value, whole.get_parameter(name)), f"{name} has other values in another cut"
    whole.train()
    worst = 0.0
    for padding in paddings:
        inputs, labels = sample(padding)
        loss, logits, gradients = of_transformers(whole, inputs, labels)
        output, own_logits, own_gradients = of_stages(stages, inputs, labels)
        for tie in factory.ties:
            own_gradients[tie.name] = sum(own_gradients.pop(name) for _, name in tie.places)  # as the engine does
        real = inputs.get("attention_mask", torch.ones(B, T)).bool()
        largest = max(g.abs().max().item() for g in gradients.values() if g.numel())
        found = {
            "loss": difference(output["loss_sum"] / output["tokens"], loss, loss.abs().item()),
            "logits": difference(own_logits[real], logits[real], logits[real].abs().max().item()),
            **{name: difference(own_gradients[name], g, largest) for name, g in gradients.items()},
        }
        num_real = sum(g.abs().sum().item() > 0 for g in gradients.values())
        assert num_real >= min(30, 0.5 * len(gradients)), "no gradients to compare"
        name = max(found, key=lambda n: found[n])
        assert found[name] <= TOLERANCE, f"{name} differs by {found[name]:.1e} ({padding} padding)"
        worst = max(worst, found[name])
    return worst


def shared_difference(model_type: str, attention: str | None = None) -> float:
    """Largest difference between the logits of examples that share a sample and those of each alone."""
    run = RunConfig(num_stages=NUM_STAGES, sequence_length=SHARED_T)
    factory = CausalLMFactory(run, {**shrunken(model_type), "attn_implementation": attention})
    stages = [factory.build(stage) for stage in range(NUM_STAGES)]
    rng = np.random.default_rng(2)
    examples = [Example(rng.integers(0, VOCAB, n).astype(np.uint16), np.ones(n, bool)) for n in LENGTHS]
    shared, alone = (PackedExamples(Examples.of([examples]), SHARED_T, packed=packed) for packed in (True, False))
    assert (len(shared), len(alone)) == (1, len(LENGTHS))
    found, expected = _logits_of(stages, shared), _logits_of(stages, alone)
    expected = torch.cat([logits[: n - 1] for logits, n in zip(expected, LENGTHS, strict=True)])
    return difference(found[0, : len(expected)], expected, expected.abs().max().item())


@torch.no_grad()
def _logits_of(stages: list[CausalLMStage], samples: PackedExamples) -> torch.Tensor:
    boundary = {name: torch.from_numpy(array) for name, array in samples.take(np.arange(len(samples))).inputs.items()}
    for stage in stages[:-1]:
        boundary = stage(boundary)
    return stages[-1].logits(boundary)


def sharing_of(model_type: str) -> str:
    """Whether examples share samples, for the page: what was measured, and why not.

    Raises:
        AssertionError: `models/packing.py` says otherwise.
    """
    found = max(shared_difference(model_type, attention) for attention in ATTENTION)
    why = why_apart(RunConfig(model="causal-lm", model_options=shrunken(model_type), num_stages=NUM_STAGES))
    if not why:
        assert found <= TOLERANCE, f"examples that share a sample differ from each alone by {found:.1e}"
        kinds = {*(getattr(CONFIG_MAPPING[model_type](), "layer_types", None) or ())}
        assert kinds <= SHOWN_LAYERS, f"layers of {kinds} by default"
        return f"yes, {found:.0e}"
    assert found > TOLERANCE, f"examples could share samples ({found:.1e}): {why}"
    return f"no, {found:.0e}: {why}"


def can_tie(model_type: str) -> bool:
    """Whether the head can be the embedding."""
    run = RunConfig(num_stages=NUM_STAGES, sequence_length=T)
    try:
        return bool(CausalLMFactory(run, {**shrunken(model_type), "tie_word_embeddings": True}).ties)
    except ConfigError:  # its configuration has no such field
        return False


def tried(model_type: str, *, verbose: bool = False) -> Result:
    try:
        found = f"{compare(model_type):.0e}"
        if can_tie(model_type):
            found += f", tied {compare(model_type, paddings=('left',), tie_word_embeddings=True):.0e}"
        return Result(model_type, "passed", found, sharing_of(model_type))
    except ConfigError as error:
        return Result(model_type, "refused", str(error))
    except Exception as error:  # whatever a family's code raises is its result
        if verbose:
            traceback.print_exc()
        return Result(model_type, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def page(results: list[Result]) -> str:
    """`ARCHITECTURES.md`."""
    passed = [r for r in results if r.outcome == "passed"]
    planned = [r for r in passed if r.model_type not in ADAPTERS]
    num_planned = len([r for r in results if r.model_type not in ADAPTERS])
    lines = [
        "# Architectures",
        "",
        f"Written by `python -m tests.unit.models.parity --all --write models/ARCHITECTURES.md` with transformers "
        f"{transformers.__version__}: {len(planned)} of the {num_planned} causal LM types for which transformers has a "
        f"pipeline plan, and {len(passed) - len(planned)} of {len(ADAPTERS)} with an adapter of their own, cut into 3 "
        "stages, equal the whole model: logits, loss and the gradient of every parameter, in fp32, unpadded, left- and "
        "right-padded, with every multiplier, cap and window off its default; where the third column says so, also with the "
        "head tied to the embedding.",
        "",
        f"Short examples share samples with {len([r for r in passed if r.shared.startswith('yes')])} types: their logits equal "
        "those of each example alone, with both attention implementations, as the last column says. With the others, and "
        "wherever a configuration has something that was not tried, each example gets a sample of its own "
        "(`models/packing.py`). Experts are no reason: a token's route depends on that token alone, and only the balancing "
        "loss adds up the whole batch, as its definition says.",
        "",
        "| `model_type` | outcome | largest difference, or the reason | examples share samples |",
        "|---|---|---|---|",
        *(f"| {r.model_type} | {r.outcome} | {r.detail} | {r.shared} |" for r in results),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types")
    parser.add_argument("--all", action="store_true", help="every type with a plan, and those with an adapter")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = []
    for model_type in [*families_with_a_plan(), *ADAPTERS] if options.all else options.types:
        results.append(tried(model_type, verbose=not options.all))
        print(f"{results[-1].model_type:24} {results[-1].outcome:8} {results[-1].detail:8} {results[-1].shared}", flush=True)
    counts = {kind: sum(r.outcome == kind for r in results) for kind in ("passed", "refused", "failed")}
    num_sharing = sum(r.shared.startswith("yes") for r in results)
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()) + f"; examples of {num_sharing} share samples")
    if options.write is not None:
        options.write.write_text(page(results))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
