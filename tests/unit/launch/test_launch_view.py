"""What people see: plain lines for pipes, a table for terminals, JSON for machines."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from launch.local_swarm.view import Picture, PlainView, Row, draw
from launch.processes.logs import Announcer
from launch.run.step_lines import goes_on_text, step_text
from launch.status import table_of
from swarm.base.ids import Address
from swarm.wire.messages import Member, StatusReply

LINE = {
    "step": 12,
    "head": "ab" * 32,
    "loss": 2.91,
    "tokens": 4096,
    "tokens_per_s": 8123.4,
    "seconds": 0.5,
    "grad_norm": 1.0,
    "lr": 3e-3,
    "peers": [2, 1],
    "retries": 0,
    "skipped": False,
    "tickets": [8, 8],
}


def test_a_step_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    PlainView(Picture("t", 60), Announcer("launch_local", "text", quiet=False)).step(LINE)
    out = capsys.readouterr().out
    assert out.startswith("step 12/60 loss 2.9100 tokens/s 8123 ")
    assert "peers 2+1" in out


def test_a_step_that_was_skipped_has_no_loss() -> None:
    line = {**LINE, "loss": None, "skipped": True}
    text = step_text(line, 60)
    assert text.startswith("step 12/60 loss none tokens/s ")
    assert text.endswith("skipped")
    assert goes_on_text(line, 60) == "goes on after step 12/60, loss none"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(Picture(title="t", total_steps=60, step=line)))
    assert "loss none" in console.export_text()


def test_json_lines_carry_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    PlainView(Picture("t", 60), Announcer("launch_local", "json", quiet=False)).step(LINE)
    assert json.loads(capsys.readouterr().out).items() >= LINE.items()


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(Picture("t", 60), Announcer("launch_local", "text", quiet=True))
    view.step(LINE)
    view.event("something")
    assert capsys.readouterr().out == ""


def test_the_live_picture_shows_processes_and_progress() -> None:
    picture = Picture("a run", 60, step=LINE, evaluation=(10, 3.1))
    picture.rows["stage-0-0"] = Row("launch_stage", 0, 123, "serving", "127.0.0.1:4000", 12, 3)
    picture.rows["stage-0-1"] = Row("launch_stage", 0, 124, "ended (killed by SIGKILL)")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(picture))
    text = console.export_text()
    picture.step = LINE | {"seconds": 0.0}
    console.print(draw(picture))
    assert "tokens/s" not in console.export_text(), "nobody has seen how long it took"
    for expected in ("stage-0-0", "127.0.0.1:4000", "killed by SIGKILL", "step 12/60", "loss 2.9100", "eval loss 3.1000"):
        assert expected in text


@pytest.mark.parametrize(
    ("step", "shown"), [(-1, "step - of 60, head -"), (0, "step 0 of 60, head -"), (7, "step 7 of 60, head -")]
)
def test_a_peer_that_knows_no_step_yet_shows_none(step: int, shown: str) -> None:
    member = Member(peer="a" * 40, incarnation="b" * 16, host="127.0.0.1", port=4000)
    reply = StatusReply(role="backbone", member=member, step=step, state="watching", detail={"total_steps": 60})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of(reply, {Address("127.0.0.1", 4001): "silent"}))
    text = console.export_text()
    assert shown in text
    assert "-1" not in text
