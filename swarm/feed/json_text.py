"""JSON of any size, entry by entry. Owns the walk through a text that comes in chunks; must not know files or columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from swarm.base.errors import ConfigError

_DECODER = json.JSONDecoder()
#: Arrays of objects that are a column of one row.
_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools")
_SPACE = " \t\r\n"
#: An error this near to the end of what is there may be cured by more text, and a number so near may go on.
_NEAR_END = 16


def is_lines(first: str) -> bool:
    """Whether a JSON text that begins with `first` is one object a line, rather than one array or object."""
    line, _, rest = first.lstrip().partition("\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def array_entries(first: str, rest: Iterator[str], where: str) -> Iterator[tuple[Any, str]]:
    """The entries of an array, or of the one array of objects in an object, or an object alone, each with its text.

    Raises:
        ConfigError: it is not JSON, or neither an array nor an object, or an object with several such arrays.
    """
    text = _Text(first, rest, where)
    begin = text.next_character()
    if not begin:
        raise ConfigError(f"{where}: the file is empty")
    if begin == "[":
        yield from _entries(text)
    elif begin == "{":
        yield from _entries_inside(text, where)
    else:
        raise ConfigError(f"{where}: is neither a JSON array nor an object")
    if text.next_character():
        raise ConfigError(f"{where}: goes on after its JSON; one object a line has the suffix .jsonl")


def _entries(text: _Text) -> Iterator[tuple[Any, str]]:
    text.skip("[")
    if text.next_character() == "]":
        return text.skip("]")
    while True:
        yield text.value()
        if text.next_character() != ",":
            return text.skip("]")
        text.skip(",")


def _entries_inside(text: _Text, where: str) -> Iterator[tuple[Any, str]]:
    """Those of the array in an object; other arrays may hold anything but objects. Without one the object itself is a row."""
    found: list[str] = []
    alone: dict[str, tuple[Any, str]] = {}
    text.skip("{")
    while text.next_character() != "}":
        name = str(text.value()[0])
        text.skip(":")
        if text.next_character() != "[" or name in _COLUMNS:
            alone[name] = text.value()
        else:
            for entry in _entries(text):
                if isinstance(entry[0], dict):
                    if name not in found:
                        found.append(name)
                    if len(found) > 1:
                        raise ConfigError(f"{where}: several arrays hold objects ({', '.join(found)}); keep one of them")
                    yield entry
        if text.next_character() == ",":
            text.skip(",")
        elif text.next_character() != "}":
            text.fail()
    text.skip("}")
    if not found:
        yield {name: value for name, (value, _) in alone.items()}, " ".join(told for _, told in alone.values())


class _Text:
    """What has come of the text, and how far it is read."""

    def __init__(self, first: str, rest: Iterator[str], where: str) -> None:
        self._here, self._at = first, 0
        self._rest = rest
        self._where = where
        #: Characters that are read and gone.
        self._gone = 0

    def next_character(self) -> str:
        """The next one that is no space, which stays; nothing at the end."""
        while True:
            while self._at < len(self._here):
                if self._here[self._at] not in _SPACE:
                    return self._here[self._at]
                self._at += 1
            if not self._more():
                return ""

    def skip(self, character: str) -> None:
        """Go past this one.

        Raises:
            ConfigError: another one stands there.
        """
        if self.next_character() != character:
            self.fail()
        self._at += 1

    def value(self) -> tuple[Any, str]:
        """The next value and its text.

        Raises:
            ConfigError: none stands there.
        """
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._here, self._at)
            except json.JSONDecodeError as error:
                may_go_on = error.pos >= len(self._here) - _NEAR_END or error.msg.startswith("Unterminated string")
                if not may_go_on or not self._more(len(self._here) - self._at):
                    self.fail(error.pos)
            except RecursionError:
                self.fail(self._at)
            else:
                if len(self._here) - end < _NEAR_END and self._here[end - 1] not in '}]"' and self._more():
                    continue  # a number may go on
                text = self._here[self._at : end]
                self._at = end
                return value, text

    def fail(self, at: int | None = None) -> NoReturn:
        """Raises ConfigError: what stands at this place, or where the reading is, is not JSON."""
        raise ConfigError(f"{self._where}: is not JSON at character {self._gone + (self._at if at is None else at)}")

    def _more(self, wanted: int = 0) -> bool:
        """Let at least as many characters come as `wanted`, if there are so many."""
        chunks: list[str] = []
        while sum(map(len, chunks)) <= wanted and (chunk := next((c for c in self._rest if c), "")):
            chunks.append(chunk)
        if not chunks:
            return False
        self._gone += self._at
        self._here = self._here[self._at :] + "".join(chunks)
        self._at = 0
        return True
