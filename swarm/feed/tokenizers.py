"""Text and conversations -> token ids. Owns the byte-level default and the transformers wrapper; must not know datasets."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from swarm.base.errors import ConfigError

#: Files of a tokenizer directory that decide what it does.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
#: What a chat template takes for today where no run has a date: Llama's own writes it where there is no clock.
DATE_OF_NO_RUN = datetime.date(2024, 7, 26)
#: A template's mark of what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: What transformers would make beside the tokens, and nothing here reads.
_NO_MASKS = {"return_attention_mask": False, "return_token_type_ids": False}


class LocatedTokens(NamedTuple):
    """Tokens [n], and the indices of each one's first character and of the one after its last: int64 [n] each."""

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Tokenizer(Protocol):
    """What a dataset needs of a tokenizer."""

    vocab_size: int
    #: Unsigned, and holds the vocabulary.
    dtype: np.dtype
    #: 64 hex digits: two tokenizers with the same digest give the same tokens.
    digest: str
    #: Tokens between two documents, and at the end of one.
    separator: np.ndarray
    #: Tokens that the model expects before a text.
    start: np.ndarray
    #: Whether a chat template has asked for today's date, and was told the one that the tokenizer was opened with.
    has_told_date: bool
    #: Names all that the tokens of a conversation depend on beside its messages.
    cache_key: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens: 1-d, of `dtype`."""
        ...

    def encode_located(self, texts: Sequence[str]) -> list[LocatedTokens]:
        """As `encode`, and where each token stands in its text.

        Raises:
            ConfigError: this tokenizer cannot tell.
        """
        ...

    def framing(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`start` and `separator` for a document of the tokens `ids`, without what it brings itself."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, is_answered: bool) -> str:
        """The text of a conversation; unless it `is_answered`, it ends where the assistant's next words begin.

        Raises:
            ConfigError: there is no chat template, or what it says of these messages.
        """
        ...

    def chat_with_marks(self, messages: Sequence[Mapping[str, Any]], *, tools: Any) -> MarkedChat | None:
        """The text of an answered conversation with its template's own marks of answers; None if it marks none.

        Raises:
            ConfigError: what the template says of these messages.
        """
        ...


class MarkedChat(NamedTuple):
    """A conversation's text, and where each answer begins and ends in it, as `{% generation %}` of its template says."""

    text: str
    answers: list[tuple[int, int]]


class ByteTokenizer:
    """One token for each byte of UTF-8: vocabulary 256, nothing to download. Documents are split by an empty line."""

    vocab_size = 256
    dtype = np.dtype(np.uint8)
    digest = hashlib.sha256(b"swarm byte tokenizer 1").hexdigest()
    separator = np.frombuffer(b"\n\n", dtype=np.uint8)
    start = np.array([], dtype=np.uint8)
    has_told_date = False
    cache_key = digest

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text, uint8."""
        return [np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8) for text in texts]

    def encode_located(self, texts: Sequence[str]) -> list[LocatedTokens]:
        """The bytes, and where each character's begin and end."""
        found = []
        for tokens in self.encode(texts):
            starts = np.cumsum((tokens & 0xC0) != 0x80) - 1  # every byte but the first of a character is 10xxxxxx
            found.append(LocatedTokens(tokens, starts, starts + 1))
        return found

    def framing(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """No token before a document, and an empty line after it."""
        return self.start, self.separator

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, is_answered: bool) -> str:
        """Raises ConfigError: there is no chat template."""
        raise ConfigError("byte-level tokens have no chat template; name a tokenizer directory that has one (--tokenizer)")

    def chat_with_marks(self, messages: Sequence[Mapping[str, Any]], *, tools: Any) -> MarkedChat | None:
        """None: there is no chat template."""
        return None


class DirectoryTokenizer:
    """A transformers tokenizer saved in a directory. Documents are split by its end-of-text token, if it has one.

    Args:
        directory: where it is.
        date: what its chat template is told if it asks for today's.

    Raises:
        ConfigError: if there is no such directory, or transformers does not understand it.
    """

    def __init__(self, directory: str, *, date: datetime.date = DATE_OF_NO_RUN) -> None:
        path = Path(directory)
        if not path.is_dir():
            raise ConfigError(f"tokenizer {directory}: no such directory")
        files = [path / name for name in sorted(TOKENIZER_FILES) if (path / name).is_file()]
        if not files:
            raise ConfigError(f"tokenizer {directory}: holds no tokenizer file such as tokenizer.json")
        try:
            from transformers import AutoTokenizer  # seconds to import: only when asked for

            # Unless it is told that code in the directory is not wanted, transformers asks on the terminal.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever the broken file led to
            if "trust_remote_code" in str(error):
                raise ConfigError(
                    f"tokenizer {directory}: it is made by code of its own (auto_map in tokenizer_config.json), which is never "
                    "run; name a directory whose tokenizer.json a class of transformers reads (--tokenizer)"
                ) from None
            raise ConfigError(f"tokenizer {directory}: {_first_line(error)}") from None
        self.vocab_size = len(self._tokenizer)
        digest = hashlib.sha256(b"swarm tokenizer directory 1")
        for file in files:
            data = file.read_bytes()
            digest.update(f"{file.name} {len(data)}\0".encode() + data)
        self.digest = digest.hexdigest()
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        end = self._tokenizer.eos_token_id
        self.separator = np.array([] if end is None else [end], dtype=self.dtype)
        self.start = self._tokens_before("a")
        self._where = f"tokenizer {directory}"
        self._midnight = datetime.datetime.combine(date, datetime.time())
        self.has_told_date = False
        asks = "strftime_now" in str(self._tokenizer.chat_template)
        libraries = [f"{name} {version(name)}" for name in ("transformers", "tokenizers")]
        self.cache_key = " ".join([self.digest, *libraries, *([date.isoformat()] if asks else [])])

    def _tokens_before(self, text: str) -> np.ndarray:
        """What the tokenizer itself puts before a text."""
        whole, own = (self._tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
        count = next((n for n in range(len(whole)) if whole[n : n + len(own)] == own), 0)
        return np.array(whole[:count], dtype=self.dtype)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without special ones; the tokenizers of transformers that are fast share the cores."""
        if not texts:
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False, verbose=False, **_NO_MASKS)["input_ids"]
        return [np.array(ids, dtype=self.dtype) for ids in found]

    def encode_located(self, texts: Sequence[str]) -> list[LocatedTokens]:
        """The tokens, and where in the text each begins and ends."""
        if not self._tokenizer.is_fast:
            raise ConfigError(f"{self._where}: has no tokenizer.json, which alone tells where each token begins")
        if not texts:
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False, **_NO_MASKS)
        located = []
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True):
            spans = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
            located.append(LocatedTokens(np.array(ids, dtype=self.dtype), spans[:, 0], spans[:, 1]))
        return located

    def framing(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that it puts before and after a text."""
        brings_start = len(self.start) > 0 and np.array_equal(ids[: len(self.start)], self.start)
        brings_end = len(self.separator) > 0 and np.array_equal(ids[-1:], self.separator)
        return self.start[: 0 if brings_start else None], self.separator[: 0 if brings_end else None]

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, is_answered: bool) -> str:
        """The conversation as its chat template writes it."""
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{self._where}: has no chat template (chat_template.jinja)")
        try:
            template = self._tokenizer.get_chat_template(None, tools or None)
            self._set_clock(template)
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools or None, chat_template=template, tokenize=False, add_generation_prompt=not is_answered
            )
        except Exception as error:  # a template raises what it likes, jinja2's own kinds among it
            raise ConfigError(f"the chat template refuses it: {_first_line(error)}") from None

    def chat_with_marks(self, messages: Sequence[Mapping[str, Any]], *, tools: Any) -> MarkedChat | None:
        """The conversation as its chat template writes it, if that marks what the assistant says."""
        if not self._tokenizer.chat_template:
            return None
        template = self._tokenizer.get_chat_template(None, tools or None)
        if not _GENERATION.search(template):
            return None
        try:
            from transformers.utils.chat_template_utils import render_jinja_template

            self._set_clock(template)
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                tools=tools or None,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # as above
            raise ConfigError(f"the chat template refuses it: {_first_line(error)}") from None
        [text], [spans] = rendered
        return MarkedChat(text, [(begin, end) for begin, end in spans if begin < end])

    def _set_clock(self, template: str) -> None:
        """Give the template the run's date. transformers keeps compiled templates and hands no function of ours to them."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        _compile_jinja_template(template).globals["strftime_now"] = self._told_date

    def _told_date(self, form: str) -> str:
        self.has_told_date = True
        return self._midnight.strftime(form)


def open_tokenizer(tokenizer: str | None, *, date: datetime.date = DATE_OF_NO_RUN) -> Tokenizer:
    """The tokenizer in directory `tokenizer`, or the byte-level one; `date` is what a chat template takes for today's.

    Raises:
        ConfigError: naming the directory and what is wrong with it.
    """
    return ByteTokenizer() if tokenizer is None else DirectoryTokenizer(tokenizer, date=date)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
