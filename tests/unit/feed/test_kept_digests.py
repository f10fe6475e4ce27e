"""Runs that were begun go on: data of the formats that were always read has the digest that it always had.

The digests were taken before files were read in batches and tokens kept on disk. A digest covers the order of samples and all
values, so an unequal one here means that such a run is refused when it is resumed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.base.config import RunConfig
from swarm.feed.feed import open_feed
from tests.unit.feed.chat_tokenizer import write_chat_tokenizer

ASK = {"role": "user", "content": "one two"}
SAY = {"role": "assistant", "content": "the capital of france"}
ROWS = {
    "t.jsonl": [{"text": f"one two {i} three" * (i % 7)} for i in range(60)],
    "m.jsonl": [{"messages": [ASK, SAY] * (1 + i % 4), "id": i} for i in range(40)],
    "p.jsonl": [{"prompt": f"what {i}? ", "completion": "madrid is the answer" * (1 + i % 5)} for i in range(40)],
}


@pytest.mark.parametrize(
    ("name", "has_tokenizer", "packing", "num_samples", "digest"),
    [
        ("a.txt", True, True, 130, "4bc6ba416d02626284804a2e68dd18a680eb5cc083ff6b832703260c875e349e"),
        ("a.txt", False, True, 309, "0126b75f765f9f39cbc4722d4f59410c18944636e7ed74fcd2aaeaa509d1a468"),
        ("t.jsonl", True, True, 41, "b9d620806f17c4ea9a6b1b07725f871f4a133215eaeb149ba6e6e23a8a97c222"),
        ("t.jsonl", False, True, 71, "5b5cb42198fa6f9073c77ecf50fe238d81fb0e752001dfbff68555e73f5b05e5"),
        ("m.jsonl", True, True, 28, "411c48755e3005a6262d1543542481d3351a9f890290be7253bba23841fad0cc"),
        ("p.jsonl", True, True, 29, "66ab723bd10a0ac1afe26fcd7ba7ffd1f8baa21e7724e8f3389382d8bbec830d"),
        ("p.jsonl", False, True, 32, "27dad0c15b9f5caffe64fc3228ac4af099dba2b287c2a3b4072ec626158792d7"),
        ("m.jsonl", True, False, 32, "411c48755e3005a6262d1543542481d3351a9f890290be7253bba23841fad0cc"),
        ("p.jsonl", True, False, 32, "66ab723bd10a0ac1afe26fcd7ba7ffd1f8baa21e7724e8f3389382d8bbec830d"),
        ("p.jsonl", False, False, 32, "27dad0c15b9f5caffe64fc3228ac4af099dba2b287c2a3b4072ec626158792d7"),
    ],
)
def test_the_data_digest_is_the_one_of_old(
    name: str, has_tokenizer: bool, packing: bool, num_samples: int, digest: str, tmp_path: Path
) -> None:
    write_chat_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / name
    rows = "".join(json.dumps(row) + "\n" for row in ROWS.get(name, []))
    path.write_text(rows or "the capital\nof france is paris\n" * 400)
    config = RunConfig(
        sequence_length=32, micro_batch_size=2, target_batch_size=4, eval_fraction=0.2, eval_samples=4, packing=packing
    )
    feed = open_feed(config, str(path), None, str(tmp_path / "tokenizer") if has_tokenizer else None)
    assert (feed.num_samples, feed.data_digest) == (num_samples, digest)
