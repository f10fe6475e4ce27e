"""The byte-level tokenizer as a file that transformers loads. Owns its format; must not know models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_byte_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and its configuration: token id = byte value, as `swarm.feed.tokenizers.ByteTokenizer`.

    Raises:
        OSError: if the files cannot be written.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(_byte_characters())}, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> list[str]:
    """GPT-2's printable character of each byte: itself if it is visible, else the next code point from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(substitutes)) for byte in range(256)]
