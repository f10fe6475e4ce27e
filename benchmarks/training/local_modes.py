r"""Losses and bytes of local runs beside a synchronous one, in one process: the product's accumulators, compressors and rounds.

Peers compute in turn and one micro-batch at a time, so that nothing is stale; rounds run in virtual time. Every variant sees
the same tokens of the built-in text, one byte a token, in as many updates of `--batch` samples by all peers together; H of
them are an outer step. `convergence.py` compares swarms of real processes, at sizes that take minutes.

    python -m benchmarks.training.local_modes                                   # llama-tiny, 40 updates
    python -m benchmarks.training.local_modes --size small --batch 32 --updates 200 --inner-steps 20 --name local_modes_20 \
        --variants sync diloco-alone diloco diloco-momentum-0.7 diloco-powersgd diloco-powersgd-0.7
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.report import machine, publish
from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.feed.feed import open_feed
from swarm.testing.peers_of_a_stage import PeersOfAStage

SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "llama-tiny": {"sequence_length": 64, "micro_batch_size": 8},
    "small": {"model_options": SMALL, "sequence_length": 32, "micro_batch_size": 8},
}
#: What each adds to a local run, unless it is synchronous.
VARIANTS: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync", "inner_steps": 0},
    "cocktail": {"inner_steps": 1, "average_compression": "cocktail"},
    "cocktail-one-fragment": {"inner_steps": 1, "average_compression": "cocktail", "fragments": 1},
    "cocktail-diloco": {
        "inner_steps": 1,
        "average_compression": "cocktail",
        "fragments": 1,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
    },
    "diloco-1": {"inner_steps": 1},
    "diloco": {},
    "diloco-alone": {},
    "diloco-momentum-0.7": {"outer_momentum": 0.7},
    "diloco-mean": {"outer_learning_rate": 1.0, "outer_momentum": 0.0},
    "diloco-fp16": {"average_compression": "fp16"},
    "diloco-powersgd": {"average_compression": "powersgd"},
    "diloco-powersgd-0.7": {"average_compression": "powersgd", "outer_momentum": 0.7},
}


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    fields = {"mode": "local", "inner_steps": options.inner_steps, **SIZES[options.size], **VARIANTS[name]}
    updates = fields["inner_steps"] or 1
    config = RunConfig(
        num_stages=1,
        compression="none",
        target_batch_size=options.batch * updates,
        total_steps=options.updates // updates,
        seed=options.seed,
        **fields,
    )
    feed = open_feed(config, None, None, None)
    peers = PeersOfAStage(config, factory_of(config).build(0), 1 if name == "diloco-alone" else options.peers)
    losses = [peers.step(step, feed).loss for step in range(config.total_steps)]
    quarters = [losses[max(1, len(losses) * part // 4) - 1] for part in (1, 2, 3, 4)]
    row = {
        "variant": name,
        "outer steps": f"{config.total_steps} x {updates}",
        **{f"loss at {part}/4": loss for part, loss in zip((1, 2, 3, 4), quarters, strict=True)},
        "held out": peers.loss_of(feed),
        "B/peer and update": peers.bytes_sent / len(peers.peers) / options.updates,
    }
    print("  ", row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--size", choices=SIZES, default="llama-tiny", help="of the model (default: llama-tiny)")
    for option, default, text in (
        ("updates", 40, "of each copy"),
        ("batch", 64, "samples that all peers together take in an update"),
        ("inner-steps", 5, "H of the variants whose names begin with diloco"),
        ("peers", 2, "of the only stage"),
        ("seed", 0, "of initial values and data order"),
    ):
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--name", default="local_modes", help="of the result files (default: local_modes)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    rows = [run(name, options) for name in options.variants]
    reference = next((row["held out"] for row in rows if row["variant"] == "sync"), None)
    for row in rows:
        row["% from sync"] = 100 * (row["held out"] / reference - 1) if reference else "-"
    facts["batch"] = f"{options.batch} samples, {options.peers} peers"
    publish(options.name, facts=facts, tables={"Local runs": rows})


if __name__ == "__main__":
    main()
