"""Files that are replaced as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.base.replace_file import replace_file


@pytest.mark.parametrize("refused", ["fsync", "replace"])
@pytest.mark.parametrize("before", [{}, {"file": b"old"}], ids=["new", "there"])
def test_a_refused_write_changes_nothing_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, before: dict[str, bytes]
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuse)
        with pytest.raises(OSError, match="No space left"):
            replace_file(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    replace_file(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}
