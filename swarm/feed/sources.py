"""Records of files, one after the other. Owns reading and decompressing; must not know tokens, samples or what columns mean.

A record is a mapping such as `{"text": ...}`. A text file is one document, which comes as records of whole lines. Nothing here
holds more of a file than a record, a piece of text or a batch of a table. parquet and arrow files, and zstd, are read with
pyarrow, which is optional.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from swarm.base.errors import ConfigError
from swarm.feed.files import DataFile
from swarm.feed.json_text import array_entries, is_lines

BUILTIN = "builtin"
#: How to get what reads tables and zstd.
INSTALL = "pip install 'swarm-train[data]'"
#: Rows of a table that are in memory as Python objects at a time.
_ROWS_AT_ONCE = 1024
_CHUNK_BYTES = 2**20
#: Long documents come in pieces of whole lines of about this many characters.
_PIECE_CHARS = 2**20
#: An escape that may stand for half of a character that takes two.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")

Record = Mapping[str, Any]


class SourceRow(NamedTuple):
    """A record, where it stands, for errors, and whether it goes on with the document of the one before."""

    where: str
    record: Record
    goes_on: bool = False


class FileProgress:
    """How far the reading of files is."""

    def __init__(self, files: list[DataFile]) -> None:
        self._sizes = [file.path.stat().st_size for file in files]
        self._done = 0
        self._file: BinaryIO | None = None

    @property
    def total_bytes(self) -> int:
        """All files have so many on the disk."""
        return sum(self._sizes)

    @property
    def read_bytes(self) -> int:
        """So many of them are read, about."""
        at = self._file.tell() if self._file is not None and not self._file.closed else 0
        return sum(self._sizes[: self._done]) + at

    def begins(self, file: BinaryIO) -> None:
        """The next file is open."""
        self._file = file

    def has_ended(self) -> None:
        """The file has been read."""
        self._file = None
        self._done += 1


def records_of(files: list[DataFile], progress: FileProgress | None = None) -> Iterator[SourceRow]:
    """Every record of `files`, in order.

    Raises:
        ConfigError: one line naming the file, and line or row, and what is wrong.
    """
    readers = {"text": _text_records, "lines": _line_records, "json": _json_records, "csv": _csv_records, "table": _table_records}
    for file in files:
        try:
            with file.path.open("rb") as raw:
                if progress is not None:
                    progress.begins(raw)
                yield from readers[file.format](file, raw)
        except (OSError, EOFError, zlib.error) as error:  # gzip's own is an OSError
            reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:300]
            raise ConfigError(f"data {file.path}: {reason}") from None
        if progress is not None:
            progress.has_ended()


def builtin_records() -> Iterator[SourceRow]:
    """About 460 KB of English that every CPython ships; its text (thus the data digest) differs between releases."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield SourceRow(f"data {BUILTIN}, {name}", {"text": topics[name]})


def pieces(text: str) -> Iterator[str]:
    """A document in pieces of whole lines: always the same ones."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 if len(text) - start > _PIECE_CHARS else len(text)
        end = end or len(text)
        yield text[start:end]
        start = end


def _opened(file: DataFile, raw: BinaryIO) -> BinaryIO:
    if file.compression == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if file.compression == ".zst":
        return io.BufferedReader(_pyarrow(file).CompressedInputStream(raw, "zstd"), _CHUNK_BYTES)
    return raw


def _pyarrow(file: DataFile) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"data {file.path}: reading it needs pyarrow: {INSTALL}") from None
    return pyarrow


def _characters(file: DataFile, raw: BinaryIO) -> Iterator[str]:
    """The text of a file in chunks."""
    stream, decoder, start = _opened(file, raw), codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        chunk = stream.read(_CHUNK_BYTES)
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data {file.path}: byte {start - held + error.start} is not UTF-8") from None
        yield text.removeprefix("\ufeff") if not start else text
        start += len(chunk)
        if not chunk:
            return


def _text_records(file: DataFile, raw: BinaryIO) -> Iterator[SourceRow]:
    where, waiting = f"data {file.path}", ""
    goes_on = is_said = False
    for chunk in _characters(file, raw):
        waiting += chunk
        is_said = is_said or not (chunk.isspace() or not chunk)
        while len(waiting) > _PIECE_CHARS and (end := waiting.find("\n", _PIECE_CHARS) + 1):
            yield SourceRow(where, {"text": waiting[:end]}, goes_on)
            goes_on, waiting = True, waiting[end:]
    if not is_said:
        raise ConfigError(f"{where}: the file is empty")
    if waiting:
        yield SourceRow(where, {"text": waiting}, goes_on)


def _line_records(file: DataFile, raw: BinaryIO) -> Iterator[SourceRow]:
    is_said = False
    for number, line in enumerate(_opened(file, raw), start=1):
        where = f"data {file.path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: byte {error.start} of it is not UTF-8") from None
        if text.isspace() or not text:
            continue
        is_said = True
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: is not JSON") from None
        yield _json_row(where, record, text)
    if not is_said:
        raise ConfigError(f"data {file.path}: the file is empty")


def _json_row(where: str, record: Any, text: str) -> SourceRow:
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: is no JSON object")
    if _HALF.search(text):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{where}: holds half of a character (\\ud800 to \\udfff by itself)") from None
    return SourceRow(where, record)


def _json_records(file: DataFile, raw: BinaryIO) -> Iterator[SourceRow]:
    """An array of rows, an object with one such array, or lines."""
    chunks = _characters(file, raw)
    first = next(chunks)
    if is_lines(first):
        raw.seek(0)
        yield from _line_records(file, raw)
        return
    for number, (record, text) in enumerate(array_entries(first, chunks, f"data {file.path}"), start=1):
        yield _json_row(f"data {file.path}, entry {number}", record, text)


def _csv_records(file: DataFile, raw: BinaryIO) -> Iterator[SourceRow]:
    csv.field_size_limit(sys.maxsize)  # Python's own is 128 KB
    text = io.TextIOWrapper(_opened(file, raw), encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
    try:
        columns = next(reader, None)
        if not columns:
            raise ConfigError(f"data {file.path}: the file is empty")
        if len(set(columns)) < len(columns):
            raise ConfigError(f"data {file.path}: two columns of the first line have one name: {', '.join(columns)[:200]}")
        for fields in reader:
            where = f"data {file.path}, line {reader.line_num}"
            if len(fields) != len(columns) and fields:
                raise ConfigError(f"{where}: {len(fields)} fields, and the first line names {len(columns)} columns")
            if fields:
                yield SourceRow(where, dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"data {file.path}, line {reader.line_num}: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"data {file.path}, after line {reader.line_num}: is not UTF-8") from None


def _table_records(file: DataFile, raw: BinaryIO) -> Iterator[SourceRow]:
    pyarrow, number = _pyarrow(file), 0
    try:
        for batch in _batches(file, raw, pyarrow):
            for record in batch.to_pylist():
                yield SourceRow(f"data {file.path}, row {number}", record)
                number += 1
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"data {file.path}: {reason}") from None


def _batches(file: DataFile, raw: BinaryIO, pyarrow: Any) -> Iterator[Any]:
    if file.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(raw) as table:
            yield from table.iter_batches(batch_size=_ROWS_AT_ONCE)
        return
    with pyarrow.ipc.open_stream(raw) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)
