"""Rows -> tokens on the disk, in batches. Owns how a source becomes a row of tokens or examples; must not know samples.

The documents of a text stand in one row, each with the tokenizer's own first tokens, split by what ends one. Conversations,
and prompts with completions, become examples (`chat`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from blake3 import blake3

from swarm.base.errors import ConfigError
from swarm.feed.chat import ChatReader, Draft, Tally, rows_text
from swarm.feed.files import HUB_PREFIX, DataFile, files_of
from swarm.feed.hub import hub_files
from swarm.feed.rows import TEXT, KnownRow, known_row
from swarm.feed.sources import BUILTIN, FileProgress, SourceRow, builtin_records, pieces, records_of
from swarm.feed.token_files import TokenCache, TokenEntry, TokenWriter
from swarm.feed.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

#: Changes with whatever makes other tokens of the same rows.
_VERSION = "swarm tokens 1"
#: Texts that are tokenised at a time have about as many characters together.
_BATCH_CHARS = 2**22
_TOLD_EVERY_S = 5.0


def tokenised(source: str, tokenizer: Tokenizer, cache: TokenCache) -> TokenEntry:
    """The tokens of everything in `source`, and in a line what it is. `notes["told_date"]`: a chat template asked for the date.

    Raises:
        ConfigError: one line naming the file, and line or row, and what is wrong.
    """
    where = f"data {source}"
    if source == BUILTIN:
        cache, key, files = TokenCache(None), BUILTIN, []
    else:
        files = hub_files(source.removeprefix(HUB_PREFIX)) if source.startswith(HUB_PREFIX) else files_of(source)
        key = _key(files, tokenizer, where)
    stamps = _stamps(files)
    progress = FileProgress(files)

    def build(writer: TokenWriter) -> dict[str, Any]:
        rows = _known(builtin_records() if source == BUILTIN else records_of(files, progress))
        notes = _tokenise(rows, source, tokenizer, writer, _ProgressLine(where, progress, writer))
        if _stamps(files) != stamps:
            raise ConfigError(f"{where}: was changed while it was read")
        return notes

    entry = cache.open(key, tokenizer.dtype, build, where)
    tally = Tally.from_notes(entry.notes["tally"])
    level = logging.INFO if tally.is_plain() else logging.WARNING
    if source != BUILTIN:
        logger.log(level, "%s: %s", where, tally.told() if tally.conversations else rows_text(tally.shapes))
    return entry


def _stamps(files: list[DataFile]) -> list[tuple[int, int]]:
    return [((found := file.path.stat()).st_size, found.st_mtime_ns) for file in files]


def _key(files: list[DataFile], tokenizer: Tokenizer, where: str) -> str:
    """Names all that the tokens depend on."""
    digest = hashlib.sha256(f"{_VERSION}\0{tokenizer.cache_key}\0".encode())
    for file in files:
        try:
            content = blake3()
            with file.path.open("rb", buffering=0) as raw:
                while chunk := raw.read(2**20):
                    content.update(chunk)
        except OSError as error:
            raise ConfigError(f"{where}: {file.path}: {error.strerror}") from None
        digest.update(f"{file.suffix}{file.compression} {content.hexdigest()}\0".encode())
    return digest.hexdigest()[:40]


class _ProgressLine:
    """Says from time to time how far the reading is."""

    def __init__(
        self, where: str, progress: FileProgress, writer: TokenWriter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._where, self._progress, self._writer, self._clock = where, progress, writer, clock
        self._began = self._told = clock()

    def tell(self) -> None:
        now = self._clock()
        if now - self._told < _TOLD_EVERY_S:
            return
        self._told = now
        done, total = self._progress.read_bytes, self._progress.total_bytes
        left_s = (now - self._began) * (total - done) / max(1, done)
        logger.info(
            "%s: tokenised %.0f %% of %.1f MB, %.1f million tokens; about %.0f s more",
            self._where,
            100 * done / max(1, total),
            total / 1e6,
            self._writer.num_tokens / 1e6,
            left_s,
        )


_Known = tuple[SourceRow, KnownRow]


def _known(rows: Iterator[SourceRow]) -> Iterator[_Known]:
    return ((row, known_row(row.record, row.where)) for row in rows)


def _tokenise(
    rows: Iterator[_Known], source: str, tokenizer: Tokenizer, writer: TokenWriter, line: _ProgressLine
) -> dict[str, Any]:
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"data {source}: holds no text")
    rows = itertools.chain([first], rows)
    if first[1].shape == TEXT:
        tally = _write_row(rows, source, tokenizer, writer, line)
    else:
        tally = _write_examples(rows, tokenizer, writer, line)
    return {"tally": tally.notes(), "told_date": tokenizer.has_told_date}


def _batches(items: Iterator[Any], chars: Callable[[Any], int]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for item in items:
        batch.append(item)
        size += chars(item)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_row(rows: Iterator[_Known], source: str, tokenizer: Tokenizer, writer: TokenWriter, line: _ProgressLine) -> Tally:
    tally = Tally()
    last: np.ndarray | None = None

    def texts() -> Iterator[tuple[str, bool]]:
        """Pieces, and whether a document begins with each."""
        for row, known in rows:
            if known.shape != TEXT:
                raise ConfigError(f"{row.where}: is a row of {known.shape}, and those before it are of text")
            tally.shapes[TEXT] += not row.goes_on
            for number, piece in enumerate(pieces(known.record["text"])):
                yield piece, number == 0 and not row.goes_on

    for batch in _batches(texts(), lambda item: len(item[0])):
        for (_, begins), ids in zip(batch, tokenizer.encode([text for text, _ in batch]), strict=True):
            if begins:
                if last is not None:
                    writer.add_tokens(tokenizer.framing(last)[1])
                writer.add_tokens(tokenizer.framing(ids)[0])
            writer.add_tokens(ids)
            last = ids if begins or len(ids) else last
        line.tell()
    if last is None:
        raise ConfigError(f"data {source}: holds no text")
    return tally


def _write_examples(rows: Iterator[_Known], tokenizer: Tokenizer, writer: TokenWriter, line: _ProgressLine) -> Tally:
    reader = ChatReader(tokenizer)

    def conversations() -> Iterator[list[Draft]]:
        for row, known in rows:
            if known.shape == TEXT:
                raise ConfigError(f"{row.where}: is a row of text, and those before it are not")
            yield reader.drafts_of(known, row.where)

    for batch in _batches(conversations(), lambda drafts: sum(len(draft.text) for draft in drafts)):
        examples = iter(reader.examples([draft for drafts in batch for draft in drafts]))
        for drafts in batch:
            writer.add_conversation(list(itertools.islice(examples, len(drafts))))
        line.tell()
    return reader.tally
