"""Text -> token ids. Owns the byte-level default and the transformers wrapper; must not know datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarm.base.errors import ConfigError

#: Files of a tokenizer directory that decide what it does.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
#: Long documents are tokenised in pieces of whole lines of about this many characters, to bound memory.
_PIECE_CHARS = 2**20


class Tokenizer(Protocol):
    """What a dataset needs of a tokenizer."""

    vocab_size: int
    #: 64 hex digits: two tokenizers with the same digest give the same tokens.
    digest: str
    #: Tokens between two documents.
    separator: np.ndarray

    def encode(self, text: str) -> np.ndarray:
        """Token ids of one document, without special tokens: 1-d, of an unsigned dtype that holds the vocabulary."""
        ...


class ByteTokenizer:
    """One token for each byte of UTF-8: vocabulary 256, nothing to download. Documents are split by an empty line."""

    vocab_size = 256
    digest = hashlib.sha256(b"swarm byte tokenizer 1").hexdigest()
    separator = np.frombuffer(b"\n\n", dtype=np.uint8)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8)


class DirectoryTokenizer:
    """A transformers tokenizer saved in a directory. Documents are split by its end-of-text token, if it has one.

    Raises:
        ConfigError: if there is no such directory, or transformers does not understand it.
    """

    def __init__(self, directory: str) -> None:
        path = Path(directory)
        if not path.is_dir():
            raise ConfigError(f"tokenizer {directory}: no such directory")
        files = [path / name for name in sorted(_TOKENIZER_FILES) if (path / name).is_file()]
        if not files:
            raise ConfigError(f"tokenizer {directory}: holds no tokenizer file such as tokenizer.json")
        try:
            from transformers import AutoTokenizer  # seconds to import: only when asked for

            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers raises whatever the broken file led to
            raise ConfigError(f"tokenizer {directory}: {_first_line(error)}") from None
        self.vocab_size = len(self._tokenizer)
        digest = hashlib.sha256(b"swarm tokenizer directory 1")
        for file in files:
            data = file.read_bytes()
            digest.update(f"{file.name} {len(data)}\0".encode() + data)
        self.digest = digest.hexdigest()
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        end = self._tokenizer.eos_token_id
        self.separator = np.array([] if end is None else [end], dtype=self._dtype)

    def encode(self, text: str) -> np.ndarray:
        pieces = [
            np.array(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"], dtype=self._dtype)
            for piece in _pieces(text)
        ]
        return np.concatenate(pieces) if pieces else np.array([], dtype=self._dtype)


def open_tokenizer(tokenizer: str | None) -> Tokenizer:
    """The tokenizer in directory `tokenizer`, or the byte-level one.

    Raises:
        ConfigError: naming the directory and what is wrong with it.
    """
    return ByteTokenizer() if tokenizer is None else DirectoryTokenizer(tokenizer)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 if len(text) - start > _PIECE_CHARS else len(text)
        end = end or len(text)
        yield text[start:end]
        start = end


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
