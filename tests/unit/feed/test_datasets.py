"""Sources, packing, the held-out part, digests; and one line that names the file when something is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.feed.datasets import ArraySamples, TokenWindows
from swarm.feed.feed import Batch, describe_data, open_feed
from swarm.feed.files import files_of
from swarm.feed.sources import pieces, records_of
from swarm.feed.tokenizers import ByteTokenizer, DirectoryTokenizer

MLP = "tests.unit.models.mlp_classifier:dataset"
SMALL = RunConfig(sequence_length=4, micro_batch_size=2, target_batch_size=4, eval_samples=5, eval_fraction=0.25)


def text_of(batch: Batch) -> list[str]:
    whole = np.concatenate([batch.inputs["input_ids"], batch.labels["labels"][:, -1:]], axis=1)
    return [bytes(row.astype(np.uint8)).decode() for row in whole]


def trained_text(path: Path, **changes: object) -> set[str]:
    """Every training window of `path`."""
    config = SMALL.model_copy(update={"eval_fraction": 0.0, "eval_samples": 0, **changes})
    feed = open_feed(config, str(path), None, None)
    steps = -(-feed.num_samples // config.target_batch_size)
    return {t for s in range(steps) for i in range(2) for t in text_of(feed.batch(Ticket(s, i)))}


def test_windows_make_every_token_but_the_first_a_label_once() -> None:
    tokens = np.arange(14, dtype=np.uint16)
    windows = TokenWindows(tokens, 4)
    assert len(windows) == 3
    batch = windows.take(np.array([2, 0, 1]))
    assert batch.inputs["input_ids"].dtype == batch.labels["labels"].dtype == np.int64
    assert batch.inputs["input_ids"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.labels["labels"].tolist() == [[9, 10, 11, 12], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert len(TokenWindows(tokens[:5], 4)) == 1
    assert len(TokenWindows(tokens[:4], 4)) == 0


def test_text_file_jsonl_and_directory(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("abcdefghi")
    assert trained_text(tmp_path / "b.txt") == {"abcde", "efghi"}
    (tmp_path / "a.jsonl").write_text('{"text": "123456", "id": 1}\n\n{"text": ""}\r\n{"text": "789"}\n')
    assert trained_text(tmp_path / "a.jsonl") == {"12345", "56\n\n7"}
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("\ufeffxyz", encoding="utf-8")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\xfe")
    assert trained_text(tmp_path) == {"12345", "56\n\n7", "789\n\n", "\nabcd", "defgh", "hi\n\nx"}


def test_the_end_of_the_text_is_held_out_unless_evaluation_data_is_given(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.txt", tmp_path / "eval.txt"
    train.write_text("a" * 60 + "b" * 20)
    held_out.write_text("c" * 9)
    feed = open_feed(SMALL, str(train), None, None)
    assert feed.num_samples == 14
    batches = feed.eval_batches()
    assert [t for b in batches for t in text_of(b)] == ["bbbbb"] * 4  # 5 wanted, 4 there are
    assert [len(text_of(b)) for b in batches] == [2, 2]
    other = open_feed(SMALL, str(train), str(held_out), None)
    assert other.num_samples == 19
    assert [text_of(b) for b in other.eval_batches()] == [["ccccc"] * 2]
    assert other.data_digest != feed.data_digest


def test_the_last_evaluation_batch_may_be_short() -> None:
    config = RunConfig(eval_samples=19)
    batches = open_feed(config, None, None, None).eval_batches()
    assert [len(b.labels["labels"]) for b in batches] == [8, 8, 3]
    assert len(batches) == config.eval_tickets


@pytest.mark.parametrize("changes", [{"eval_samples": 0}, {"eval_fraction": 0.0}])
def test_no_evaluation_data_no_batches(changes: dict[str, float]) -> None:
    assert open_feed(SMALL.model_copy(update=changes), None, None, None).eval_batches() == []


def test_builtin_text_is_english_and_the_same_each_time() -> None:
    config = RunConfig()
    one, two = (open_feed(config, source, None, None) for source in (None, "builtin"))
    assert one.data_digest == two.data_digest
    assert one.num_samples > 3000
    batch = one.batch(Ticket(3, 5))
    assert batch.inputs["input_ids"].shape == batch.labels["labels"].shape == (8, 64)
    assert np.array_equal(batch.inputs["input_ids"][:, 1:], batch.labels["labels"][:, :-1])
    assert np.array_equal(batch.inputs["input_ids"], two.batch(Ticket(3, 5)).inputs["input_ids"])


def test_tokens_that_the_model_does_not_have_are_refused_when_the_data_is_opened(tmp_path: Path) -> None:
    path, held_out = tmp_path / "corpus.txt", tmp_path / "other.txt"
    path.write_text("hello world " * 30)  # the largest byte is "w", 119
    held_out.write_text("hello zoo " * 30)
    assert open_feed(SMALL, str(path), None, None, vocab_size=120).num_samples
    with pytest.raises(ConfigError) as raised:
        open_feed(SMALL, str(path), None, None, vocab_size=119)
    assert str(raised.value) == (
        "data corpus.txt: holds token 119, and the model has tokens 0 to 118; use its own tokenizer (--tokenizer), or a larger "
        "model_options.vocab_size"
    )
    with pytest.raises(ConfigError, match="holds token 122"):
        describe_data(SMALL, str(path), str(held_out), None, vocab_size=120)


@pytest.mark.parametrize(
    ("inputs", "labels", "bounds"),
    [
        ([[3, 9]], [[-100, 9]], (3, 9)),
        ([[3, 4]], [[4, 12]], (3, 12)),
        ([[-1, 4]], [[4, -100]], (-1, 4)),
        ([[5]], [[-100]], (5, 5)),
        ([[5]], [[-7]], (-7, 5)),
    ],
)
def test_bounds_of_a_custom_datasets_tokens_leave_out_ignored_labels(
    inputs: list[list[int]], labels: list[list[int]], bounds: tuple[int, int]
) -> None:
    samples = ArraySamples({"input_ids": np.array(inputs)}, {"labels": np.array(labels)})
    assert samples.token_bounds() == bounds
    assert ArraySamples({"x": np.array(inputs)}, {"labels": np.array(labels)}).token_bounds() is None


def test_other_data_than_the_runs_is_refused_with_both_digests(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("hello world " * 30)
    described = describe_data(SMALL, str(path), None, None)
    assert described["dataset"] == "corpus.txt"
    assert described["vocab_size"] == 256
    fields = {name: described[name] for name in ("dataset", "data_digest", "tokenizer_digest")}
    config = RunConfig(**{**SMALL.model_dump(), **fields})
    assert open_feed(config, str(path), None, None).data_digest == described["data_digest"]
    path.write_text("hello World " * 30)
    changed = open_feed(SMALL, str(path), None, None).data_digest
    with pytest.raises(ConfigError, match=f"{changed[:12]}, the run has {described['data_digest'][:12]}"):
        open_feed(config, str(path), None, None)
    with pytest.raises(ConfigError, match=f"tokenizer byte-level is not the run's: .* the run has {'0' * 12}"):
        open_feed(config.model_copy(update={"tokenizer_digest": "0" * 64}), str(path), None, None)


def test_the_digest_does_not_depend_on_how_tokens_are_stored() -> None:
    def digest(dtype: str) -> str:
        from swarm.feed.datasets import Dataset

        return Dataset("x", TokenWindows(np.arange(200).astype(dtype), 4), None).digest()

    assert digest("u1") == digest("<u4") == digest(">i8")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt: no such file or directory"),
        ("empty.txt", b"", "empty.txt: the file is empty"),
        ("blank.txt", b" \n\n", "blank.txt: the file is empty"),
        ("latin.txt", b"caf\xe9 and more", "latin.txt: byte 3 is not UTF-8"),
        ("short.txt", b"abcd", "short.txt: .* tokens are too few for one sample of 4 \\+ 1"),
        ("half.txt", b"abcdefgh", "the held-out part of .*half.txt: 2 tokens are too few"),
        ("bad.jsonl", b'{"text": "fine"}\n{"text": \n', "bad.jsonl, line 2: is not JSON"),
        (
            "field.jsonl",
            b'\n{"texts": "x"}\n',
            "field.jsonl, line 2: nothing here reads a row of texts: known are messages, .*; rename",
        ),
        ("type.jsonl", b'{"text": 3}', "type.jsonl, line 1: text is no string"),
        ("list.jsonl", b"[]", "list.jsonl, line 1: is no JSON object"),
        ("hollow.jsonl", b'{"text": ""}', "hollow.jsonl: holds no text"),
    ],
)
def test_a_bad_file_is_refused_by_name_in_one_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        open_feed(SMALL, str(tmp_path / name), None, None)
    assert "\n" not in str(caught.value)


def test_a_device_and_a_pipe_are_refused(tmp_path: Path) -> None:
    """One never ends, and nothing may come through the other."""
    with pytest.raises(ConfigError, match="data /dev/zero: is a device, not a file"):
        open_feed(SMALL, "/dev/zero", None, None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: is a pipe, not a file"):
        open_feed(SMALL, str(tmp_path / "pipe"), None, None)


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"holds no file of data; known are \.txt, "):
        open_feed(SMALL, str(tmp_path), None, None)


def test_a_bad_evaluation_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        open_feed(SMALL, None, str(tmp_path / "none.txt"), None)


def test_custom_samples_are_batched_split_and_digested() -> None:
    feed = open_feed(SMALL, MLP, None, None)
    assert feed.num_samples == 480
    batch = feed.batch(Ticket(0, 1))
    assert batch.inputs["features"].shape == (2, 16)
    assert batch.labels["class"].shape == (2,)
    assert [len(b.labels["class"]) for b in feed.eval_batches()] == [2, 2, 1]
    assert feed.data_digest == open_feed(SMALL, MLP, None, None).data_digest
    assert feed.data_digest != open_feed(SMALL.model_copy(update={"eval_fraction": 0.5}), MLP, None, None).data_digest
    assert describe_data(SMALL, MLP, None, None)["dataset"] == MLP


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("no_such_package:make", "data no_such_package:make: No module named"),
        ("json:nothing", "data json:nothing: module json has no callable 'nothing'"),
        ("tests.unit.models.mlp_classifier:factory", "must return ArraySamples or a pair of them, not MlpFactory"),
    ],
)
def test_a_custom_dataset_that_is_none_is_refused(data: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_feed(SMALL, data, None, None)
    with pytest.raises(ConfigError, match="brings its own evaluation"):
        open_feed(SMALL, data, "eval.txt", None)


def test_arrays_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ in their number of samples"):
        ArraySamples({"x": np.zeros((3, 2))}, {"y": np.zeros(4)})
    with pytest.raises(ConfigError, match="at least one input and one label"):
        ArraySamples({}, {"y": np.zeros(4)})


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A transformers tokenizer of whole words in a directory."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    vocab = {"<end>": 0, "<unk>": 1, "one": 2, "two": 3, "three": 4}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [
            {
                "id": 0,
                "content": "<end>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_a_tokenizer_directory_is_used_and_has_a_digest(word_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer(str(word_tokenizer))
    assert tokenizer.vocab_size == 5
    assert [ids.tolist() for ids in tokenizer.encode(["one three\ntwo", ""])] == [[2, 4, 3], []]
    assert tokenizer.separator.tolist() == [0]
    path = tmp_path / "words.jsonl"
    path.write_text('{"text": "one two one"}\n{"text": "three"}\n')
    config = SMALL.model_copy(update={"eval_fraction": 0.0, "eval_samples": 0})
    feed = open_feed(config, str(path), None, str(word_tokenizer))
    assert feed.batch(Ticket(0, 0)).labels["labels"][0].tolist() == [3, 2, 0, 4]
    described = describe_data(config, str(path), None, str(word_tokenizer))
    assert (described["tokenizer_digest"], described["vocab_size"]) == (tokenizer.digest, 5)
    (word_tokenizer / "model.safetensors").write_bytes(b"not part of the tokenizer")
    assert DirectoryTokenizer(str(word_tokenizer)).digest == tokenizer.digest
    with (word_tokenizer / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert DirectoryTokenizer(str(word_tokenizer)).digest != tokenizer.digest


def test_long_documents_come_in_the_same_pieces_from_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.feed.sources._PIECE_CHARS", 10)
    text = "one two three\n" * 9 + "two"
    assert list(pieces(text)) == ["one two three\n"] * 9 + ["two"]
    assert list(pieces("")) == []
    (tmp_path / "a.txt").write_text(text)
    for chunk_bytes in (1, 7, 2**20):
        monkeypatch.setattr("swarm.feed.sources._CHUNK_BYTES", chunk_bytes)
        rows = list(records_of(files_of(str(tmp_path / "a.txt"))))
        assert [row.record["text"] for row in rows] == list(pieces(text))
        assert [row.goes_on for row in rows] == [False, *[True] * 9], "it stays one document"


def test_a_tokenizer_that_is_made_by_code_of_its_own_is_refused_without_a_question(
    word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (word_tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    (word_tokenizer / "tokenization_mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ConfigError, match=r"code of its own .*never run; name a directory"):
        DirectoryTokenizer(str(word_tokenizer))
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_directory_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        DirectoryTokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="holds no tokenizer file"):
        DirectoryTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        DirectoryTokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_bytes_are_tokens() -> None:
    assert ByteTokenizer().encode(["aé\ud800"])[0].tolist() == [97, 0xC3, 0xA9, 0xED, 0xA0, 0x80]
