"""What a row is, by its columns: the shapes that other trainers read, in one of three. Must not know templates or tokens.

A row becomes `text`, or `prompt` and `completion` (texts or messages), or `messages`. ShareGPT's turns become messages; of Alpaca
the prompt is made, in the words that the Stanford data were published with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from swarm.base.errors import ConfigError

TEXT = "text"
#: Who speaks in ShareGPT, by the names that its data have for them, in the words of chat templates.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "function-response"), "tool"),
    **dict.fromkeys(("function_call", "function-call"), "assistant"),
}
_CALLERS = ("function_call", "function-call")
#: https://github.com/tatsu-lab/stanford_alpaca, PROMPT_DICT of train.py.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
_WANTED = (
    "known are messages, conversations (ShareGPT), instruction and output (Alpaca), prompt and completion, and text; rename the "
    "columns to what they are"
)


class KnownRow(NamedTuple):
    """The name of a row's shape, for people, and its record in one of the three shapes; other columns stay in it."""

    shape: str
    record: Mapping[str, Any]


def known_row(record: Mapping[str, Any], where: str) -> KnownRow:
    """Recognise a row.

    Raises:
        ConfigError: one line: where it stands, and the columns that it has, or which of them is malformed.
    """
    has = {column for column, value in record.items() if value is not None}
    if "messages" in has:
        return KnownRow("messages", {**record, "messages": _read(record["messages"], where, "messages")})
    if "prompt" in has and "completion" in record:
        return KnownRow("prompt and completion", record)
    if isinstance(record.get("text"), str):
        return KnownRow(TEXT, record)
    if "conversations" in has:
        return _conversations(record, where)
    if "instruction" in has and "output" in record:
        return KnownRow("Alpaca", _alpaca(record, where))
    if "text" in has:
        raise ConfigError(f"{where}: text is no string")
    raise ConfigError(f"{where}: nothing here reads a row of {', '.join(sorted(map(str, has)))[:300] or 'no column'}: {_WANTED}")


def _read(value: Any, where: str, column: str) -> Any:
    """The turns themselves: a table of text keeps them as JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: {column} is neither a list nor the JSON of one") from None


def _conversations(record: Mapping[str, Any], where: str) -> KnownRow:
    turns = _read(record["conversations"], where, "conversations")
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ConfigError(f'{where}: conversations is no list of turns such as {{"from": "human", "value": "..."}}')
    others = {name: value for name, value in record.items() if name not in ("conversations", "system")}
    spoken = any(turn.get("from") is not None for turn in turns)
    messages = [_message(turn, where) if spoken else dict(turn) for turn in turns]
    if record.get("system"):
        if messages and messages[0].get("role") == "system":
            raise ConfigError(f"{where}: the column system stands beside a first turn of the system; keep one of them")
        messages.insert(0, {"role": "system", "content": record["system"]})
    return KnownRow("ShareGPT" if spoken else "conversations", {**others, "messages": messages})


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    speaker, said = turn.get("from"), turn.get("value")
    if speaker not in _SPEAKERS:
        raise ConfigError(f"{where}: conversations: nobody is called {str(speaker)[:40]!r}; known are {', '.join(_SPEAKERS)}")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker not in _CALLERS:
        return {"role": _SPEAKERS[speaker], "content": said, **others}
    return {"role": _SPEAKERS[speaker], "tool_calls": _calls(said, where), **others}


def _calls(said: Any, where: str) -> list[Any]:
    """The calls that a turn of `function_call` writes: JSON of one, or of a list of them."""
    try:
        calls = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not calls or not all(isinstance(call, Mapping) and call.get("name") for call in calls):
        raise ConfigError(f'{where}: conversations: a function_call is no JSON such as {{"name": "...", "arguments": {{}}}}')
    return [{"type": "function", "function": dict(call)} for call in calls]


def _alpaca(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    told = {column: record.get(column) or "" for column in ("instruction", "input", "output")}
    for column, value in told.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {column} is no text")
    prompt = (_ALPACA_WITH_INPUT if told["input"] else _ALPACA).format_map(told)
    others = {name: value for name, value in record.items() if name not in told}
    return {**others, "prompt": prompt, "completion": told["output"]}
