"""What `launch_local` starts: one process for each place, and the machine shared out among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.local import parse, resolve_plan
from launch.local_swarm.plan import Command, peer_commands
from swarm.base.ids import Address

WORDS = ["--stages", "2", "--peers-per-stage", "2", "--trainers", "2"]


def planned(directory: Path, *more: str, num_devices: int) -> dict[str, Command]:
    config, plan = resolve_plan(parse([*WORDS, "--state-dir", str(directory), *more]))
    return {c.name: c for c in peer_commands(config, plan, Address("127.0.0.1", 4000), num_devices)}


def after(command: Command, option: str) -> str:
    return command.words[command.words.index(option) + 1]


@pytest.mark.parametrize(
    ("num_devices", "devices"),
    [(0, ["cpu", "cpu", "cpu", "cpu"]), (1, ["cuda:0"] * 4), (3, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"])],
)
def test_stage_processes_are_spread_over_the_devices(tmp_path: Path, num_devices: int, devices: list[str]) -> None:
    commands = planned(tmp_path / "state", num_devices=num_devices)
    stages = [commands[f"stage-{stage}-{index}"] for index in range(2) for stage in range(2)]
    assert [after(command, "--device") for command in stages] == devices
    assert ["--memory-limit" in command.words for command in stages] == [device == "cpu" for device in devices]


def test_one_trainer_writes_the_metrics_and_everyone_has_a_directory(tmp_path: Path) -> None:
    state = tmp_path / "state"
    commands = planned(state, "--metrics", str(tmp_path / "metrics.jsonl"), num_devices=0)
    assert [name for name, command in commands.items() if "--metrics" in command.words] == ["trainer-0"]
    _, plan = resolve_plan(parse([*WORDS, "--state-dir", str(state)]))
    assert {str(state / name) for name in commands} <= {word for c in commands.values() for word in c.argv(plan)}
