"""Where records come from: text files, JSONL, parquet and arrow files. Owns reading; must not know tokens or samples.

A record is a mapping such as `{"text": ...}`; a text file is one record. parquet files, and directories that
`datasets.Dataset.save_to_disk` wrote, are read with pyarrow, which is optional.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError

BUILTIN = "builtin"
_TEXT_SUFFIXES = (".txt", ".md", ".text")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_TABLE_SUFFIXES = (".parquet", ".arrow")
#: Rows of a table that are in memory as Python objects at a time.
_ROWS_AT_ONCE = 1024

Record = Mapping[str, Any]


def records_of(source: str) -> Iterator[tuple[str, Record]]:
    """Every record of `source`, in the order of paths and lines, with where it stands, for errors.

    Raises:
        ConfigError: one line naming the file, and line or row, and what is wrong.
    """
    if source == BUILTIN:
        for name, text in _builtin_texts():
            yield f"data {BUILTIN}, {name}", {"text": text}
        return
    for file in _files_of(source):
        if file.suffix in _TABLE_SUFFIXES:
            yield from _table_records(file)
        elif file.suffix in _JSONL_SUFFIXES:
            yield from _json_records(file)
        else:
            yield f"data {file}", {"text": _text_of(file)}


def _builtin_texts() -> Iterator[tuple[str, str]]:
    """About 460 KB of English that every CPython ships; its text (thus the data digest) differs between releases."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield name, topics[name]


def _files_of(source: str) -> list[Path]:
    path = Path(source)
    if not path.is_dir():
        if not os.path.exists(source):
            raise ConfigError(f"data {source}: no such file or directory")
        if not path.is_file():  # what is in a pipe comes once, and may never come: data are read again when a run goes on
            raise ConfigError(f"data {source}: is a {'pipe' if path.is_fifo() else 'device'}, not a file")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
        raise ConfigError(f"data {source}: holds the splits {', '.join(splits) or '(none)'}; name one, such as {source}/train")
    if (path / "state.json").is_file():
        return _saved_dataset(path)
    suffixes = _TEXT_SUFFIXES + _JSONL_SUFFIXES + _TABLE_SUFFIXES
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in suffixes)
    if not files:
        raise ConfigError(f"data {source}: the directory holds no {', '.join(suffixes)} file")
    return files


def _saved_dataset(path: Path) -> list[Path]:
    """The files of a directory that `Dataset.save_to_disk` wrote, in its order."""
    try:
        state = json.loads((path / "state.json").read_text())
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"data {path}: state.json is not that of a saved dataset") from None
    for file in files:
        if file.parent != path or not file.is_file():
            raise ConfigError(f"data {path}: {file.name}, which state.json names, is missing")
    return files


def _text_of(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"data {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data {path}: byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise ConfigError(f"data {path}: the file is empty")
    return text


def _json_records(path: Path) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"data {path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: is not JSON") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: is no JSON object")
        if "\\ud" in line.lower():  # an escape may stand for half of a character that takes two
            try:
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{where}: holds half of a character (\\ud800 to \\udfff by itself)") from None
        yield where, record


def _table_records(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"data {path}: reading it needs pyarrow: pip install 'swarm-train[tables]'") from None
    number = 0
    try:
        for batch in _batches(path, pyarrow):
            for record in batch.to_pylist():
                yield f"data {path}, row {number}", record
                number += 1
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"data {path}: {reason}") from None


def _batches(path: Path, pyarrow: Any) -> Iterator[Any]:
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)
        return
    with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)
