"""Which tokens TRL's SFTTrainer trains of prompts and completions, beside ours: the table that the tests hold to.

    python -m tests.unit.feed.trl_boundaries

TRL is needed for this alone (pip install trl): it prints the rows and rewrites `boundaries.json`.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swarm.feed.chat import ChatReader
from swarm.feed.tokenizers import DirectoryTokenizer
from tests.unit.feed.boundaries import ROWS, TABLE, example_of, write_tokenizer


def trl_rows(directory: Path) -> list[dict[str, Any]]:
    """Tokens and masks as SFTTrainer prepares them, a dictionary for each row."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    found = []
    for row in ROWS:
        args = SFTConfig(
            output_dir=str(directory / "out"), report_to=[], use_cpu=True, max_length=None, pad_token="<|end|>", packing=False
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list([row.record]), processing_class=tokenizer)
        [prepared] = list(trainer.train_dataset)
        found.append(
            {"name": row.name, "tokens": prepared["input_ids"], "trained": [int(label != -100) for label in prepared["labels"]]}
        )
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tokenizer(directory)
        rows = trl_rows(directory)
        ours = DirectoryTokenizer(str(directory))
        for row, theirs in zip(ROWS, rows, strict=True):
            example = example_of(row, ChatReader(ours))
            same = [example.tokens.tolist(), example.trained.tolist()] == [theirs["tokens"], [x == 1 for x in theirs["trained"]]]
            print(f"{row.name:58} {'equal' if same else 'differs: ' + (row.difference or 'UNNAMED')}")
            print("   trl :", _shown(ours, theirs["tokens"], theirs["trained"]))
            print("   ours:", _shown(ours, example.tokens.tolist(), example.trained.tolist()))
    lines = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f'{{"trl": "{version("trl")}", "transformers": "{version("transformers")}", "rows": [\n{lines}\n]}}\n')


def _shown(tokenizer: DirectoryTokenizer, tokens: list[int], trained: list[Any]) -> str:
    return " ".join(
        f"[{word}]" if learnt else word
        for word, learnt in zip((repr(tokenizer._tokenizer.decode([token])) for token in tokens), trained, strict=True)
    )


if __name__ == "__main__":
    main()
