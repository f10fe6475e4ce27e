"""What `lora_8b.py` compares with: transformers and peft in one process, the whole model on one device.

Same directory, data order, micro-batches, schedule and clipping as the run whose configuration is given. Adapters are kept
in bf16 like the base and updated by torch's fused AdamW, which is faster than peft's default of fp32 adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.ids import Ticket
from swarm.feed.feed import Feed, open_feed
from swarm.policy.schedule import learning_rate


def load(config: RunConfig, model: Path, device: torch.device) -> torch.nn.Module:
    lora = config.lora
    assert lora is not None
    logging.disable_progress_bar()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map={"": device})
    base.config.use_cache = False
    wanted = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=list(lora.targets) or "all-linear",
    )
    return peft.get_peft_model(base, wanted, autocast_adapter_dtype=False).train()


def one_step(
    config: RunConfig, feed: Feed, model: Any, optimizer: torch.optim.Optimizer, step: int, device: torch.device
) -> tuple[float, int]:
    """Mean loss and tokens."""
    loss_sum, tokens = torch.zeros((), device=device), 0
    for index in range(config.tickets_per_step):
        batch = feed.batch(Ticket(step, index))
        ids = torch.from_numpy(batch.inputs["input_ids"]).to(device)
        labels = torch.from_numpy(batch.labels["labels"]).to(device)
        loss = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=1).loss  # the sum over tokens
        loss.backward()
        loss_sum += loss.detach()
        tokens += labels.numel()
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad.div_(tokens)
    torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss_sum) / tokens, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run's configuration, as JSON")
    parser.add_argument("--model", type=Path, required=True, help="directory with the weights and the tokenizer")
    parser.add_argument("--data", required=True, help="the run's data")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for steps and memory")
    options = parser.parse_args()
    config = parse_config_bytes(options.run.read_bytes())
    device = torch.device(options.device)
    began = time.monotonic()
    feed = open_feed(config, options.data, None, str(options.model))
    model = load(config, options.model, device)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    started_s = time.monotonic() - began
    steps = []
    for step in range(options.steps):
        began = time.monotonic()
        loss, tokens = one_step(config, feed, model, optimizer, step, device)
        seconds = time.monotonic() - began  # the loss was waited for, and with it the update
        steps.append({"step": step + 1, "loss": loss, "tokens": tokens, "tokens_per_s": tokens / seconds, "seconds": seconds})
    is_cuda = device.type == "cuda"
    memory = {
        "peak_tensor_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else 0,
        "peak_device_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else 0,
        "peak_rss_bytes": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024,
    }
    options.out.write_text(json.dumps({"steps": steps, "memory": memory, "started_s": started_s}))


if __name__ == "__main__":
    main()
