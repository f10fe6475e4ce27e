"""Conversations: prompts are read and never trained, samples hold several of them apart, tables are read like JSONL."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.feed.chat import ChatReader
from swarm.feed.examples import Example, Examples
from swarm.feed.feed import open_feed
from swarm.feed.files import files_of
from swarm.feed.packing import PackedExamples
from swarm.feed.sources import records_of
from swarm.feed.tokenizers import ByteTokenizer, DirectoryTokenizer, Tokenizer
from tests.unit.feed.chat_tokenizer import TEMPLATE, write_chat_tokenizer

CONFIG = RunConfig(sequence_length=32, micro_batch_size=2, target_batch_size=4, eval_fraction=0.0, eval_samples=0)
ASK = {"role": "user", "content": "what is the capital of france"}
SAY = {"role": "assistant", "content": "paris\u00e9"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat_tokenizer")
    write_chat_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> DirectoryTokenizer:
    return DirectoryTokenizer(str(directory))


def example_of(record: dict[str, Any], tokenizer: Tokenizer, where: str) -> Example:
    [example] = ChatReader(tokenizer).examples_of(record, where)
    return example


def parts(example: Example, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Runs of trained and untrained tokens, as text."""
    runs: list[tuple[bool, list[int]]] = []
    for token, trained in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token)
    return [(trained, tokenizer._tokenizer.decode(ids)) for trained, ids in runs]  # type: ignore[attr-defined]


def test_what_the_assistant_says_is_trained_with_its_end_of_turn(tokenizer: DirectoryTokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, ASK, SAY, {"role": "user", "content": "two"}, SAY]
    assert parts(example_of({"messages": messages}, tokenizer, "x"), tokenizer) == [
        (False, "<|system|>be brief<|end|><|user|>what is the capital of france<|end|><|assistant|>"),
        (True, "paris\u00e9<|end|>"),
        (False, "<|user|>two<|end|><|assistant|>"),
        (True, "paris\u00e9<|end|>"),
    ]


def test_turns_after_the_last_answer_are_left_out(tokenizer: DirectoryTokenizer) -> None:
    example = example_of({"messages": [ASK, SAY, ASK], "tools": [{"name": "f"}]}, tokenizer, "x")
    assert parts(example, tokenizer)[0][1].startswith("<|tools|>1<|end|><|user|>")
    assert parts(example, tokenizer)[-1] == (True, "paris\u00e9<|end|>")


def test_a_prompt_and_its_completion_as_messages_or_as_plain_text(tokenizer: DirectoryTokenizer) -> None:
    chat = example_of({"prompt": [ASK, SAY, ASK], "completion": [SAY]}, tokenizer, "x")
    assert [trained for trained, _ in parts(chat, tokenizer)] == [False, True], "an answer in the prompt is not trained"
    plain = example_of({"prompt": "one two", "completion": " three"}, tokenizer, "x")
    assert parts(plain, tokenizer) == [(False, "<|begin|>one two"), (True, " three<|end|>")]
    as_bytes = example_of({"prompt": "\u00e9", "completion": "\u00e9b"}, ByteTokenizer(), "x")
    assert bytes(as_bytes.tokens) == "\u00e9\u00e9b\n\n".encode()
    assert as_bytes.trained.tolist() == [False] * 2 + [True] * 5


def test_an_earlier_turn_that_the_template_rewrites_gets_an_example_of_its_own(tmp_path: Path) -> None:
    # As models that think: what they thought is cut out of all turns but the last.
    thinking = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else message.content.split('/')[-1] }}")
    write_chat_tokenizer(tmp_path, template=thinking)
    tokenizer = DirectoryTokenizer(str(tmp_path))
    said = {"role": "assistant", "content": "one two/three"}
    reader = ChatReader(tokenizer)
    examples = reader.examples_of({"messages": [ASK, said, ASK, said]}, "x")
    asked = "<|user|>what is the capital of france<|end|><|assistant|>"
    assert [parts(example, tokenizer) for example in examples] == [
        [(False, asked), (True, "one two/three<|end|>")],
        [(False, f"{asked}three<|end|>{asked}"), (True, "one two/three<|end|>")],
    ]
    assert reader.tally.told() == (
        "1 rows of messages: 2 answers are trained; 1 are examples of their own, for the chat template rewrites them once the "
        "conversation goes on"
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "line 7: messages is no list of messages"),
        ({"messages": "hello"}, "line 7: messages is no list of messages"),
        ({"messages": [{"content": "x"}]}, "line 7: messages is no list of messages"),
        ({"messages": [ASK]}, "line 7: no message has the role 'assistant'"),
        ({"messages": [{"role": "robot", "content": ""}, SAY]}, "line 7: the chat template refuses it: unknown role robot"),
        ({"prompt": "x", "completion": [SAY]}, "line 7: prompt is no list of messages"),
        ({"prompt": [ASK], "completion": None}, "line 7: completion is no list of messages"),
    ],
)
def test_a_malformed_conversation_is_refused_with_its_line(
    record: dict[str, Any], message: str, tokenizer: DirectoryTokenizer
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        example_of(record, tokenizer, "line 7")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_chat_template_is_named(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, template=None)
    for tokenizer in (ByteTokenizer(), DirectoryTokenizer(str(tmp_path))):
        with pytest.raises(ConfigError, match=r"line 7: .*no chat template"):
            example_of({"messages": [ASK, SAY]}, tokenizer, "line 7")


def test_the_chat_template_is_part_of_the_tokenizers_digest(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    before = DirectoryTokenizer(str(tmp_path)).digest
    write_chat_tokenizer(tmp_path, template=TEMPLATE + " ")
    assert DirectoryTokenizer(str(tmp_path)).digest != before


# ------------------------------------------------------------------------------------------------ packing


def example(*tokens: int, prompt: int = 1) -> Example:
    return Example(np.array(tokens, dtype=np.uint16), np.arange(len(tokens)) >= prompt)


def test_short_examples_share_a_sample_and_positions_start_again() -> None:
    examples = [example(1, 2, 3, prompt=2), example(*range(10, 17)), example(5, 6), example(7, 8, 9)]
    samples = PackedExamples(Examples.of([examples]), 6, packed=True)
    assert len(samples) == 2
    batch = samples.take(np.array([1, 0]))
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 5, 7, 8, 0], [10, 11, 12, 13, 14, 15]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert batch.labels["labels"].tolist() == [[-100, 3, 6, 8, 9, -100], [11, 12, 13, 14, 15, 16]]
    assert {array.dtype for array in (*batch.inputs.values(), *batch.labels.values())} == {np.dtype(np.int64)}


def test_packing_loses_and_repeats_no_trained_token() -> None:
    rng = np.random.default_rng(3)
    examples = [example(*rng.integers(1, 999, size=rng.integers(2, 40)), prompt=int(rng.integers(0, 3))) for _ in range(400)]
    wanted = sorted(int(t) for e in examples for t, is_trained in zip(e.tokens[1:33], e.trained[1:33], strict=True) if is_trained)
    for packed in (True, False):
        samples = PackedExamples(Examples.of([examples]), 32, packed=packed)
        labels = samples.take(np.arange(len(samples))).labels["labels"]
        assert sorted(labels[labels != -100].tolist()) == wanted
    assert len(PackedExamples(Examples.of([examples]), 32, packed=True)) < 0.75 * len(examples)


def test_examples_are_cut_and_those_with_nothing_to_learn_left_out() -> None:
    cut, hollow, alone = example(*range(9), prompt=2), example(*range(9), prompt=5), example(1, prompt=0)
    samples = PackedExamples(Examples.of([[cut, hollow, alone]]), 4, packed=True)
    assert (len(samples), samples.num_cut, samples.num_left_out) == (1, 1, 2)
    assert samples.take(np.array([0])).labels["labels"].tolist() == [[-100, 2, 3, 4]]


# ------------------------------------------------------------------------------------------------ sources


def rows() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"one {i}"}, {"role": "assistant", "content": "two"}]} for i in range(7)]


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def test_a_conversation_file_becomes_batches(chat_file: Path, directory: Path) -> None:
    feed = open_feed(CONFIG, str(chat_file), None, str(directory))
    batch = feed.batch(Ticket(0, 0))
    assert batch.inputs["input_ids"].shape == batch.inputs["position_ids"].shape == (2, 32)
    alone = CONFIG.model_copy(update={"packing": False})
    assert open_feed(alone, str(chat_file), None, str(directory)).num_samples == 7 > feed.num_samples
    held_out = CONFIG.model_copy(update={"eval_fraction": 0.3, "eval_samples": 9})
    feed = open_feed(held_out, str(chat_file), None, str(directory))
    [[evaluation]] = [feed.eval_batches()]
    trained_tokens = 2 * 3
    assert (evaluation.labels["labels"] != -100).sum() == trained_tokens, "two of seven are held out: 't', 'wo' and an end"


def test_parquet_and_saved_datasets_hold_the_same_data_as_jsonl(chat_file: Path, directory: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{**row, "tools": None} for row in rows()])
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (table.slice(0, 3), table.slice(3)), strict=True):
        with pyarrow.ipc.new_stream(saved / name, table.schema) as stream:
            stream.write_table(part)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (saved / "dataset_info.json").write_text("{}")
    expected = open_feed(CONFIG, str(chat_file), None, str(directory)).data_digest
    for source in (tmp_path / "chat.parquet", saved):
        assert open_feed(CONFIG, str(source), None, str(directory)).data_digest == expected
    (saved / names[1]).write_bytes(b"no arrow file")
    with pytest.raises(ConfigError, match=f"data .*{names[1]}: "):
        open_feed(CONFIG, str(saved), None, str(directory))
    (saved / names[1]).unlink()
    with pytest.raises(ConfigError, match=f"{names[1]}, which state.json names, is missing"):
        open_feed(CONFIG, str(saved), None, str(directory))


def test_a_dictionary_of_datasets_asks_for_a_split(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds the splits test, train; name one, such as .*/train"):
        open_feed(CONFIG, str(tmp_path), None, None)


def test_tables_without_pyarrow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def without_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ConfigError, match=r"x.parquet: reading it needs pyarrow: pip install 'swarm-train\[data\]'"):
        open_feed(CONFIG, str(tmp_path / "x.parquet"), None, None)


@pytest.mark.parametrize("escape", ["\\ud83d", "\\uDE00"])
def test_half_a_character_is_refused_with_its_line(escape: str, tmp_path: Path) -> None:
    chat_file = tmp_path / "x.jsonl"
    whole = '{"prompt": "a", "completion": "\\ud83d\\ude00"}\n'
    chat_file.write_text(whole)
    assert len(list(records_of(files_of(str(chat_file))))) == 1, "two halves are a character"
    chat_file.write_text(whole + f'{{"prompt": "a", "completion": "b{escape}"}}\n')
    with pytest.raises(ConfigError, match="line 2: holds half of a character"):
        list(records_of(files_of(str(chat_file))))


def test_text_among_conversations_is_refused_with_its_line(chat_file: Path, directory: Path) -> None:
    with chat_file.open("a") as file:
        file.write('{"text": "plain"}\n')
    with pytest.raises(ConfigError, match="line 8: is a row of text, and those before it are not"):
        open_feed(CONFIG, str(chat_file), None, str(directory))
