"""What records of conversations say beside their texts: weights, parts, tools, keys that nothing reads; and what is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.chat import ChatReader
from swarm.feed.datasets import open_dataset
from swarm.feed.feed import open_feed
from swarm.feed.tokenizers import ByteTokenizer, DirectoryTokenizer
from swarm.feed.turns import conversation_of
from tests.unit.feed.chat_tokenizer import TEMPLATE, write_chat_tokenizer

ASK = {"role": "user", "content": "one"}
SAY = {"role": "assistant", "content": "two"}
CONFIG = RunConfig(sequence_length=32, micro_batch_size=1, target_batch_size=1, eval_fraction=0.0, eval_samples=0, packing=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat_tokenizer")
    write_chat_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> DirectoryTokenizer:
    return DirectoryTokenizer(str(directory))


def trained(record: dict[str, Any], tokenizer: DirectoryTokenizer, reader: ChatReader | None = None) -> list[str]:
    """What is trained of each example."""
    examples = (reader or ChatReader(tokenizer)).examples_of(record, "line 7")
    return [tokenizer._tokenizer.decode(example.tokens[example.trained].tolist()) for example in examples]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}])
def test_an_answer_that_is_marked_not_to_be_trained_is_context_only(mark: dict[str, Any], tokenizer: DirectoryTokenizer) -> None:
    reader = ChatReader(tokenizer)
    wrong = {"role": "assistant", "content": "four", **mark}
    assert trained({"messages": [ASK, wrong, ASK, {**SAY, "weight": 1}]}, tokenizer, reader) == ["two<|end|>"]
    [example] = reader.examples_of({"messages": [ASK, wrong, ASK, SAY]}, "x")
    assert "four<|end|>" in tokenizer._tokenizer.decode(example.tokens.tolist()), "it stays in the text"
    assert trained({"messages": [ASK, wrong]}, tokenizer, reader) == []
    assert reader.tally.told() == (
        "3 rows of messages: 2 answers are trained; 3 are marked not to be; 1 conversations are left out: no answer of theirs is "
        "trained"
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**SAY, "weight": 0.5}, "messages: 'weight' of a message is '0.5'; an answer is trained (1) or not (0)"),
        ({**SAY, "train": "no"}, "messages: 'train' of a message is 'no'; an answer is trained (1) or not (0)"),
        (
            {**SAY, "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages: a part of the content is of the type 'image_url'; only text can be trained here",
        ),
        ({**SAY, "content": [7]}, "messages: a part of the content is a number, not text"),
        ({**SAY, "content": {"a": 1}}, "messages: the content of a message is a mapping, not text"),
        ({**SAY, "tool_calls": "nonsense"}, "messages: tool_calls is neither a list nor the JSON of one"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        conversation_of({"messages": [ASK, message]}, "line 7")
    assert str(caught.value) == f"line 7: {problem}"


def test_a_question_that_is_marked_to_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="a message of the role 'user' is marked to be trained; only those of 'assistant' are"):
        conversation_of({"messages": [{**ASK, "train": True}, SAY]}, "line 7")
    assert conversation_of({"messages": [{**ASK, "weight": 0}, SAY]}, "line 7").trained == [1]


def test_tools_as_a_list_as_json_and_as_json_in_a_list_are_the_same() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert conversation_of({"messages": [ASK, SAY], "tools": tools}, "x").tools == [tool]
    for tools in (None, [], ""):
        assert conversation_of({"messages": [ASK, SAY], "tools": tools}, "x").tools is None
    with pytest.raises(ConfigError, match="line 7: tools is neither a list nor the JSON of one"):
        conversation_of({"messages": [ASK, SAY], "tools": "weather"}, "line 7")


def test_keys_that_change_nothing_are_named(tokenizer: DirectoryTokenizer) -> None:
    reader = ChatReader(tokenizer)
    for number in range(20):
        record = {"messages": [{**ASK, "name": "ann"}, {**SAY, "loss_mask": 0}], "source": "web", "id": number, "tools": None}
        assert trained(record, tokenizer, reader) == ["two<|end|>"]
    named = "'loss_mask' of messages (20), 'name' of messages (20), id (20), source (20)"
    assert reader.tally.told() == f"20 rows of messages: 20 answers are trained; nothing reads {named}"


def test_a_key_that_the_template_reads_sometimes_is_not_named(tmp_path: Path) -> None:
    written = "{{ message.content }}{{ message.mood or '' }}"
    write_chat_tokenizer(tmp_path, template=TEMPLATE.replace("{{ message.content }}", written))
    tokenizer = DirectoryTokenizer(str(tmp_path))
    reader = ChatReader(tokenizer)
    assert trained({"messages": [{**ASK, "mood": ""}, {**SAY, "mood": "!"}]}, tokenizer, reader) == ["two!<|end|>"]
    assert reader.tally.unread == {}


def test_calls_that_the_template_leaves_out_are_not_trained_as_silence(tokenizer: DirectoryTokenizer) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    reader = ChatReader(tokenizer)
    record = {"messages": [ASK, {"role": "assistant", "tool_calls": calls}, ASK, {**SAY, "tool_calls": calls}]}
    assert trained(record, tokenizer, reader) == ["two<|end|>"]
    assert reader.tally.told() == (
        "1 rows of messages: 1 answers are trained; 1 are not, for the chat template does not write what they say after its own "
        "prompt; nothing reads 'tool_calls' of messages (2)"
    )


def test_arguments_that_are_no_json_are_refused_where_a_mapping_is_meant(tmp_path: Path) -> None:
    calls = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    written = "{{ message.content }}" + calls
    write_chat_tokenizer(tmp_path, template=TEMPLATE.replace("{{ message.content }}", written))
    tokenizer = DirectoryTokenizer(str(tmp_path))

    def record(arguments: Any) -> dict[str, Any]:
        return {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}

    assert trained(record('{"a": "\u00e9"}'), tokenizer) == ['f{"a": "\u00e9"}<|end|>']
    assert trained(record(""), tokenizer) == ["f{}<|end|>"]
    for wrong in ("a=1", "[1]", '"{}"'):
        with pytest.raises(ConfigError, match="line 7: the arguments of the tool call 'f' are no JSON object"):
            trained(record(wrong), tokenizer)


def test_a_template_that_writes_only_parts_gets_parts(tmp_path: Path) -> None:
    written = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    write_chat_tokenizer(tmp_path, template=TEMPLATE.replace("{{ message.content }}", written))
    tokenizer = DirectoryTokenizer(str(tmp_path))
    assert trained({"messages": [SAY, ASK, SAY]}, tokenizer) == ["two<|end|>two<|end|>"]


def test_a_first_turn_of_the_assistant_is_trained_without_its_header(tokenizer: DirectoryTokenizer) -> None:
    assert trained({"messages": [SAY, ASK, SAY]}, tokenizer) == ["two<|end|>two<|end|>"]


def test_what_a_template_marks_itself_is_trained(tmp_path: Path) -> None:
    """Here the end of a turn is not, and an answer that is cut out of earlier turns needs no example of its own."""
    marked = TEMPLATE.replace(
        "{{ message.content }}<|end|>",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}<|end|>"
        "{% elif message.content == 'fail' %}{{ raise_exception('no') }}{% else %}{{ message.content }}<|end|>{% endif %}",
    )
    write_chat_tokenizer(tmp_path, template=marked)
    tokenizer = DirectoryTokenizer(str(tmp_path))
    reader = ChatReader(tokenizer)
    four = {"role": "assistant", "content": "four"}
    assert trained({"messages": [ASK, SAY, ASK, four]}, tokenizer, reader) == ["twofour"]
    assert trained({"messages": [ASK, {**SAY, "weight": 0}, ASK, four]}, tokenizer, reader) == ["four"]
    assert trained({"prompt": [ASK, SAY, ASK], "completion": [four]}, tokenizer, reader) == ["four"]
    assert trained({"messages": [ASK, SAY, {**ASK, "content": "fail"}]}, tokenizer, reader) == ["two"], "nothing after it is read"
    assert trained({"messages": [ASK, {**SAY, "weight": 0}]}, tokenizer, reader) == []
    assert (reader.tally.answers, reader.tally.marked, reader.tally.empty) == (5, 2, 1)


# ------------------------------------------------------------------------------------------------ sources


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_what_is_trained_of_a_source_is_told_in_one_line(
    tmp_path: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = write(tmp_path / "chat.jsonl", [{"messages": [ASK, SAY]}, {"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]}])
    open_feed(CONFIG, source, None, str(directory))
    [line] = [record for record in caplog.records if "answers" in record.getMessage()]
    assert line.getMessage() == f"data {source}: 2 rows of messages: 2 answers are trained; 1 are marked not to be"
    assert line.levelno == logging.INFO
    caplog.clear()
    open_feed(CONFIG, write(tmp_path / "more.jsonl", [{"messages": [ASK, SAY], "mood": "good"}]), None, str(directory))
    [line] = [record for record in caplog.records if "answers" in record.getMessage()]
    assert (line.levelno, line.getMessage().endswith("nothing reads mood (1)")) == (logging.WARNING, True)


def test_with_fewer_than_ten_examples_nothing_is_held_out_with_a_word(
    tmp_path: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG.model_copy(update={"eval_fraction": 0.1, "eval_samples": 64})
    feed = open_feed(config, write(tmp_path / "nine.jsonl", [{"messages": [ASK, SAY]}] * 9), None, str(directory))
    assert (feed.num_samples, feed.eval_batches()) == (9, [])
    assert "0.1 (eval_fraction) of 9 conversations is less than one: nothing is held out, nothing is evaluated" in caplog.text
    caplog.clear()
    feed = open_feed(config, write(tmp_path / "ten.jsonl", [{"messages": [ASK, SAY]}] * 10), None, str(directory))
    assert (feed.num_samples, len(feed.eval_batches()), caplog.text) == (9, 1, "")


def test_what_is_held_out_shares_no_conversation_with_what_is_trained(tmp_path: Path) -> None:
    # Each answer needs an example of its own: four conversations are eight examples, and the last conversation is held out.
    write_chat_tokenizer(
        tmp_path,
        template=TEMPLATE.replace(
            "{{ message.content }}", "{{ message.content if loop.last else message.content.split('/')[-1] }}"
        ),
    )
    records = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "a/b"}] * 2} for n in range(4)]
    config = CONFIG.model_copy(update={"eval_fraction": 0.4, "eval_samples": 64})
    tokenizer = DirectoryTokenizer(str(tmp_path))
    dataset = open_dataset(config, write(tmp_path / "chat.jsonl", records), None, tokenizer)
    assert dataset.evaluation is not None
    texts = [
        [tokenizer._tokenizer.decode(row[row != 0].tolist()) for row in samples.take(np.arange(len(samples))).inputs["input_ids"]]
        for samples in (dataset.train, dataset.evaluation)
    ]
    assert [len(part) for part in texts] == [6, 2]
    assert ["<|user|>3<" in text for part in texts for text in part] == [False] * 6 + [True] * 2


def test_each_document_of_a_text_begins_and_ends_with_the_tokenizers_own_tokens_once(directory: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "text.jsonl", [{"text": text} for text in ("one", "<|begin|>two", "three<|end|>", "four")])
    assert row_of(source, directory) == "<|begin|>one<|end|><|begin|>two<|end|><|begin|>three<|end|><|begin|>four"
    (tmp_path / "a.txt").write_text("ab")
    assert row_of(str(tmp_path / "a.txt"), directory) == "<|begin|>ab"
    assert row_of(str(tmp_path / "a.txt"), None) == "ab", "byte-level text has neither"


def row_of(source: str, directory: Path | None) -> str:
    """All tokens of a source of text."""
    tokenizer = ByteTokenizer() if directory is None else DirectoryTokenizer(str(directory))
    samples = open_dataset(CONFIG.model_copy(update={"sequence_length": 1}), source, None, tokenizer).train
    batch = samples.take(np.arange(len(samples)))
    tokens = [*batch.inputs["input_ids"][:, 0].tolist(), int(batch.labels["labels"][-1, 0])]
    return bytes(tokens).decode() if isinstance(tokenizer, ByteTokenizer) else tokenizer._tokenizer.decode(tokens)
