"""Data as people bring them: files of the shapes that other trainers read, and the rows that TRL would be given of each."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What TRL's SFTTrainer made of the rows; `trl_shapes.py` writes it.
TABLE = Path(__file__).with_name("shapes.json")
_CALLS = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
_WRITTEN = "{{ message.content or '' }}" + _CALLS + "<|end|>"
_TURNS = (
    "{{{{ bos_token }}}}{{% if tools %}}{{{{ tools | tojson }}}}<|end|>{{% endif %}}{{% for message in messages %}}"
    "<|{{{{ message.role }}}}|>{{% if message.role == 'assistant' %}}{answer}{{% else %}}{written}{{% endif %}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
#: The same template with marks of what the assistant says, and without.
MARKED_TEMPLATE = _TURNS.format(answer="{% generation %}" + _WRITTEN + "{% endgeneration %}", written=_WRITTEN)
PLAIN_TEMPLATE = _TURNS.format(answer=_WRITTEN, written=_WRITTEN)

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A source, how it is written below a directory, and what TRL is given of it; `counted` is what is told of the rows."""

    name: str
    write: Callable[[Path], Path]
    trl: Rows
    counted: str
    difference: str = ""


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _bytes(name: str, data: bytes) -> Callable[[Path], Path]:
    return lambda root: _put(root / name, data)


def _array(name: str, rows: Rows) -> Callable[[Path], Path]:
    return _bytes(name, json.dumps(list(rows), indent=1).encode())


def _table(name: str, rows: Rows) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        path = root / name
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def _parquet(name: str, rows: Rows) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        import pyarrow
        import pyarrow.parquet

        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), root / name)
        return root / name

    return write


def _zst(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        import pyarrow

        with pyarrow.output_stream(str(root / name), compression="zstd") as file:
            file.write(data)
        return root / name

    return write


def _hub_directory(root: Path) -> Path:
    for split, rows in (("train", CHATS), ("validation", [{"messages": [ASK, {**SAY, "content": "held out"}]}])):
        _parquet(f"set/data/{split}-00000-of-00001.parquet", rows)(root)
    _put(root / "set" / "README.md", b"---\nlicense: mit\n---\nA card that nobody learns.")
    return root / "set"


def _many_files(root: Path) -> Path:
    for number, row in enumerate(CHATS):
        _put(root / "set" / f"{number}.json", json.dumps(row).encode())
    return root / "set"


def _split_directory(root: Path) -> Path:
    _put(root / "set" / "train" / "part-1.jsonl", _lines(CHATS[:1]))
    _put(root / "set" / "train" / "part-2.jsonl", _lines(CHATS[1:]))
    return _put(root / "set" / "test" / "part-1.jsonl", _lines([{"messages": [ASK, SAY]}])).parents[1]


ASK = {"role": "user", "content": "is one two?"}
SAY = {"role": "assistant", "content": "yes"}
CHATS = [
    {"messages": [ASK, SAY]},
    {"messages": [{"role": "system", "content": "no"}, ASK, SAY, ASK, {**SAY, "content": "one\ntwo"}]},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def _called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12 C"},
        {**SAY, "content": "one two"},
    ]


CALLED = [{"messages": _called({"city": "Rome"}), "tools": [TOOL]}]
INSTRUCTIONS = [
    {"instruction": "Add.", "input": "one and two", "output": "three"},
    {"instruction": "Say yes\ntwice.", "input": "", "output": 'yes, "yes"'},
]
#: The prompts of the Stanford Alpaca data, written out.
ALPACA = [
    {
        "prompt": "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\none and two\n\n### Response:",
        "completion": "three",
    },
    {
        "prompt": "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay yes\ntwice.\n\n### Response:",
        "completion": 'yes, "yes"',
    },
]
TURNS = [
    {"id": "x1", "conversations": [{"from": "human", "value": "is one two?"}, {"from": "gpt", "value": "yes"}]},
    {
        "id": "x2",
        "conversations": [
            {"from": "system", "value": "no"},
            {"from": "human", "value": "is one two?"},
            {"from": "gpt", "value": "yes"},
            {"from": "user", "value": "is one two?"},
            {"from": "assistant", "value": "one\ntwo"},
        ],
    },
]
CALLED_TURNS = [
    {
        "conversations": [
            {"from": "human", "value": "is one two?"},
            {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Rome"}})},
            {"from": "observation", "value": "12 C"},
            {"from": "gpt", "value": "one two"},
        ],
        "tools": json.dumps([TOOL]),
    }
]
PAIRS = [{"prompt": "Sentiment: ", "completion": "positive"}, {"prompt": 'one, "two"\n', "completion": "no\nyes"}]
ASKED = [{"prompt": [ASK], "completion": [SAY]}]
TEXTS = [{"text": "one two"}, {"text": "caf\u00e9 yes"}, {"text": "no"}]
_IN_PARTS = [{"messages": [{**ASK, "content": [{"type": "text", "text": "is one "}, {"type": "text", "text": "two?"}]}, SAY]}]
_PAIRS = "2 rows of prompt and completion: 2 answers are trained"
_CHATS = "2 rows of messages: 3 answers are trained"
_CALLED = "1 rows of messages: 2 answers are trained"

SHAPES = (
    Shape("Alpaca, a JSON array", _array("alpaca_data.json", INSTRUCTIONS), ALPACA, "2 rows of Alpaca: 2 answers are trained"),
    Shape("Alpaca, lines", _bytes("a.jsonl", _lines(INSTRUCTIONS)), ALPACA, "2 rows of Alpaca: 2 answers are trained"),
    Shape("Alpaca, CSV", _table("a.csv", INSTRUCTIONS), ALPACA, "2 rows of Alpaca: 2 answers are trained"),
    Shape(
        "Alpaca without inputs, with a column that nothing reads",
        _array("a.json", [{"instruction": "Say yes\ntwice.", "output": 'yes, "yes"', "source": "x"}]),
        ALPACA[1:],
        "1 rows of Alpaca: 1 answers are trained; nothing reads source (1)",
    ),
    Shape(
        "Alpaca with an empty output",
        _array("a.json", [*INSTRUCTIONS, {**INSTRUCTIONS[0], "output": ""}]),
        [*ALPACA, {**ALPACA[0], "completion": ""}],
        "3 rows of Alpaca: 2 answers are trained; 1 rows are left out: their output or completion is empty",
        "TRL trains the end of an answer that says nothing",
    ),
    Shape(
        "ShareGPT, a JSON array",
        _array("sharegpt.json", TURNS),
        CHATS,
        "2 rows of ShareGPT: 3 answers are trained; nothing reads id (2)",
    ),
    Shape(
        "ShareGPT, lines, the system's words in a column",
        _bytes("s.jsonl", _lines([{"system": "no", "conversations": TURNS[1]["conversations"][1:]}])),
        CHATS[1:],
        "1 rows of ShareGPT: 2 answers are trained",
    ),
    Shape("ShareGPT with calls of tools", _array("s.json", CALLED_TURNS), CALLED, "1 rows of ShareGPT: 2 answers are trained"),
    Shape(
        "turns of a role under the name conversations",
        _bytes("c.jsonl", _lines([{"conversations": row["messages"]} for row in CHATS])),
        CHATS,
        "2 rows of conversations: 3 answers are trained",
    ),
    Shape("messages, lines", _bytes("CHAT.JSONL", _lines(CHATS)), CHATS, _CHATS),
    Shape("messages, lines that are called JSON", _bytes("chat.json", _lines(CHATS)), CHATS, _CHATS),
    Shape(
        "messages, the array of an object",
        _bytes("chat.json", json.dumps({"version": 1.5, "tags": ["a", "b"], "data": CHATS, "more": None}).encode()),
        CHATS,
        _CHATS,
    ),
    Shape("messages, one conversation a file", _many_files, CHATS, _CHATS),
    Shape("messages, gzip", _bytes("chat.jsonl.gz", gzip.compress(_lines(CHATS))), CHATS, _CHATS),
    Shape("messages, zstd", _zst("chat.json.zst", json.dumps(CHATS).encode()), CHATS, _CHATS),
    Shape("messages, parquet", _parquet("chat.parquet", [{**row, "tools": None} for row in CHATS]), CHATS, _CHATS),
    Shape(
        "messages as JSON in a CSV", _table("c.csv", [{"messages": json.dumps(row["messages"])} for row in CHATS]), CHATS, _CHATS
    ),
    Shape("messages in parts", _array("parts.json", _IN_PARTS), CHATS[:1], "1 rows of messages: 1 answers are trained"),
    Shape("messages with calls of tools", _bytes("t.jsonl", _lines(CALLED)), CALLED, _CALLED),
    Shape(
        "messages with calls of tools, both as JSON",
        _bytes("t.jsonl", _lines([{"messages": _called('{"city": "Rome"}'), "tools": json.dumps([TOOL])}])),
        CALLED,
        _CALLED,
    ),
    Shape(
        "messages of which one is marked not to be trained",
        _bytes("w.jsonl", _lines([{"messages": [ASK, {**SAY, "weight": 0}, ASK, {**SAY, "content": "no"}]}])),
        [{"messages": [ASK, SAY, ASK, {**SAY, "content": "no"}]}],
        "1 rows of messages: 1 answers are trained; 1 are marked not to be",
        "TRL knows no such mark",
    ),
    Shape("a directory as the hub has them", _hub_directory, CHATS, _CHATS),
    Shape("a directory of splits", _split_directory, CHATS, _CHATS),
    Shape("prompts and completions, lines", _bytes("p.jsonl", _lines(PAIRS)), PAIRS, _PAIRS),
    Shape("prompts and completions, CSV", _table("p.csv", PAIRS), PAIRS, _PAIRS),
    Shape("prompts and completions, tabs", _table("p.tsv", PAIRS), PAIRS, _PAIRS),
    Shape(
        "prompts and completions of messages",
        _bytes("m.jsonl", _lines(ASKED)),
        ASKED,
        "1 rows of prompt and completion: 1 answers are trained",
    ),
    Shape("text, lines", _bytes("t.jsonl", _lines(TEXTS)), TEXTS, "3 rows of text"),
    Shape("text, parquet", _parquet("t.parquet", [{**row, "url": "x"} for row in TEXTS]), TEXTS, "3 rows of text"),
    Shape("text, CSV", _table("t.csv", TEXTS), TEXTS, "3 rows of text"),
    Shape("a text file", _bytes("a.txt", "one\ntwo caf\u00e9".encode()), [{"text": "one\ntwo caf\u00e9"}], "1 rows of text"),
)
