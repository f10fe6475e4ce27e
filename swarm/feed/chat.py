"""Conversations and instructions -> tokens, and which of them are trained. Owns the masking; must not know files.

`messages` go through the tokenizer's chat template, and what the assistant says (its end-of-turn mark included) is
trained. `prompt` and `completion` are either such lists of messages, or plain strings that are simply joined, with the
tokenizer's own first and last tokens around them. Prompts are read and never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.base.errors import ConfigError
from swarm.feed.tokenizers import Tokenizer

Messages = Sequence[Mapping[str, Any]]
#: Who speaks the turns that are trained.
_TRAINED_ROLE = "assistant"


@dataclass(frozen=True)
class Example:
    """One conversation: unsigned tokens [n], and bool [n]: is this token learnt?"""

    tokens: np.ndarray
    trained: np.ndarray


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Whether a record is a conversation or an instruction, rather than text."""
    return record.get("messages") is not None or (record.get("prompt") is not None and "completion" in record)


def example_of(record: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Example:
    """The tokens of one record.

    Raises:
        ConfigError: one line: where it stands, and which field is malformed or what the chat template says.
    """
    if record.get("messages") is not None:
        messages = _messages(record["messages"], where, "messages")
        return _chat_example(messages, _last_turns(messages), record, tokenizer, where)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _joined(prompt, completion, tokenizer, where)
    first = _messages(prompt, where, "prompt")
    second = _messages(completion, where, "completion")
    turns = [len(first) + turn for turn in _last_turns(second)]
    return _chat_example([*first, *second], turns, record, tokenizer, where)


def _messages(value: Any, where: str, field: str) -> list[dict[str, Any]]:
    messages = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not messages or not all(isinstance(x, Mapping) and isinstance(x.get("role"), str) for x in messages):
        raise ConfigError(f'{where}: {field} is no list of messages such as {{"role": "user", "content": "..."}}')
    # A table gives every message every column, with None where there was nothing.
    return [{key: part for key, part in message.items() if part is not None} for message in messages]


def _last_turns(messages: Messages) -> list[int]:
    return [turn for turn, message in enumerate(messages) if message["role"] == _TRAINED_ROLE]


def _joined(prompt: str, completion: str, tokenizer: Tokenizer, where: str) -> Example:
    if not completion:
        raise ConfigError(f"{where}: the completion is empty")
    ids, starts = tokenizer.encode_located(prompt + completion)
    tokens = np.concatenate([tokenizer.start, ids, tokenizer.separator])
    is_prompt = [np.ones(len(tokenizer.start), bool), starts < len(prompt), np.zeros(len(tokenizer.separator), bool)]
    return Example(tokens, ~np.concatenate(is_prompt))


def _chat_example(
    messages: Messages, turns: Sequence[int], record: Mapping[str, Any], tokenizer: Tokenizer, where: str
) -> Example:
    """Find each turn's text in the whole: what comes after the template of all before it, up to its own end.

    A template may rewrite earlier turns as a conversation grows (thinking is cut out of them, say): what such a turn
    once was stands nowhere in the text, so it is not trained; the last turn always is.
    """
    if not turns:
        raise ConfigError(f"{where}: no message has the role {_TRAINED_ROLE!r}: there is nothing to learn")
    tools = record.get("tools")

    def render(end: int, *, is_answered: bool) -> str:
        try:
            return tokenizer.chat(messages[:end], tools=tools, is_answered=is_answered)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    end = turns[-1] + 1
    text = render(end, is_answered=True)
    ids, starts = tokenizer.encode_located(text)
    trained = np.zeros(len(ids), dtype=bool)
    for turn in turns:
        before = [render(turn, is_answered=answered) for answered in (False, True)] if turn else [""]
        begin = next((len(part) for part in before if text.startswith(part)), None)
        own = text if turn == turns[-1] else render(turn + 1, is_answered=True)
        if begin is not None and text.startswith(own):
            trained |= (starts >= begin) & (starts < len(own))
        elif turn == turns[-1]:
            raise ConfigError(f"{where}: the chat template rewrites the conversation before its last answer")
    return Example(ids, trained)
