"""Conversations and instructions -> tokens, and which of them are trained. Owns the masking; must not know files.

`messages` go through the tokenizer's chat template, and what the assistant says (its end-of-turn mark included) is
trained; a template that marks it itself (`{% generation %}`) is taken at its word. `prompt` and `completion` are either
such lists of messages, or plain strings that are simply joined, with the tokenizer's own first and last tokens around
them. Prompts are read and never trained; a token that holds characters of both a prompt and what follows it is trained.

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
from typing import Any, NamedTuple

import numpy as np

from swarm.base.errors import ConfigError
from swarm.feed.dialect import NO_WORD, Dialect
from swarm.feed.examples import Example
from swarm.feed.rows import KnownRow, known_row
from swarm.feed.tokenizers import LocatedTokens, MarkedChat, Tokenizer
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


class _Span(NamedTuple):
    """Characters that are trained; `is_open`: a token that goes on after the end is not."""

    begin: int
    end: int
    is_open: bool = False

    def holds(self, located: LocatedTokens) -> np.ndarray:
        return (located.ends > self.begin) & (located.ends <= self.end if self.is_open else located.starts < self.end)


@dataclass(frozen=True)
class Draft:
    """The text of an example that is to be tokenised, what is trained of it, and whether the tokenizer frames it."""

    text: str
    spans: tuple[_Span, ...]
    is_framed: bool = False


@dataclass
class Tally:
    """What became of the conversations that were read."""

    conversations: int = 0
    #: Rows of each shape.
    shapes: Counter[str] = field(default_factory=Counter)
    #: Rows that are left out, since what is to be learnt is empty.
    hollow: int = 0
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

    @staticmethod
    def from_notes(notes: Mapping[str, Any]) -> Tally:
        """The tally that gave these notes."""
        return Tally(**{**notes, "shapes": Counter(notes["shapes"]), "unread": Counter(notes["unread"])})

    def notes(self) -> dict[str, Any]:
        """The counts by their names, for JSON."""
        return {**vars(self), "shapes": dict(self.shapes), "unread": dict(self.unread)}

    def told(self) -> str:
        """One line for people."""
        parts = [f"{rows_text(self.shapes)}: {self.answers:,} answers are trained"]
        for count, what in (
            (self.marked, "are marked not to be"),
            (self.lost, "are not, for the chat template does not write what they say after its own prompt"),
            (self.alone, "are examples of their own, for the chat template rewrites them once the conversation goes on"),
            (self.open_ended, "end otherwise before a next turn, which is not trained"),
            (self.partial, "are not written whole by the chat template"),
        ):
            parts += [f"{count} {what}"] if count else []
        parts += [f"{self.empty} conversations are left out: no answer of theirs is trained"] if self.empty else []
        parts += [f"{self.hollow} rows are left out: their output or completion is empty"] if self.hollow else []
        if self.unread:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.unread.items())[:20])
            parts.append(f"nothing reads {named}")
        return "; ".join(parts)

    def is_plain(self) -> bool:
        """Whether there is nothing but answers that are trained or marked not to be."""
        return not (self.alone or self.open_ended or self.lost or self.partial or self.empty or self.hollow or self.unread)


def rows_text(shapes: Mapping[str, int]) -> str:
    """How many rows there are of each shape, for people."""
    return ", ".join(f"{count:,} rows of {shape}" for shape, count in sorted(shapes.items(), key=lambda item: -item[1]))


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
        return self.examples(self.drafts_of(known_row(record, where), where))

    def examples(self, drafts: Sequence[Draft]) -> list[Example]:
        """Tokenise all at once.

        Raises:
            ConfigError: the tokenizer cannot tell where its tokens stand.
        """
        found = self._tokenizer.encode_located([draft.text for draft in drafts])
        return [self._example(draft, located) for draft, located in zip(drafts, found, strict=True)]

    def drafts_of(self, row: KnownRow, where: str) -> list[Draft]:
        """The examples of one row before they are tokenised.

        Raises:
            ConfigError: as `examples_of`.
        """
        record = row.record
        prompt, completion = record.get("prompt"), record.get("completion")
        self.tally.unread.update(unknown_fields(record))
        self.tally.shapes[row.shape] += 1
        if record.get("messages") is None and isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + completion
            # A last token of spaces may be said to begin where the text ends.
            drafts = [Draft(text, (_Span(len(prompt), len(text) + 1),), is_framed=True)]
            if not completion:
                self.tally.hollow += 1
                return []
            self.tally.answers += 1
        else:
            conversation = conversation_of(record, where)
            self.tally.marked += conversation.num_untrained
            try:
                drafts = self._chat(conversation)
            except ConfigError as error:
                calls = any("tool_calls" in message for message in conversation.messages) and not self._dialect.writes_calls
                raise ConfigError(f"{where}: {error}" + " (it writes no tool calls)" * calls) from None
        self.tally.conversations += 1
        self.tally.empty += not drafts
        return drafts

    def _example(self, draft: Draft, located: LocatedTokens) -> Example:
        trained = np.zeros(len(located.tokens), dtype=bool)
        for span in draft.spans:
            trained |= span.holds(located)
        if not draft.is_framed:
            return Example(located.tokens, trained)
        before, after = self._tokenizer.framing(located.tokens)
        trained = np.concatenate([np.zeros(len(before), bool), trained, np.ones(len(after), bool)])
        return Example(np.concatenate([before, located.tokens, after]), trained)

    # ---------------------------------------------------------------------------------------- conversations

    def _chat(self, conversation: Conversation) -> list[Draft]:
        texts = _Texts(self._tokenizer, self._dialect.of(conversation.messages), conversation.tools)
        end = max(conversation.trained, default=-1) + 1
        self._look_for_unread(texts, end)
        if (marked := self._marked(conversation, texts, end)) is not None:
            return marked
        found = [texts.answer(turn) if self._says_something(texts.messages[turn]) else None for turn in conversation.trained]
        waiting = [answer for answer in found if answer is not None]
        self.tally.lost += len(found) - len(waiting)
        self.tally.answers += len(waiting)
        for turn, answer in zip(conversation.trained, found, strict=True):
            said = _THINKING.split(conversation.messages[turn].get("content", ""))
            self.tally.partial += answer is not None and not all(part.strip() in answer.text[answer.begin :] for part in said)
        drafts: list[Draft] = []
        while waiting:
            drafts.insert(0, self._draft(waiting, texts))
        self.tally.alone += max(0, len(drafts) - 1)
        return drafts

    def _marked(self, conversation: Conversation, texts: _Texts, end: int) -> list[Draft] | None:
        """What the template's own marks say; None where it has none, or they do not say which answer each one is."""
        found = texts.with_marks(end)
        if found is None:
            return None
        turns = [turn for turn, message in enumerate(texts.messages[:end]) if message["role"] == TRAINED_ROLE]
        spans = found.answers
        if len(spans) == len(turns):
            spans = [span for turn, span in zip(turns, spans, strict=True) if turn in conversation.trained]
        elif len(turns) != len(conversation.trained):
            return None
        self.tally.answers += len(spans)
        self.tally.lost += max(0, len(conversation.trained) - len(spans))
        return [Draft(found.text, tuple(_Span(begin, end) for begin, end in spans))] if spans else []

    def _says_something(self, message: Mapping[str, Any]) -> bool:
        """Whether an answer is more than tool calls that the template leaves out."""
        return "tool_calls" not in message or bool(message.get("content")) or self._dialect.writes_calls

    def _draft(self, waiting: list[_Answer], texts: _Texts) -> Draft:
        """An example of the last of `waiting` and of all others whose words stand in its text; it takes them out."""
        text = waiting[-1].text
        spans = []
        for answer in tuple(waiting):
            if text.startswith(answer.text):
                spans.append(_Span(answer.begin, len(answer.text)))
            elif (stop := _shared(text, answer.text)) > answer.begin and stop >= texts.end_of_words(answer):
                spans.append(_Span(answer.begin, stop, is_open=True))
                self.tally.open_ended += 1
            else:
                continue
            waiting.remove(answer)
        return Draft(text, tuple(spans))

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

    def with_marks(self, end: int) -> MarkedChat | None:
        """The conversation before the turn `end` with the template's own marks of answers, if it has any."""
        return self._tokenizer.chat_with_marks(self.messages[:end], tools=self._tools) if end else None

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
