"""What the chat templates that models ship make of the same conversations, a small template for each way to write one.

`templates/` holds them: each does what its family's does with thoughts, the system prompt, tool calls and the date, in few
lines of our own. The table says what must be trained; its columns are the tests.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarm.base.errors import ConfigError
from swarm.feed.chat import ChatReader, Tally
from swarm.feed.examples import Example
from swarm.feed.tokenizers import DirectoryTokenizer
from tests.unit.feed.boundaries import write_tokenizer

TEMPLATES = Path(__file__).with_name("templates")
DAY = datetime.date(2025, 3, 14)


@dataclass(frozen=True)
class Family:
    """What is trained: of an answer and of a tool call, and whether an answer needs an example of its own."""

    begin: str = ""
    end: str = "<|im_end|>\n"
    #: Whether the template writes an answer otherwise once another question follows.
    is_alone: bool = False
    #: How the last answer of a text ends, if not like the others.
    last_end: str | None = None
    #: What is trained of an answer with the thought "idea", and of a call; None if the template writes no such thing.
    thought: str | None = None
    call: str | None = None
    has_date: bool = False
    #: Whether it is the system prompt that makes the template write an answer's question otherwise.
    is_alone_with_system: bool = False


XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
JSON = '{"name": "weather", "arguments": {"city": "Paris"}}'
FAMILIES = {
    "llama3": Family(end="<|eot_id|>", call='{"name": "weather", "parameters": {"city": "Paris"}}', has_date=True),
    "qwen2_5": Family(call=f"<tool_call>\n{JSON}\n</tool_call>"),
    "qwen3": Family(
        "<think>\n\n</think>\n\n", is_alone=True, thought="<think>\nidea\n</think>\n\n", call=f"<tool_call>\n{JSON}\n</tool_call>"
    ),
    "qwen3_5": Family("\n</think>\n\n", is_alone=True, thought="idea\n</think>\n\n", call=XML),
    "gpt_oss": Family(
        "<|channel|>final<|message|>",
        "",
        last_end="<|return|>",
        has_date=True,
        thought="<|channel|>analysis<|message|>idea<|end|><|start|>assistant<|channel|>final<|message|>",
        call=' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
    ),
    "phi3": Family(end="<|end|>\n", last_end="<|end|>\n</s>"),
    "phi4": Family(end="<|im_end|>"),
    "gemma3": Family(end="<end_of_turn>\n"),
    "glm4": Family(
        "\n<think></think>\n",
        "",
        thought="\n<think>idea</think>\n",
        call="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    ),
    "deepseek_v3": Family(end="<|end|>", call='<|call|>function<|sep|>weather\n```json\n{"city": "Paris"}\n```'),
    "deepseek_r1": Family(end="<|end|>", call='<|call|>function<|sep|>weather\n```json\n{"city": "Paris"}\n```'),
    "mistral_v1": Family(" ", "</s>"),
    "mistral_v3": Family(" ", "</s>", is_alone_with_system=True, call=f'[TOOL_CALLS] [{JSON[:-1]}, "id": "abcdef123"}}]</s>'),
    "mistral_v7": Family(end="</s>", call='[TOOL_CALLS]weather[ARGS]{"city": "Paris"}</s>', has_date=True),
    "mistral_tekken": Family(end="</s>", is_alone_with_system=True, call=f'[TOOL_CALLS][{JSON[:-1]}, "id": "abcdef123"}}]</s>'),
    "nemotron": Family("</think>", thought="idea\n</think>\n", call=XML),
    "command_a": Family(
        "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        is_alone=True,
        thought="<|START_THINKING|>idea<|END_THINKING|><|START_RESPONSE|>",
        call='[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}]',
    ),
    "cohere2": Family(end="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "exaone4": Family(end="[|endofturn|]\n", is_alone=True, thought="idea\n</think>\n\n", call=f"<tool_call>{JSON}</tool_call>"),
    "lfm2": Family(),
}
SAID = ("first.", "second.", "third.")
CONVERSATION = [
    message
    for number, said in enumerate(SAID)
    for message in ({"role": "user", "content": f"question {number}?"}, {"role": "assistant", "content": said})
]


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    properties = {"city": {"type": "string", "description": "where"}}
    schema = {"name": "weather", "description": "now", "parameters": {"type": "object", "properties": properties}}
    return {
        "messages": [
            {"role": "user", "content": "Is it cold?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "abcdef123", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": "12 C"},
            {"role": "assistant", "content": "12 degrees."},
        ],
        "tools": [{"type": "function", "function": schema}],
    }


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for path in TEMPLATES.iterdir():
        template = path.read_text()
        marks = sorted({"<|user|>", "<|assistant|>", *re.findall(r"<\|[^|<>\s]+\|>", template)})
        write_tokenizer(root / path.stem, template, ["<s>", "</s>", *marks])
    return {path.stem: root / path.stem for path in TEMPLATES.iterdir()}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(name: str, directories: dict[str, Path]) -> DirectoryTokenizer:
    return DirectoryTokenizer(str(directories[name]), date=DAY)


def read(tokenizer: DirectoryTokenizer, record: dict[str, Any]) -> tuple[list[Example], Tally]:
    reader = ChatReader(tokenizer)
    return reader.examples_of(record, "line 1"), reader.tally


def runs(example: Example, tokenizer: DirectoryTokenizer, *, trained: bool) -> list[str]:
    """The texts of consecutive tokens that are trained, or that are not."""
    edges = [0, *(i for i in range(1, len(example.tokens)) if example.trained[i] != example.trained[i - 1]), len(example.tokens)]
    pairs = [(start, end) for start, end in itertools.pairwise(edges) if example.trained[start] == trained]
    return [tokenizer._tokenizer.decode(example.tokens[start:end].tolist()) for start, end in pairs]


def expected(family: Family, *, with_system: bool = False) -> list[list[str]]:
    is_alone = family.is_alone or (with_system and family.is_alone_with_system)
    last = family.end if family.last_end is None else family.last_end
    if is_alone:
        return [[family.begin + said + last] for said in SAID]
    return [[family.begin + said + (last if said == SAID[-1] else family.end) for said in SAID]]


def test_every_family_has_a_template() -> None:
    assert {path.stem for path in TEMPLATES.iterdir()} == set(FAMILIES)


def test_every_answer_is_trained_once(name: str, tokenizer: DirectoryTokenizer) -> None:
    family = FAMILIES[name]
    examples, tally = read(tokenizer, {"messages": CONVERSATION})
    assert [runs(example, tokenizer, trained=True) for example in examples] == expected(family)
    for number, example in enumerate(examples):
        assert f"question {number if family.is_alone else 2}?" in runs(example, tokenizer, trained=False)[-1]
    assert (tally.answers, tally.lost, tally.partial, tally.alone) == (3, 0, 0, 2 * family.is_alone)
    assert tally.open_ended == (2 if family.last_end is not None else 0)


def test_every_thought_is_trained_or_missed_aloud(name: str, tokenizer: DirectoryTokenizer) -> None:
    family = FAMILIES[name]
    thoughts = [{**said, "reasoning_content": "idea"} if said["role"] == "assistant" else said for said in CONVERSATION]
    examples, tally = read(tokenizer, {"messages": thoughts})
    trained = [run for example in examples for run in runs(example, tokenizer, trained=True)]
    if family.thought is None:
        assert tally.unread == {"'reasoning_content' of messages": 3}
        assert trained == [run for example in expected(family) for run in example]
    else:
        last = family.end if family.last_end is None else family.last_end
        assert trained == [family.thought + said + last for said in SAID]


@pytest.mark.parametrize(("name", "partial"), [("deepseek_r1", 1), ("phi4", 0)])
def test_thoughts_that_a_template_cuts_out_of_an_answer_are_told(name: str, partial: int, directories: dict[str, Path]) -> None:
    said = {"role": "assistant", "content": "<think>\nidea\n</think>\n\nanswer"}
    _, tally = read(DirectoryTokenizer(str(directories[name])), {"messages": [CONVERSATION[0], said]})
    assert (tally.answers, tally.partial) == (1, partial)
    assert tally.told().endswith("; 1 are not written whole by the chat template") == bool(partial)


def test_the_system_prompt_stands_before_every_answer(name: str, tokenizer: DirectoryTokenizer) -> None:
    examples, _ = read(tokenizer, {"messages": [{"role": "system", "content": "Be brief."}, *CONVERSATION]})
    assert [runs(example, tokenizer, trained=True) for example in examples] == expected(FAMILIES[name], with_system=True)
    for example in examples:
        assert sum("Be brief." in run for run in runs(example, tokenizer, trained=False)) == 1


def test_content_in_parts_is_the_same_as_text(name: str, tokenizer: DirectoryTokenizer) -> None:
    def parts(text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text[:3], "image": None}, {"type": "text", "text": text[3:]}]

    whole, _ = read(tokenizer, {"messages": CONVERSATION})
    split, _ = read(tokenizer, {"messages": [{**message, "content": parts(message["content"])} for message in CONVERSATION]})
    assert [example.tokens.tolist() for example in split] == [example.tokens.tolist() for example in whole]
    assert [example.trained.tolist() for example in split] == [example.trained.tolist() for example in whole]


def test_arguments_are_the_same_as_json_and_as_a_mapping(name: str, tokenizer: DirectoryTokenizer) -> None:
    wanted = FAMILIES[name].call
    texts = []
    for arguments in ({"city": "Paris"}, json.dumps({"city": "Paris"})):
        record = call(arguments)
        if wanted is None:
            with pytest.raises(ConfigError, match=r"line 1: the chat template refuses it: .*\(it writes no tool calls\)$"):
                read(tokenizer, record)
            continue
        examples, tally = read(tokenizer, record)
        assert (tally.answers, tally.unread) == (2, {})
        texts.append([run for example in examples for run in runs(example, tokenizer, trained=True)])
        assert wanted in texts[-1][0]
        assert "12 degrees." in texts[-1][1]
    assert not texts or texts[0] == texts[1]


def test_a_date_is_the_runs_and_not_todays(name: str, tokenizer: DirectoryTokenizer, directories: dict[str, Path]) -> None:
    def text(reader: DirectoryTokenizer) -> str:
        [first, *_] = read(reader, {"messages": CONVERSATION})[0]
        return reader._tokenizer.decode(first.tokens.tolist())

    has_date = FAMILIES[name].has_date
    other = DirectoryTokenizer(str(directories[name]), date=DAY + datetime.timedelta(days=1))
    assert (tokenizer.has_told_date, bool(re.search(r"14 Mar 2025|2025-03-14", text(tokenizer)))) == (False, has_date)
    assert tokenizer.has_told_date == has_date
    assert (text(other) != text(tokenizer)) == has_date
    assert text(tokenizer).count("2025") == has_date, "the other's date does not stay"
