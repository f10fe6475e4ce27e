"""Tokens on the disk: how they are written, mapped and shared by the processes of a machine. Must not know texts or samples.

An entry of the cache is a directory named after all that its tokens depend on. One process writes it, aside, while it holds the
entry's lock; the others wait for that. A writer that is killed leaves a directory that the next one begins again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.base.errors import ConfigError
from swarm.feed.examples import Example, Examples
from swarm.feed.mapped import mapped
from swarm.feed.memo import NO_MEMO, Memo

logger = logging.getLogger(__name__)

_TOKENS, _TRAINED, _STARTS, _FIRSTS, _CONVERSATIONS = "tokens", "trained", "starts", "first_trained", "conversations"
#: Says what the entry is. It is written last.
_ABOUT = "about.json"
#: An entry that nobody has opened for so long is removed when another one is written.
_KEPT_S = 30 * 86400.0

#: A row of tokens, or examples by their conversations.
Content = np.ndarray | Examples


@dataclass(frozen=True)
class TokenEntry:
    """Tokens that were read back, what was noted of them, and where more can be remembered."""

    content: Content
    notes: dict[str, Any]
    memo: Memo


class TokenWriter:
    """Writes the tokens of a source into an empty directory: a row of them, or examples.

    Args:
        directory: where.
        dtype: of the tokens.
    """

    def __init__(self, directory: Path, dtype: np.dtype) -> None:
        self._directory = directory
        self._dtype = dtype.newbyteorder("<")
        self._tokens = (directory / _TOKENS).open("wb")
        self._trained = (directory / _TRAINED).open("wb")
        #: As in `Examples`; 16 bytes an example and 8 a conversation are in memory while they are written.
        self._starts, self._firsts, self._conversations = array("q", [0]), array("q"), array("q", [0])
        self._is_examples = False
        self.num_tokens = 0

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Go on with the row."""
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += len(tokens)

    def add_conversation(self, examples: Sequence[Example]) -> None:
        """The examples of one more conversation, perhaps none."""
        self._is_examples = True
        for example in examples:
            self.add_tokens(example.tokens)
            self._trained.write(example.trained.tobytes())
            self._starts.append(self.num_tokens)
            self._firsts.append(example.first_trained())
        self._conversations.append(len(self._firsts))

    def finish(self, notes: dict[str, Any]) -> None:
        """Let everything reach the disk; `notes` are read back with the tokens."""
        for name, values in ((_STARTS, self._starts), (_FIRSTS, self._firsts), (_CONVERSATIONS, self._conversations)):
            np.array(values, np.int64).astype("<i8").tofile(self._directory / name)
        for file in (self._tokens, self._trained):
            file.flush()
            os.fsync(file.fileno())
        self.close()
        sizes = {path.name: path.stat().st_size for path in self._directory.iterdir()}
        about = {"dtype": self._dtype.str, "is_examples": self._is_examples, "sizes": sizes, "notes": notes}
        (self._directory / _ABOUT).write_text(json.dumps(about))

    def close(self) -> None:
        """Close the files, whatever is in them."""
        self._tokens.close()
        self._trained.close()


#: Writes all tokens; returns what is to be noted.
Build = Callable[[TokenWriter], dict[str, Any]]


class TokenCache:
    """The tokens of this machine's processes, by key.

    Args:
        directory: is made if it is not there. None keeps nothing: tokens are in files that go with the process.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def open(self, key: str, dtype: np.dtype, build: Build, where: str) -> TokenEntry:
        """The entry `key`, which `build` writes if no process has; `where` names its source.

        Raises:
            ConfigError: what `build` raises; or the disk is full.
        """
        if self._directory is not None:
            try:
                with _locked(self._directory, key, where):
                    return self._shared(self._directory / key, dtype, build)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise ConfigError(f"{where}: no room for its tokens in {self._directory}") from None
                logger.warning("%s: its tokens cannot be kept in %s (%s)", where, self._directory, error.strerror)
        try:
            with tempfile.TemporaryDirectory(prefix="swarm-tokens-") as name:
                _write(Path(name), dtype, build)
                return _read(Path(name), NO_MEMO)  # what is mapped stays when its file's name is gone
        except OSError as error:
            raise ConfigError(f"{where}: its tokens cannot be written to {tempfile.gettempdir()}: {error.strerror}") from None

    def _shared(self, entry: Path, dtype: np.dtype, build: Build) -> TokenEntry:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = _read(entry, Memo(entry))
            os.utime(entry)
            return found
        partial = entry.with_name(f"{entry.name}.partial")
        for old in (partial, entry):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        try:
            _write(partial, dtype, build)
            partial.replace(entry)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _remove_old(entry.parent)
        return _read(entry, Memo(entry))


@contextlib.contextmanager
def _locked(directory: Path, key: str, where: str) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{key}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: another process tokenises it, waiting for that", where)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(directory: Path, dtype: np.dtype, build: Build) -> None:
    writer = TokenWriter(directory, dtype)
    try:
        writer.finish(build(writer))
    finally:
        writer.close()


def _read(directory: Path, memo: Memo) -> TokenEntry:
    """Raises OSError, ValueError or KeyError: nothing whole is there."""
    about = json.loads((directory / _ABOUT).read_bytes())
    for name, size in about["sizes"].items():
        if (directory / name).stat().st_size != size:
            raise ValueError(f"{name} is not whole")
    tokens_N = mapped(directory / _TOKENS, np.dtype(about["dtype"]))
    if not about["is_examples"]:
        return TokenEntry(tokens_N, about["notes"], memo)
    trained_N = mapped(directory / _TRAINED, np.dtype(bool))
    edges = [np.fromfile(directory / name, "<i8") for name in (_STARTS, _FIRSTS, _CONVERSATIONS)]
    return TokenEntry(Examples(tokens_N, trained_N, *edges), about["notes"], memo)


def _remove_old(directory: Path) -> None:
    """Entries and halves of them that nobody has used for a month; who has one open keeps it."""
    oldest = time.time() - _KEPT_S
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if path.is_dir() and path.stat().st_mtime < oldest:
                shutil.rmtree(path)
