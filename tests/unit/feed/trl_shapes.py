"""What TRL's SFTTrainer trains of the rows of `shapes.py`: the table that the tests hold to.

    python -m tests.unit.feed.trl_shapes

TRL is needed for this alone (pip install trl): it rewrites `shapes.json`.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.unit.feed.boundaries import SPECIAL, write_tokenizer
from tests.unit.feed.shapes import MARKED_TEMPLATE, SHAPES, TABLE


def trl_rows(directory: Path, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens and masks as SFTTrainer prepares them: of `messages` the assistant's, of prompts the completions."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    found = []
    for row in wanted:
        args = SFTConfig(
            output_dir=str(directory / "out"),
            report_to=[],
            use_cpu=True,
            max_length=None,
            pad_token="<|end|>",
            packing=False,
            assistant_only_loss="messages" in row,
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
        [prepared] = list(trainer.train_dataset)
        labels = prepared["labels"] if "labels" in prepared else prepared["input_ids"]
        found.append({"tokens": prepared["input_ids"], "trained": [int(label != -100) for label in labels]})
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tokenizer(directory, MARKED_TEMPLATE, SPECIAL)
        rows = {json.dumps(row, sort_keys=True): row for shape in SHAPES for row in shape.trl}
        made = dict(zip(rows, trl_rows(directory, list(rows.values())), strict=True))
    entries = [{"name": shape.name, "examples": [made[json.dumps(row, sort_keys=True)] for row in shape.trl]} for shape in SHAPES]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    TABLE.write_text(f'{{"trl": "{version("trl")}", "transformers": "{version("transformers")}", "shapes": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
