"""What one chat template wants of its messages. Owns the questions put to it; must not know records, masks or files.

Templates disagree about the shape of a message: some want its text as a list of parts, some the arguments of a tool
call as a mapping and others as JSON, some fail where a call comes without text. What a template wants is found by
letting it write short conversations and looking for their words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swarm.base.errors import ConfigError
from swarm.feed.tokenizers import Tokenizer

#: A text that no conversation holds: a character that Unicode keeps for private use.
NO_WORD = "\ue000"
_QUESTION = {"role": "user", "content": "quaestio"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "nomen",
        "description": "munus",
        "parameters": {"type": "object", "properties": {"clavis": {"type": "string", "description": "res"}}},
    },
}


@dataclass(frozen=True)
class _Calls:
    """How tool calls are written: arguments as a mapping or as JSON, and whether they need a text beside them."""

    as_mapping: bool
    with_content: bool


class Dialect:
    """Rewrites messages for the template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same messages in the shape that the template wants.

        Raises:
            ConfigError: the arguments of a tool call are no JSON, where the template wants them read.
        """
        return [self._of(message) for message in messages]

    def _of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        told = dict(message)
        if told.get("tool_calls") and (calls := self._calls) is not None:
            told["tool_calls"] = [_call(call, as_mapping=calls.as_mapping) for call in told["tool_calls"]]
            if calls.with_content:
                told.setdefault("content", "")
        if self._in_parts and "content" in told:
            told["content"] = [{"type": "text", "text": told["content"]}]
        return told

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls in one of the known ways."""
        return self._calls is not None

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template writes text only where it comes as a list of parts."""
        if self._writes([_QUESTION], "quaestio"):
            return False
        return self._writes([{**_QUESTION, "content": [{"type": "text", "text": "quaestio"}]}], "quaestio")

    @cached_property
    def _calls(self) -> _Calls | None:
        """The first of the known ways that this template writes as it should; None if it writes no tool calls."""
        for calls in (_Calls(mapping, content) for content in (False, True) for mapping in (True, False)):
            arguments: Any = {"clavis": "valor"}
            call = {
                "id": "abcdef123",
                "type": "function",
                "function": {"name": "nomen", "arguments": arguments if calls.as_mapping else json.dumps(arguments)},
            }
            answer = {"role": "assistant", "tool_calls": [call], **({"content": ""} if calls.with_content else {})}
            if self._writes([_QUESTION, answer], "nomen", "clavis", "valor", never=("{'clavis'", '\\"clavis', "None")):
                return calls
        return None

    def _writes(self, messages: Sequence[Mapping[str, Any]], *words: str, never: Sequence[str] = ()) -> bool:
        """Whether all `words` are in the text that the last message adds, and none of `never` is."""
        tools = [_TOOL] if len(messages) > 1 else None
        try:
            text = self._tokenizer.chat(messages, tools=tools, is_answered=True)
            before = self._tokenizer.chat(messages[:-1], tools=tools, is_answered=True) if messages[1:] else ""
        except ConfigError:
            return False
        added = text[len(before) :] if text.startswith(before) else text.rpartition("quaestio")[2]
        return all(word in added for word in words) and not any(word in added for word in never)


def _call(call: Any, *, as_mapping: bool) -> Any:
    """One tool call with its arguments in the wanted shape."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], as_mapping=as_mapping)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and as_mapping:
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigError(f"the arguments of the tool call {str(call.get('name'))[:60]!r} are no JSON object")
    elif isinstance(arguments, Mapping) and not as_mapping:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": arguments} if "arguments" in call else dict(call)
