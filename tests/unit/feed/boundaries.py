"""Prompts and completions whose boundary is awkward, and the tokenizer that makes it so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.feed.chat import ChatReader
from swarm.feed.examples import Example

#: What TRL's SFTTrainer made of the rows; `trl_boundaries.py` writes it.
TABLE = Path(__file__).with_name("boundaries.json")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
#: Tokens of more than one byte, a space as the first of one (byte-level BPE writes it so): each is joined from the left.
WORDS = (
    "Sentiment",
    "\u0120positive",
    "\u0120is",
    "\u0120one",
    "\u0120two",
    "\u0120no",
    "yes",
    "straddle",
    "answer",
    "one",
    ".\u010a\u010a",
    "\u0120\u0120",
)


@dataclass(frozen=True)
class Row:
    """A record, and why what is trained of it is not what TRL trains, if so."""

    name: str
    record: dict[str, Any]
    difference: str = ""


def _row(name: str, prompt: str, completion: str, difference: str = "") -> Row:
    return Row(name, {"prompt": prompt, "completion": completion}, difference)


_ASK = {"role": "user", "content": "one two"}
_SAY = {"role": "assistant", "content": "three"}

ROWS = (
    _row("a prompt that ends in a space", "Sentiment: ", "positive"),
    _row("a completion that begins with one", "Sentiment:", " positive"),
    _row("no space at all", "Sentiment:", "positive"),
    _row("within a word", "strad", "dle"),
    _row(
        "a prompt that ends in two spaces",
        "yes  ",
        "no",
        "TRL trains from where the tokens of both texts part, here the first space, which is the prompt's alone",
    ),
    _row("a prompt that ends in an empty line", "yes\n\n", "no"),
    _row("a new line on either side", "yes\n", "\nno"),
    _row("new lines after a full stop", "yes.", "\n\nno"),
    _row("a completion of one space", "yes", " "),
    _row("spaces on either side", "yes ", " "),
    _row("a completion of several words", "answer is ", "one two three"),
    _row("characters of several tokens", "caf\u00e9 ", "\u00e9t\u00e9 \u65e5\u672c"),
    _row("an empty prompt", "", "one two"),
    _row("a completion that brings the end", "one", " two<|end|>"),
    _row("a prompt that brings the beginning", "<|begin|>one ", "two", "TRL begins it twice"),
    Row("messages", {"prompt": [_ASK], "completion": [_SAY]}),
    Row("messages with a turn before", {"prompt": [_ASK, _SAY, _ASK], "completion": [_SAY]}),
)


def write_tokenizer(directory: Path, template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> None:
    """Byte-level BPE that joins a space to the word after it; of `special`, the first begins a text and the second ends it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = list(dict.fromkeys((word[:end], word[end]) for word in WORDS for end in range(1, len(word))))
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    tokenizer.add_special_tokens(list(special))
    words = Regex(r" ?\p{L}+| ?[^\s\p{L}]+[\r\n]*|\s+(?!\S)|\s+")  # new lines belong to the full stop before them
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)]),
        ]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)


def example_of(row: Row, reader: ChatReader) -> Example:
    [example] = reader.examples_of(row.record, row.name)
    return example
