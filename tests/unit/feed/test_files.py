"""Which files a source names, what becomes of them, and the line that says what is wrong with one."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.arguments import data_source
from launch.trainer import parse
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.feed import open_feed
from swarm.feed.files import files_of, split_of
from swarm.feed.json_text import array_entries
from swarm.feed.sources import records_of
from tests.unit.feed.chat_tokenizer import write_chat_tokenizer

ROW = '{"text": "abc"}\n'


def texts(source: Path | str) -> list[str]:
    return [row.record["text"] for row in records_of(files_of(str(source)))]


def put(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": text}) + "\n")
    return root


@pytest.mark.parametrize("name", ["data", "data.xlsx", "data.json.bz2", "data.parquet.gz", "model.safetensors", ".jsonl"])
def test_what_is_of_no_known_suffix_is_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(ROW)
    with pytest.raises(ConfigError, match=r"(the suffix .* is unknown|it has no suffix); known are \.txt, ") as caught:
        open_feed(RunConfig(), str(tmp_path / name), None, None)
    assert "\n" not in str(caught.value)


def test_a_path_a_pattern_and_a_hub_name_are_sources_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, a_dot_jsonl="1")
    for source in (f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl", "hub:owner/name@main#test", "package.module:make"):
        assert data_source(source) == source
        assert parse(["--join", "127.0.0.1:1", "--data", source]).data == source
    with pytest.raises(SystemExit) as left:
        parse(["--join", "127.0.0.1:1", "--data", f"{tmp_path}/none.jsonl"])
    assert left.value.code == 2
    assert "none.jsonl: no such file or directory" in capsys.readouterr().err


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    put(tmp_path, b_dot_jsonl="2", a_dot_jsonl="1", sub__c_dot_jsonl="3", d_dot_json="4")
    assert texts(f"{tmp_path}/*.jsonl") == ["1", "2"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["1", "2", "3"]
    with pytest.raises(ConfigError, match=r"\*\.csv: no file has such a name"):
        texts(f"{tmp_path}/*.csv")
    put(tmp_path, **{"odd[1]_dot_jsonl": "5"})
    assert texts(tmp_path / "odd[1].jsonl") == ["5"], "a name that is there is no pattern"


def test_of_a_directory_the_training_split_is_read_and_the_rest_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, data__test_00000_dot_jsonl="4", train__b_dot_jsonl="2", train__a_dot_jsonl="1", more_dot_jsonl="3")
    (tmp_path / "README.md").write_text("a card")
    assert texts(tmp_path) == ["1", "2"]
    assert "2 of 5 files are read; left out: README.md, data/test_00000.jsonl, more.jsonl" in caplog.text
    (tmp_path / "train").rename(tmp_path / "old")
    assert texts(tmp_path) == ["3", "1", "2"], "where none is named for training, what is for no other split is"
    (tmp_path / "more.jsonl").unlink()
    for name in "ab":
        (tmp_path / "old" / f"{name}.jsonl").unlink()
    with pytest.raises(ConfigError, match="holds no split 'train'; those that file names tell: test"):
        texts(tmp_path)


def test_what_describes_data_or_is_hidden_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    put(tmp_path, a_dot_json="1", dataset_infos_dot_json="2", git__b_dot_json="3")
    (tmp_path / "LICENSE.txt").write_text("all rights")
    (tmp_path / "git").rename(tmp_path / ".git")
    assert texts(tmp_path) == ["1"]
    assert [record.levelname for record in caplog.records] == ["INFO"], caplog.text


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00010.parquet", "train"),
        ("squad_TRAIN.jsonl", "train"),
        ("validation/part.json", "validation"),
        ("dev.csv.gz", "validation"),
        ("my-eval_2.json", "test"),
        ("trainer.json", None),
        ("contest.json", None),
        ("latest.jsonl", None),
        ("how-to-test.text", None),
        ("train.txt", "train"),
        ("test/chapter.txt", "test"),
    ],
)
def test_the_split_that_a_name_tells(name: str, split: str | None) -> None:
    assert split_of(name) == split


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "a.json: the file is empty"),
        ("a.json", "   ", "a.json: the file is empty"),
        ("a.json", '[{"text": "x"}, {"text": }]', "a.json: is not JSON at character 25"),
        ("a.json", '[{"text": "x"}', "a.json: is not JSON at character 14"),
        ("a.json", '[{"text": "x"}] []', "a.json: goes on after its JSON"),
        ("a.json", "[1, 2]", "a.json, entry 1: is no JSON object"),
        ("a.json", '"text"', "a.json: is neither a JSON array nor an object"),
        ("a.json", '{"a": [1], "b": {}}', "a.json, entry 1: nothing here reads a row of b: known"),
        ("a.json", '{"a": [{"text": "x"}], "b": [{"text": "y"}]}', r"several arrays hold objects \(a, b\)"),
        ("a.json", '[{"text": "\\ud800"}]', "a.json, entry 1: holds half of a character"),
        ("a.json", "[{" + '"a": [' * 200000, "a.json: is not JSON"),
        ("a.jsonl", '{"text": "x"}\n{"text": "\udcff"}\n', "a.jsonl, line 2: byte 10 of it is not UTF-8"),
        ("a.csv", "", "a.csv: the file is empty"),
        ("a.csv", "text,text\na,b\n", "a.csv: two columns of the first line have one name"),
        ("a.csv", "text,id\na,1\nb\n", "a.csv, line 3: 1 fields, and the first line names 2 columns"),
        ("a.csv", 'text\n"a"b\n', "a.csv, line 2: "),
        ("a.csv", "text\nabc\udcff\n", "a.csv, after line [01]: is not UTF-8"),
        ("a.csv", "question,answer\na,b\n", "line 2: nothing here reads a row of answer, question: known are"),
        ("a.parquet", "no table", "a.parquet: "),
        ("a.jsonl.gz", "no archive", "a.jsonl.gz: Not a gzipped file"),
        ("a.jsonl.zst", "no archive", "a.jsonl.zst: "),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        open_feed(RunConfig(), str(tmp_path / name), None, None)
    assert "\n" not in str(caught.value)


def test_an_archive_that_ends_early_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROW.encode() * 9999)[:-9])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: Compressed file ended"):
        texts(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "nobody is called 'narrator'; known are human, user, gpt, "),
        ({"conversations": "hello"}, "conversations is no list of turns"),
        ({"conversations": ["hello"]}, "conversations is no list of turns"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "a function_call is no JSON such as"),
        ({"system": "a", "conversations": [{"from": "system", "value": "b"}]}, "stands beside a first turn of the system"),
        ({"instruction": ["a"], "output": "b"}, "instruction is no text"),
        ({"messages": "[1"}, "messages is neither a list nor the JSON of one"),
        ({"image": "x.png", "caption": "a cat"}, "nothing here reads a row of caption, image: known are messages, "),
        ({}, "nothing here reads a row of no column"),
    ],
)
def test_a_row_that_nothing_reads_is_refused_with_its_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=f"a.jsonl, line 1: .*{message}") as caught:
        open_feed(RunConfig(), str(tmp_path / "a.jsonl"), None, str(tmp_path / "tokenizer"))
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def chunks(text: str, size: int) -> Iterator[str]:
    return iter([text[start : start + size] for start in range(0, len(text), size)])


@given(rows=st.lists(VALUES, max_size=5), size=st.integers(1, 40), indent=st.sampled_from([None, 1]))
def test_an_array_in_chunks_is_the_array(rows: list[Any], size: int, indent: int | None) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    entries = list(array_entries("", chunks(text, size), "x"))
    assert [value for value, _ in entries] == rows
    assert [json.loads(told) for _, told in entries] == rows


@given(before=VALUES, rows=st.lists(st.fixed_dictionaries({"a": VALUES}), min_size=1, max_size=4), size=st.integers(1, 40))
def test_the_array_of_an_object_in_chunks_is_the_array(before: Any, rows: list[Any], size: int) -> None:
    text = json.dumps({"x": [[before]], "version": 1.25, "rows": rows, "empty": [], "y": {"rows": rows}})
    assert [value for value, _ in array_entries("", chunks(text, size), "x")] == rows
