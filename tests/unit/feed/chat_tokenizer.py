"""A small trained tokenizer with a chat template, as a model's directory holds it."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | length }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|begin|>", "<|end|>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>")
TEXT = ["the capital of france is paris", "what is the capital of spain", "madrid is the answer", "one two three four"]


def write_chat_tokenizer(directory: Path, *, template: str | None = TEMPLATE, vocab_size: int = 300) -> None:
    """Byte-level BPE of about `vocab_size` tokens that puts `<|begin|>` before a text; `<|end|>` ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
