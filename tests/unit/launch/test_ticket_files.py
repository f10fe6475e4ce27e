"""What a trainer records of tickets is bounded, survives a killed writer, and is found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.run import ticket_files
from launch.run.ticket_files import TicketFiles, recorded
from swarm.base.config import RunConfig, run_id_of
from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.lifecycle.commit_record import is_replayable
from swarm.peer.trainer.reports import TicketReport
from swarm.wire.messages import Hop, Norms, Trained

CONFIG = RunConfig(num_stages=1)
RUN = run_id_of(CONFIG.to_bytes())


def report(step: int, index: int, *, loss_sum: float = 1.5) -> TicketReport:
    """`step` counts from 1."""
    hops = (Hop(stage=0, peer="2" * 40, accumulated=True, norms=Norms(output=3.0), computed_on="cuda-tf32"),)
    return TicketReport(RUN, Ticket(step - 1, index), f"{step:064x}", Trained(hops=hops, loss_sum=loss_sum, tokens=7))


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "tickets").iterdir())


def test_the_first_and_the_newest_steps_are_kept(tmp_path: Path) -> None:
    files = TicketFiles(tmp_path, RunConfig(checkpoint_keep=2))
    for step in (1, 21, 41, 61):
        files.append(report(step, 0))
    assert steps_in(tmp_path) == ["step-00000001.jsonl", "step-00000041.jsonl", "step-00000061.jsonl"]


def test_lines_of_a_step_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_files, "MAX_LINES", 3)
    files = TicketFiles(tmp_path, RunConfig())
    for index in range(5):
        files.append(report(1, index))
    assert len((tmp_path / "tickets" / "step-00000001.jsonl").read_text().splitlines()) == 3


def test_a_ticket_is_found_below_any_root_each_time_that_it_was_computed(tmp_path: Path) -> None:
    for name, loss_sum in (("a", 1.0), ("b", 2.0)):
        files = TicketFiles(tmp_path / name, RunConfig())
        files.append(report(21, 4))
        files.append(report(21, 3, loss_sum=loss_sum))
    with (tmp_path / "a" / "tickets" / "step-00000021.jsonl").open("a") as file:
        file.write('{"step": 21, "ind')
    (tmp_path / "a" / "tickets" / "step-abc.jsonl").write_text("nobody's")
    found = recorded([tmp_path], CONFIG.to_bytes(), step=21, index=None)
    assert [(ticket.index, ticket.loss_sum) for ticket in found] == [(3, 1.0), (3, 2.0)]
    assert found[0].norms == [{"output": 3.0}]
    assert found[0].peers == ["2" * 40]
    assert found[0].kinds == ["cuda-tf32"]
    with pytest.raises(ConfigError, match=r"ticket 5 of step 21 is not recorded in .*, others are: 3, 4"):
        recorded([tmp_path], CONFIG.to_bytes(), step=21, index=5)
    with pytest.raises(ConfigError, match=r"no ticket of step 2 is recorded .* here are steps 21"):
        recorded([tmp_path], CONFIG.to_bytes(), step=2, index=None)
    with pytest.raises(ConfigError, match="there are no records at all"):
        recorded([tmp_path / "c"], CONFIG.to_bytes(), step=2, index=None)


@pytest.mark.parametrize(
    "changed",
    [
        {"index": -5},
        {"index": 10**30},
        {"index": "three"},
        {"tokens": "some"},
        {"tokens": 10**400},
        {"step": 20},
        {"step": 0},
        {"head": 5},
        {"stages": []},
        {"loss_sum": float("nan")},
        {"stages": [{"peer": "2" * 40, "output": float("inf")}]},
        {"stages": [{"peer": "2" * 40}] * 2},
        {"stages": [{"peer": "2" * 40, "computed_on": "a GPU?"}]},
    ],
    ids=str,
)
def test_a_line_that_was_changed_is_left_out(
    tmp_path: Path, changed: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    files = TicketFiles(tmp_path, CONFIG)
    files.append(report(21, 3))
    with (tmp_path / "tickets" / "step-00000021.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n" + json.dumps(report(21, 2).json_line() | changed).encode() + b"\n")
    assert [ticket.index for ticket in recorded([tmp_path], CONFIG.to_bytes(), step=21, index=None)] == [3]
    assert len(caplog.records) == 2


def test_other_files_in_the_directory_do_not_stop_a_trainer(tmp_path: Path) -> None:
    files = TicketFiles(tmp_path, RunConfig(checkpoint_keep=1))
    (tmp_path / "tickets").mkdir()
    (tmp_path / "tickets" / "step-abc.jsonl").touch()
    for step in (21, 41):
        files.append(report(step, 0))
    assert steps_in(tmp_path) == ["step-00000041.jsonl", "step-abc.jsonl"]


def test_a_disk_that_refuses_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tickets").write_text("a file where the directory belongs")
    files = TicketFiles(tmp_path, RunConfig())
    files.append(report(1, 0))
    files.append(report(1, 1))
    [record] = caplog.records
    assert "training goes on" in record.getMessage()


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [0, 20, 40]),
        ({"checkpoint_every": 0}, [0]),
        ({"delay_steps": 1}, [0, 1, 21, 41]),
        ({"mode": "local", "inner_batch_size": 8}, []),
    ],
)
def test_tickets_of_steps_that_begin_at_a_checkpoint_are_replayable(changes: dict[str, object], steps: list[int]) -> None:
    config = RunConfig.model_validate(changes)
    assert [step for step in range(50) if is_replayable(config, step)] == steps
