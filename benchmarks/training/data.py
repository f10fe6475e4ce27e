"""JSON lines of gigabytes: the memory of who reads them, and how long a run takes to start with them, the first time and again.

The rows are passages of the Python sources and documents of this machine; the tokenizer is a byte-level BPE of 32,000 tokens that
was trained on some of them. The baseline reads the same file and tokenises it in batches of the same size, and keeps nothing.
`first` is a trainer's `open_feed` with an empty cache, `again` the same in another process, which then draws batches. Both import
what a trainer imports. Memory is the highest resident set of the process (VmHWM), pages of mapped files among it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import machine, publish

SEQUENCE_LENGTH = 1024
ROW_CHARS = 3000
BATCH_CHARS = 2**22
BASELINE = """
import json, sys, time
from pathlib import Path
began, texts, size, tokens = time.monotonic(), [], 0, 0
if sys.argv[1]:
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
def encoded():
    if not sys.argv[1]:
        return [text.encode() for text in texts]
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
def flush():
    global tokens, size
    found = encoded()
    tokens += sum(map(len, found))
    texts.clear()
    size = 0
with open(sys.argv[2], "rb") as file:
    for line in file:
        texts.append(json.loads(line)["text"])
        size += len(texts[-1])
        if size >= int(sys.argv[3]):
            flush()
    if texts:
        flush()
print(json.dumps({"seconds": time.monotonic() - began}))
"""
OPEN = """
import json, logging, sys, time
from pathlib import Path
import launch.trainer, launch.run.composing, swarm.peer.trainer.trainer
from swarm.base.config import RunConfig
from swarm.base.ids import Ticket
from swarm.feed.feed import open_feed
from swarm.feed.token_files import TokenCache
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
def highest_mb():
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")).split()[1]) / 1024
config = RunConfig(sequence_length=int(sys.argv[3]), micro_batch_size=8, target_batch_size=64, total_steps=1000)
before, began = highest_mb(), time.monotonic()
feed = open_feed(config, sys.argv[2], None, sys.argv[1] or None, vocab_size=32000, cache=TokenCache(Path(sys.argv[4])))
seconds = time.monotonic() - began
opened = highest_mb()
for step in range(int(sys.argv[5])):
    for index in range(config.tickets_per_step):
        feed.batch(Ticket(step, index))
print(json.dumps({"seconds": seconds, "before": before, "opened": opened, "drawn": highest_mb(), "samples": feed.num_samples}))
"""


def passages(seed: int) -> Iterator[str]:
    """Passages of sources and documents, for ever, in a random order."""
    rng = random.Random(seed)
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted(path for root in roots for path in root.rglob("*.py") if path.stat().st_size > ROW_CHARS)
    texts = [path.read_text(errors="ignore") for path in rng.sample(files, min(2000, len(files)))]
    while True:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - ROW_CHARS))
        yield text[start : start + rng.randrange(200, ROW_CHARS)]


def write_rows(path: Path, num_bytes: int) -> None:
    with path.open("w") as file:
        rows = passages(1)
        while file.tell() < num_bytes:
            file.write("".join(json.dumps({"text": next(rows)}) + "\n" for _ in range(1000)))


def write_tokenizer(directory: Path) -> None:
    """Trained on 8 MB of other passages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rows, size, texts = passages(2), 0, []
    while size < 8e6:
        texts.append(next(rows))
        size += len(texts[-1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def in_process(code: str, *argv: object) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, argv)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(directory: Path, megabytes: int, steps: int, *, bpe: bool) -> list[dict[str, Any]]:
    """One row each for the baseline, the first start and the second."""
    data, tokenizer, cache = directory / "rows.jsonl", directory / "tokenizer" if bpe else "", directory / "cache"
    if isinstance(tokenizer, Path):
        write_tokenizer(tokenizer)
    write_rows(data, megabytes * 1_000_000)
    alone = in_process(BASELINE, tokenizer, data, BATCH_CHARS)["seconds"]
    rows: list[dict[str, Any]] = [{"start": "batched tokenisation alone", "seconds": round(alone, 1), "of the baseline": 1.0}]
    for name in ("first", "again"):
        found = in_process(OPEN, tokenizer, data, SEQUENCE_LENGTH, cache, steps if name == "again" else 0)
        row = {"start": name, "seconds": round(found["seconds"], 1), "of the baseline": round(found["seconds"] / alone, 2)}
        rows.append(row | {f"memory {key} (MB)": round(found[key]) for key in ("before", "opened", "drawn")})
    rows[0] |= {key: None for key in rows[1] if key not in rows[0]}
    return rows


def _draw(rows: list[dict[str, Any]]) -> Any:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar([row["start"] for row in rows], [row["seconds"] for row in rows])
        axes.set(ylabel="seconds", title="Until a trainer has its data")

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--bytes", action="store_true", help="one token for each byte, in the place of the BPE")
    parser.add_argument("--steps", type=int, default=200, help="of 64 samples that are drawn after the second start")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure(Path(temporary), options.megabytes, options.steps, bpe=not options.bytes)
    facts = {
        **machine(),
        "file (MB)": options.megabytes,
        "sequence length": SEQUENCE_LENGTH,
        "tokens": "bytes" if options.bytes else "BPE",
    }
    publish(
        "data_bytes" if options.bytes else "data", facts=facts, tables={"a text source of JSON lines": rows}, draw=_draw(rows)
    )


if __name__ == "__main__":
    main()
