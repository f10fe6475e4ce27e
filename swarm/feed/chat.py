"""Conversations and instructions -> tokens, and which of them are trained. Owns the masking; must not know files.

`messages` go through the tokenizer's chat template, and what the assistant says (its end-of-turn mark included) is
trained. `prompt` and `completion` are either such lists of messages, or plain strings that are simply joined, with the
tokenizer's own first and last tokens around them. Prompts are read and never trained; a token that holds characters of
both a prompt and what follows it is trained.

An answer is trained in the words that the model would have to find: what the template writes for a conversation that
ends with it, after what it writes to ask for it. Most templates write a conversation so that all its answers stand in one
text. Others change earlier turns as it grows (thoughts are cut out of them, say): an answer whose words stand no more in
the text of the later ones then gets an example of its own, which ends with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swarm.base.errors import ConfigError
from swarm.feed.dialect import NO_WORD, Dialect
from swarm.feed.tokenizers import Tokenizer
from swarm.feed.turns import TRAINED_ROLE, Conversation, conversation_of, unknown_fields

#: Keys that are not looked for: what every template reads, and what a tool's answer may say of its call.
_BOOKKEEPING = {"tool": frozenset({"role", "content", "tool_call_id", "name"})}
_ALWAYS = frozenset({"role", "content"})
#: Messages with a key that a template has not read so far are looked at so often; then it never will.
_LOOKS = 16
#: Characters between a template's mark of an answer and the answer, at most.
_MARGIN = 64
#: Characters before an answer that are the end of its prompt, at least, where the rest of the prompt is not there.
_ALIKE = 4


#: What splits a content into thoughts and answer, which a template may write apart.
_THINKING = re.compile(r"</?think>")


@dataclass(frozen=True)
class Example:
    """One conversation: unsigned tokens [n], and bool [n]: is this token learnt?"""

    tokens: np.ndarray
    trained: np.ndarray


@dataclass
class Tally:
    """What became of the conversations that were read."""

    conversations: int = 0
    #: Answers that are trained; those among them that need an example of their own; those whose own end is not trained.
    answers: int = 0
    alone: int = 0
    open_ended: int = 0
    #: Answers that are marked not to be trained; that the template does not write after its prompt; or not whole.
    marked: int = 0
    lost: int = 0
    partial: int = 0
    #: Conversations that are left out, since no answer of them is trained.
    empty: int = 0
    #: Fields of records, and keys of messages, that change nothing, and how many have them.
    unread: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """One line for people."""
        parts = [f"{self.conversations} conversations, {self.answers} answers are trained"]
        for count, what in (
            (self.marked, "are marked not to be"),
            (self.lost, "are not, for the chat template does not write what they say after its own prompt"),
            (self.alone, "are examples of their own, for the chat template rewrites them once the conversation goes on"),
            (self.open_ended, "end otherwise before a next turn, which is not trained"),
            (self.partial, "are not written whole by the chat template"),
        ):
            parts += [f"{count} {what}"] if count else []
        parts += [f"{self.empty} conversations are left out: no answer of theirs is trained"] if self.empty else []
        if self.unread:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.unread.items())[:20])
            parts.append(f"nothing reads {named}")
        return "; ".join(parts)

    def is_plain(self) -> bool:
        """Whether there is nothing but answers that are trained or marked not to be."""
        return not (self.alone or self.open_ended or self.lost or self.partial or self.empty or self.unread)


@dataclass(frozen=True)
class _Answer:
    """One answer: which turn it is, the text that ends with it, and where it begins there."""

    turn: int
    text: str
    begin: int


class ChatReader:
    """Makes examples of records with one tokenizer, and counts in `tally` what became of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tally = Tally()
        self._tokenizer = tokenizer
        self._dialect = Dialect(tokenizer)
        self._read_keys: set[str] = set()

    def examples_of(self, record: Mapping[str, Any], where: str) -> list[Example]:
        """The examples of one record: one as a rule, several if the template rewrites answers, none if none is trained.

        Raises:
            ConfigError: one line: where it stands, and which field is malformed or what the chat template says.
        """
        prompt, completion = record.get("prompt"), record.get("completion")
        self.tally.unread.update(unknown_fields(record))
        if record.get("messages") is None and isinstance(prompt, str) and isinstance(completion, str):
            examples = [self._joined(prompt, completion, where)]
        else:
            conversation = conversation_of(record, where)
            self.tally.marked += conversation.num_untrained
            try:
                examples = self._chat(conversation)
            except ConfigError as error:
                calls = any("tool_calls" in message for message in conversation.messages) and not self._dialect.writes_calls
                raise ConfigError(f"{where}: {error}" + " (it writes no tool calls)" * calls) from None
        self.tally.conversations += 1
        self.tally.empty += not examples
        return examples

    def _joined(self, prompt: str, completion: str, where: str) -> Example:
        if not completion:
            raise ConfigError(f"{where}: the completion is empty")
        ids, _, ends = self._tokenizer.encode_located(prompt + completion)
        before, after = self._tokenizer.framing(ids)
        self.tally.answers += 1
        trained = [np.zeros(len(before), bool), ends > len(prompt), np.ones(len(after), bool)]
        return Example(np.concatenate([before, ids, after]), np.concatenate(trained))

    # ---------------------------------------------------------------------------------------- conversations

    def _chat(self, conversation: Conversation) -> list[Example]:
        texts = _Texts(self._tokenizer, self._dialect.of(conversation.messages), conversation.tools)
        end = max(conversation.trained, default=-1) + 1
        self._look_for_unread(texts, end)
        found = [texts.answer(turn) if self._says_something(texts.messages[turn]) else None for turn in conversation.trained]
        waiting = [answer for answer in found if answer is not None]
        self.tally.lost += len(found) - len(waiting)
        self.tally.answers += len(waiting)
        for turn, answer in zip(conversation.trained, found, strict=True):
            said = _THINKING.split(conversation.messages[turn].get("content", ""))
            self.tally.partial += answer is not None and not all(part.strip() in answer.text[answer.begin :] for part in said)
        examples: list[Example] = []
        while waiting:
            examples.insert(0, self._example(waiting, texts))
        self.tally.alone += max(0, len(examples) - 1)
        return examples

    def _says_something(self, message: Mapping[str, Any]) -> bool:
        """Whether an answer is more than tool calls that the template leaves out."""
        return "tool_calls" not in message or bool(message.get("content")) or self._dialect.writes_calls

    def _example(self, waiting: list[_Answer], texts: _Texts) -> Example:
        """An example of the last of `waiting` and of all others whose words stand in its text; it takes them out."""
        text = waiting[-1].text
        ids, starts, ends = self._tokenizer.encode_located(text)
        trained = np.zeros(len(ids), dtype=bool)
        for answer in tuple(waiting):
            if text.startswith(answer.text):
                trained |= (ends > answer.begin) & (starts < len(answer.text))
            elif (stop := _shared(text, answer.text)) > answer.begin and stop >= texts.end_of_words(answer):
                trained |= (ends > answer.begin) & (ends <= stop)
                self.tally.open_ended += 1
            else:
                continue
            waiting.remove(answer)
        return Example(ids, trained)

    def _look_for_unread(self, texts: _Texts, end: int) -> None:
        """Count the keys of messages that make no difference to what the template writes."""
        for turn, message in enumerate(texts.messages[:end]):
            for key in message.keys() - self._read_keys - _BOOKKEEPING.get(message["role"], _ALWAYS):
                name = f"{key!r} of messages"
                if self.tally.unread[name] < _LOOKS and texts.depends_on(turn, key):
                    self._read_keys.add(key)
                    del self.tally.unread[name]
                else:
                    self.tally.unread[name] += 1


class _Texts:
    """What a template writes for the beginnings of one conversation."""

    def __init__(self, tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any) -> None:
        self.messages = messages
        self._tokenizer = tokenizer
        self._tools = tools

    def answer(self, turn: int) -> _Answer | None:
        """The answer at `turn`, or None if the template does not write it after its prompt.

        Raises:
            ConfigError: what the chat template says of the conversation up to there.
        """
        before = self.messages[:turn]
        text = self._render(self.messages[: turn + 1], is_answered=True)
        prompt = self._render(before, is_answered=False) if before else ""
        if before and text.startswith(prompt):
            return _Answer(turn, text, len(prompt))
        header = _shared(text, self._with_no_word(turn))  # what stands there whatever the answer is
        history = self._or_nothing(before, is_answered=True) if before else ""
        if text.startswith(history):
            # The prompt begins the answer in a way in which this one does not (with a thought, say).
            begin = min(header, _shared(text, prompt)) if before else header
            return _Answer(turn, text, max(begin, len(history)))
        # With an answer, the template writes the question otherwise: the model is asked by its prompt all the same.
        ends = range(header, max(-1, header - _MARGIN), -1)
        begin = max(ends, key=lambda end: _shared(text[:end][::-1], prompt[::-1]))
        if _shared(text[:begin][::-1], prompt[::-1]) < _ALIKE:
            return None
        return _Answer(turn, prompt + text[begin:], len(prompt))

    def end_of_words(self, answer: _Answer) -> int:
        """Where in its text an answer has said all it says; what follows merely closes it."""
        return len(answer.text) - _shared(answer.text[::-1], self._with_no_word(answer.turn)[::-1])

    def depends_on(self, turn: int, key: str) -> bool:
        """Whether the text that ends with this turn is another one, or none, without this key of its message."""
        message = {name: value for name, value in self.messages[turn].items() if name != key}
        without = self._or_nothing([*self.messages[:turn], message], is_answered=True)
        return without != self._or_nothing(self.messages[: turn + 1], is_answered=True)

    def _with_no_word(self, turn: int) -> str:
        """The text that ends with another answer in the place of this one, which shares no character with it."""
        in_parts = any(isinstance(message.get("content"), list) for message in self.messages)
        content = [{"type": "text", "text": NO_WORD}] if in_parts else NO_WORD
        return self._or_nothing([*self.messages[:turn], {"role": TRAINED_ROLE, "content": content}], is_answered=True)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, is_answered: bool) -> str:
        return self._tokenizer.chat(messages, tools=self._tools, is_answered=is_answered)

    def _or_nothing(self, messages: Sequence[Mapping[str, Any]], *, is_answered: bool) -> str:
        try:
            return self._render(messages, is_answered=is_answered)
        except ConfigError:
            return ""


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
