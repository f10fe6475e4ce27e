"""Every code that a peer refuses with is explained in the wire file, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from swarm.wire.messages import REFUSAL_CODES

ROOT = Path(__file__).parents[3] / "swarm"
#: Written where the code is chosen, away from the refusal.
ELSEWHERE = {"failed_everywhere"}


def refused_with() -> Iterator[str]:
    """The first argument of each `Refuse(...)`, and the code of each `Refusal(...)`, where they are written out."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Refuse", "Refusal"):
                given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
                yield from (value.value for value in given if isinstance(value, ast.Constant))


def test_the_wire_file_lists_the_codes_that_are_used() -> None:
    assert set(refused_with()) | ELSEWHERE == set(REFUSAL_CODES)
