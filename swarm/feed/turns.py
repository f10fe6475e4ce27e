"""What a record of a conversation says: its turns, which of them are trained, its tools. Must not know templates or tokens.

Content in parts becomes one text, tools that are written as JSON are read, and marks that keep an answer from being
trained (`"weight": 0`, `"train": false`) are heeded and taken off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.base.errors import ConfigError

#: Who speaks the turns that are trained.
TRAINED_ROLE = "assistant"
#: Keys of a message that say whether it is trained, by 1 or 0, true or false: of fine-tuning services and of trainers.
_TRAIN_MARKS = ("weight", "train", "training", "loss")
_TEXT_PARTS = ("text", "input_text", "output_text")
_KNOWN_FIELDS = frozenset({"messages", "prompt", "completion", "tools"})


@dataclass(frozen=True)
class Conversation:
    """Messages without their marks, the indices of the answers that are trained, and what the template gets as tools."""

    messages: list[dict[str, Any]]
    trained: list[int]
    #: Answers that their marks keep from being trained.
    num_untrained: int
    tools: list[Any] | None


def unknown_fields(record: Mapping[str, Any]) -> Iterator[str]:
    """Fields of the record that nothing here reads: those of other formats, and notes of whoever collected the data."""
    for field, value in record.items():
        if value is not None and (field not in _KNOWN_FIELDS or (field in ("prompt", "completion") and record.get("messages"))):
            yield str(field)


def conversation_of(record: Mapping[str, Any], where: str) -> Conversation:
    """The turns of `messages`, or of `prompt` and `completion` as lists of messages; a prompt is never trained.

    Raises:
        ConfigError: one line: where it stands, and which field is malformed.
    """
    fields = ["messages"] if record.get("messages") is not None else ["prompt", "completion"]
    messages: list[dict[str, Any]] = []
    trained: list[int] = []
    num_answers = 0
    for field in fields:
        for message in _messages(record[field], where, field):
            marked = _mark(message, f"{where}: {field}")
            if message["role"] == TRAINED_ROLE and field != "prompt":
                num_answers += 1
                trained += [len(messages)] if marked in (None, True) else []
            elif marked:
                raise ConfigError(
                    f"{where}: {field}: a message of the role {message['role']!r} is marked to be trained; "
                    f"only those of {TRAINED_ROLE!r} are"
                )
            messages.append({key: value for key, value in message.items() if key not in _TRAIN_MARKS})
    if not num_answers:
        raise ConfigError(f"{where}: no message has the role {TRAINED_ROLE!r}: there is nothing to learn")
    return Conversation(messages, trained, num_answers - len(trained), _tools(record.get("tools"), where))


def _messages(value: Any, where: str, field: str) -> list[dict[str, Any]]:
    messages = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not messages or not all(isinstance(x, Mapping) and isinstance(x.get("role"), str) for x in messages):
        raise ConfigError(f'{where}: {field} is no list of messages such as {{"role": "user", "content": "..."}}')
    # A table gives every message every column, with None where there was nothing.
    told = [{key: part for key, part in message.items() if part is not None} for message in messages]
    for message in told:
        place = f"{where}: {field}"
        if isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str):
            message["content"] = "".join(_text_of(part, place) for part in message["content"])
        elif "content" in message and not isinstance(message["content"], str):
            raise ConfigError(f"{place}: the content of a message is {_kind(message['content'])}, not text")
        if "tool_calls" in message:
            message["tool_calls"] = _decoded(message["tool_calls"], f"{place}: tool_calls")
    return told


def _text_of(part: Any, place: str) -> str:
    """The text of one part of a message's content."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type") or "text"
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            return part["text"]
        raise ConfigError(f"{place}: a part of the content is of the type {kind!r}; only text can be trained here")
    raise ConfigError(f"{place}: a part of the content is {_kind(part)}, not text")


def _mark(message: Mapping[str, Any], place: str) -> bool | None:
    """Whether a message is marked to be trained, or not to be; None without a mark."""
    marks = {key: message[key] for key in _TRAIN_MARKS if key in message}
    for key, value in marks.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ConfigError(f"{place}: {key!r} of a message is {str(value)[:40]!r}; an answer is trained (1) or not (0)")
    return all(marks.values()) if marks else None


def _tools(value: Any, where: str) -> list[Any] | None:
    if not value:
        return None
    tools = _decoded(value, f"{where}: tools")
    return [json.loads(tool) if isinstance(tool, str) and _is_json_object(tool) else tool for tool in tools]


def _decoded(value: Any, place: str) -> list[Any]:
    """A list, or the JSON of one: a column of a table has one shape, so that what varies is often kept as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{place} is neither a list nor the JSON of one") from None
    if value is None or (isinstance(value, Sequence) and not isinstance(value, str)):
        return list(value or [])
    raise ConfigError(f"{place} is {_kind(value)}, not a list")


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _kind(value: Any) -> str:
    return {dict: "a mapping", bool: "a truth value", list: "a list", str: "text"}.get(
        type(value), "a number" if isinstance(value, int | float) else "of another kind"
    )
