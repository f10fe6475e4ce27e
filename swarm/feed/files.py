"""Which files a source names, and in which order. Owns suffixes, directories, splits and patterns; must not know records.

A source is a file, a directory, a pattern such as `data/*.jsonl`, or `hub:owner/name@revision#split` (see `hub`). Of a directory
whose files name their splits, as data sets on the hub do, the training split is read; its card never is.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from swarm.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: What a file with this suffix holds, whatever the case of its letters.
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "table",
    ".arrow": "table",
}
COMPRESSIONS = (".gz", ".zst")
HUB_PREFIX = "hub:"
TRAIN = "train"
#: Words of file and folder names, between other characters than letters, that name a split.
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
#: Files of a directory that describe data, or say who may use them, and are none: texts of such a name, and these.
_CARDS = ("readme", "license")
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class DataFile:
    """A file of known format: `text`, `lines` (JSON), `json`, `csv` or `table`; `compression` is a suffix or empty."""

    path: Path
    format: str
    compression: str

    @property
    def suffix(self) -> str:
        """That of the format, in small letters."""
        return _suffixes(self.path.name)[0]


def is_pattern(source: str) -> bool:
    """Whether `source` is a pattern such as `data/*.jsonl`, rather than the name of something."""
    return not os.path.exists(source) and glob.has_magic(source)


def is_there(source: str) -> bool:
    """Whether `source` names something that can be looked for: a path that exists, a pattern, or a data set on the hub."""
    return source.startswith(HUB_PREFIX) or os.path.exists(source) or is_pattern(source)


def files_of(source: str) -> list[DataFile]:
    """The files of a path or pattern, in the order in which they are read.

    Raises:
        ConfigError: one line: there is none, or its suffix is unknown.
    """
    if is_pattern(source):
        names = sorted(name for name in glob.glob(source, recursive=True) if os.path.isfile(name))
        if not names:
            raise ConfigError(f"data {source}: no file has such a name")
        return [data_file(Path(name)) for name in names]
    path = Path(source)
    if path.is_dir():
        return _files_in(path)
    if not os.path.exists(source):
        raise ConfigError(f"data {source}: no such file or directory")
    if not path.is_file():  # what is in a pipe comes once, and may never come: data are read again when a run goes on
        raise ConfigError(f"data {source}: is a {'pipe' if path.is_fifo() else 'device'}, not a file")
    return [data_file(path)]


def data_file(path: Path) -> DataFile:
    """What is known of a file by its name.

    Raises:
        ConfigError: the suffix is none of those that are read.
    """
    suffix, compression = _suffixes(path.name)
    if suffix not in FORMATS or (compression and FORMATS[suffix] == "table"):
        seen = f"the suffix {suffix + compression!r} is unknown" if suffix else "it has no suffix"
        raise ConfigError(f"data {path}: {seen}; known are {known_suffixes()}; rename it to what it is")
    return DataFile(path, FORMATS[suffix], compression)


def known_suffixes() -> str:
    """All of them, for an error."""
    return f"{', '.join(FORMATS)}, and those of text and rows with {' or '.join(COMPRESSIONS)} after it"


def _suffixes(name: str) -> tuple[str, str]:
    path = PurePosixPath(name.lower())
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return PurePosixPath(path.stem if compression else path.name).suffix, compression


def is_data(name: str) -> bool:
    """Whether a file of a directory is read as data, by its path below the directory."""
    parts = PurePosixPath(name).parts
    suffix, compression = _suffixes(parts[-1])
    known = suffix in FORMATS and not (compression and FORMATS[suffix] == "table")
    return known and not _describes(parts[-1]) and not any(part.startswith((".", "__")) for part in parts)


def _describes(file: str) -> bool:
    name, suffix = file.lower(), _suffixes(file)[0]
    return name in _NO_DATA or (FORMATS.get(suffix) == "text" and name.removesuffix(suffix) in _CARDS)


def split_of(name: str) -> str | None:
    """The split that the path of a file below its directory names, if any: the first folder that does, or the file.

    A text may have such a word in its title: there it is the whole name of the file or a folder that counts.
    """
    suffix, compression = _suffixes(name)
    is_text = FORMATS.get(suffix) == "text"
    for part in PurePosixPath(name.lower().removesuffix(suffix + compression)).parts:
        for word in [part] if is_text else re.split(r"[^a-z]+", part):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def of_split(names: Iterable[str], split: str, where: str) -> list[str]:
    """Those of `names` that are of `split`; for training also those of no split, where no file names that for training.

    Raises:
        ConfigError: there is none.
    """
    splits = {name: split_of(name) for name in names}
    chosen = [name for name, found in splits.items() if found == split]
    if not chosen and split == TRAIN:
        chosen = [name for name, found in splits.items() if found is None]
    if not chosen:
        seen = ", ".join(sorted({found for found in splits.values() if found})) or "none"
        raise ConfigError(f"data {where}: holds no split {split!r}; those that file names tell: {seen}")
    return chosen


def tell_left_out(where: str, names: Sequence[str], chosen: Sequence[str]) -> None:
    """Say which files are not read."""
    left_out = sorted(set(names) - set(chosen))
    if left_out:
        listed = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if left_out[5:] else "")
        level = logging.WARNING if any(map(is_data, left_out)) else logging.INFO
        logger.log(level, "data %s: %d of %d files are read; left out: %s", where, len(chosen), len(names), listed)


def _files_in(path: Path) -> list[DataFile]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
        raise ConfigError(f"data {path}: holds the splits {', '.join(splits) or '(none)'}; name one, such as {path}/train")
    if (path / "state.json").is_file():
        return _saved_dataset(path)
    there = sorted(p for p in path.rglob("*") if p.is_file())
    data = [str(p.relative_to(path)) for p in there if is_data(str(p.relative_to(path)))]
    if not data:
        raise ConfigError(f"data {path}: the directory holds no file of data; known are {known_suffixes()}")
    chosen = of_split(data, TRAIN, str(path))
    cards = [str(p.relative_to(path)) for p in there if _describes(p.name)]
    tell_left_out(str(path), [*data, *cards], chosen)
    return [data_file(path / name) for name in chosen]


def _saved_dataset(path: Path) -> list[DataFile]:
    """The files of a directory that `Dataset.save_to_disk` wrote, in its order."""
    try:
        state = json.loads((path / "state.json").read_text())
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"data {path}: state.json is not that of a saved dataset") from None
    for file in files:
        if file.parent != path or not file.is_file():
            raise ConfigError(f"data {path}: {file.name}, which state.json names, is missing")
    return [data_file(file) for file in files]
