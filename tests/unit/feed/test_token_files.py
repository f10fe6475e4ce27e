"""Tokens are made once a machine: by whom, of what, and what a killed writer, a full disk or a changed file leave behind."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.feed.datasets import Dataset
from swarm.feed.feed import Feed, describe_data, open_feed
from swarm.feed.token_files import TokenCache, TokenWriter
from swarm.feed.tokenizers import DATE_OF_NO_RUN
from swarm.testing.processes import environment
from tests.unit.feed.chat_tokenizer import TEMPLATE, write_chat_tokenizer

CONFIG = RunConfig(sequence_length=32, micro_batch_size=2, target_batch_size=4, eval_fraction=0.2, eval_samples=4)
ROWS = [{"messages": [{"role": "user", "content": f"one {i}"}, {"role": "assistant", "content": "two"}]} for i in range(40)]
BYTES = np.dtype(np.uint8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_chat_tokenizer(path)
    return path


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def all_batches(feed: Feed) -> list[Any]:
    batches = [feed.batch(Ticket(step, 0)) for step in range(5)] + feed.eval_batches()
    return [[array.tolist() for array in (*batch.inputs.values(), *batch.labels.values())] for batch in batches]


def built_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that this process writes tokens into from now on."""
    written: list[str] = []
    real = TokenWriter.__init__

    def noted(self: TokenWriter, directory: Path, dtype: np.dtype) -> None:
        written.append(directory.name)
        real(self, directory, dtype)

    monkeypatch.setattr(TokenWriter, "__init__", noted)
    return written


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_second_process_reads_what_the_first_has_tokenised(
    kind: str, chat: Path, directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if kind == "text":
        chat.write_text("".join(json.dumps({"text": "one two three four " * 9}) + "\n" for _ in range(20)))
    without = open_feed(CONFIG, str(chat), None, str(directory))
    first = open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place))
    told = [record.getMessage() for record in caplog.records[-1:]]
    written = built_here(monkeypatch)
    # Neither tokens nor packing nor digest are computed again.
    monkeypatch.setattr("swarm.feed.packing.PackedExamples._plan", None)
    monkeypatch.setattr(Dataset, "_digest", None)
    caplog.clear()
    again = open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place))
    assert written == []
    assert first.data_digest == again.data_digest == without.data_digest
    assert first.facts == again.facts == without.facts
    assert all_batches(first) == all_batches(again) == all_batches(without)
    assert [record.getMessage() for record in caplog.records] == told, "what was read is told each time"


def test_what_other_tokens_would_come_of_has_an_entry_of_its_own(
    chat: Path, directory: Path, place: Path, tmp_path: Path
) -> None:
    def entries(*, tokenizer: Path = directory, date: Any = DATE_OF_NO_RUN, path: Path = chat) -> int:
        describe_data(CONFIG, str(path), None, str(tokenizer), today=date, cache=TokenCache(place))
        return len([entry for entry in place.iterdir() if entry.is_dir()])

    assert entries() == 1
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(chat.read_bytes())
    assert entries(path=copy) == 1, "it is the content that counts"
    copy.write_text(chat.read_text() + "\n")
    assert entries(path=copy) == 2
    assert entries(date=DATE_OF_NO_RUN.replace(year=2025)) == 2, "nothing asks for the date"
    dated = tmp_path / "dated"
    write_chat_tokenizer(dated, template="{{ strftime_now('%Y') }}" + TEMPLATE)
    assert entries(tokenizer=dated) == 3
    assert entries(tokenizer=dated, date=DATE_OF_NO_RUN.replace(year=2025)) == 4
    for _ in range(2):
        told = describe_data(CONFIG, str(chat), None, str(dated), today=DATE_OF_NO_RUN, cache=TokenCache(place))
        assert told["template_date"] == DATE_OF_NO_RUN.isoformat(), "that it was asked for is kept"


def test_another_length_or_held_out_part_takes_the_same_tokens(
    chat: Path, directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place))
    written = built_here(monkeypatch)
    for changes in ({"sequence_length": 16}, {"eval_fraction": 0.5}, {"packing": False}):
        config = CONFIG.model_copy(update=changes)
        kept, fresh = (open_feed(config, str(chat), None, str(directory), cache=c) for c in (TokenCache(place), None))
        assert (kept.data_digest, all_batches(kept)) == (fresh.data_digest, all_batches(fresh))
    assert not [name for name in written if not name.startswith("swarm-tokens-")]


WRITER = """
import os, sys, time
from pathlib import Path
import numpy as np
from swarm.feed.token_files import TokenCache
def build(writer):
    writer.add_tokens(np.arange(100, dtype=np.uint8))
    writer._tokens.flush()
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
    return {"by": "other"}
TokenCache(Path(sys.argv[1])).open("key", np.dtype(np.uint8), build, "data x")
"""


def begun(place: Path, seconds: float) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(place), str(seconds)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    return writer


def test_who_comes_while_another_process_writes_waits_for_it(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer = begun(place, 0.3)
    entry = TokenCache(place).open("key", BYTES, lambda _: pytest.fail("it was written already"), "data x")
    assert (entry.notes, len(entry.content)) == ({"by": "other"}, 100)
    assert "data x: another process tokenises it, waiting for that" in caplog.text
    assert writer.wait(10) == 0


def test_a_killed_writer_leaves_no_half_entry(place: Path) -> None:
    writer = begun(place, 60)
    got: list[Any] = []

    def mine(tokens: TokenWriter) -> dict[str, Any]:
        tokens.add_tokens(np.arange(7, dtype=np.uint8))
        return {"by": "me"}

    waiting = threading.Thread(target=lambda: got.append(TokenCache(place).open("key", BYTES, mine, "data x")))
    waiting.start()
    assert not (place / "key").exists(), "what is not whole does not bear the name"
    writer.kill()
    writer.wait(10)
    waiting.join(20)
    assert (got[0].notes, got[0].content.tolist()) == ({"by": "me"}, list(range(7)))
    assert sorted(path.name for path in place.iterdir()) == ["key", "key.lock"]


def test_an_entry_that_is_not_whole_is_written_again(place: Path, chat: Path, directory: Path) -> None:
    expected = open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place)).data_digest
    [entry] = [path for path in place.iterdir() if path.is_dir()]
    for name, data in (("tokens", b"abc"), ("about.json", b"{"), ("trained", None)):
        (entry / name).unlink() if data is None else (entry / name).write_bytes(data)
        assert open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place)).data_digest == expected


def test_a_refused_file_leaves_nothing(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"texts": 1}\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match="line 2"):
            open_feed(CONFIG, str(path), None, None, cache=TokenCache(place))
    assert [entry.suffix for entry in place.iterdir()] == [".lock"]


def test_without_a_place_to_keep_them_tokens_are_made_all_the_same(
    place: Path, chat: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.write_text("no directory")
    feed = open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place))
    assert feed.data_digest == open_feed(CONFIG, str(chat), None, str(directory)).data_digest
    assert f"data {chat}: its tokens cannot be kept in {place}" in caplog.text


def test_a_full_disk_is_told_in_a_line(place: Path, chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "finish", full)
    with pytest.raises(ConfigError, match=f"data x: no room for its tokens in {place}"):
        TokenCache(place).open("key", BYTES, lambda _: {}, "data x")
    assert [path.name for path in place.iterdir()] == ["key.lock"]


def test_entries_that_nobody_uses_go_after_a_month(place: Path) -> None:
    cache = TokenCache(place)
    for key, age_days in (("old", 31), ("new", 29), ("used", 31)):
        cache.open(key, BYTES, lambda _: {}, "data x")
        os.utime(place / key, (0, time.time() - 86400 * age_days))
    cache.open("used", BYTES, lambda _: {}, "data x")
    cache.open("another", BYTES, lambda _: {}, "data x")
    assert sorted(path.name for path in place.iterdir() if path.is_dir()) == ["another", "new", "used"]


def test_a_file_that_changes_while_it_is_read_is_refused(
    chat: Path, directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenWriter.add_conversation

    def changing(self: TokenWriter, examples: Any) -> None:
        with chat.open("a") as file:
            file.write("\n")
        real(self, examples)

    monkeypatch.setattr(TokenWriter, "add_conversation", changing)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        open_feed(CONFIG, str(chat), None, str(directory), cache=TokenCache(place))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_how_far_it_is_is_told_and_batches_change_nothing(
    suffix: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"chat{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        path.write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    whole = open_feed(CONFIG, str(path), None, str(directory))
    monkeypatch.setattr("swarm.feed.tokenising._BATCH_CHARS", 200)
    monkeypatch.setattr("swarm.feed.tokenising._TOLD_EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert open_feed(CONFIG, str(path), None, str(directory)).data_digest == whole.data_digest
    told = re.findall(r"tokenised (\d+) % of 0.0 MB, 0.0 million tokens; about 0 s more", caplog.text)
    assert len(told) > 5
    assert [int(part) for part in told] == sorted(int(part) for part in told) or suffix == ".parquet"
    assert int(told[-1]) <= 100


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_what_is_read_of_a_large_file_does_not_stay_in_memory(kind: str, directory: Path, place: Path, tmp_path: Path) -> None:
    def in_memory_kb() -> int:
        """Pages of the token file that this process holds."""
        entries = Path("/proc/self/smaps").read_text().split("VmFlags")
        return sum(int(entry.split("Rss:")[1].split()[0]) for entry in entries if str(place) in entry)

    path = tmp_path / "large.jsonl"
    row = {"text": "x" * 9999} if kind == "text" else {"prompt": "x" * 99, "completion": "y" * 9900}
    path.write_text((json.dumps(row) + "\n") * 600)
    config = CONFIG.model_copy(update={"sequence_length": 9998})
    feed = open_feed(config, str(path), None, None, cache=TokenCache(place))
    assert in_memory_kb() < 300, "the digest reads 6 MB"
    feed._dataset.train.take(np.arange(400))
    assert in_memory_kb() < 300, "and these samples 4 MB"
    tokens = feed._dataset.train.take(np.arange(2)).labels["labels"]
    assert tokens.max() in (ord("x"), ord("y")), "what was let go is read again"


def test_the_counts_say_what_was_cut_and_left_out(chat: Path, directory: Path) -> None:
    rows = [*ROWS, {"prompt": "one " * 40, "completion": "two"}, {"prompt": "one", "completion": ""}]
    rows += [{"messages": [ROWS[0]["messages"][0], {"role": "assistant", "content": "one two three " * 20}]}]
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = open_feed(CONFIG.model_copy(update={"eval_fraction": 0.0}), str(chat), None, str(directory)).facts
    assert facts.rows == {"messages": 41, "prompt and completion": 2}
    assert (facts.rows_left_out, facts.examples_cut, facts.examples_left_out, facts.eval_samples) == (1, 1, 1, 0)
    feed = open_feed(CONFIG.model_copy(update={"eval_fraction": 0.0, "packing": False}), str(chat), None, str(directory))
    labels = [feed.batch(Ticket(step, 0)).labels["labels"] for step in range(1)]
    assert labels[0].shape == (2, 32)
    samples = feed._dataset.train.take(np.arange(feed.num_samples))
    assert feed.facts.samples == feed.num_samples == 41
    assert feed.facts.trained_tokens == facts.trained_tokens == int((samples.labels["labels"] != -100).sum())
    assert (facts.tokens or 0) > (facts.trained_tokens or 0) > 40
