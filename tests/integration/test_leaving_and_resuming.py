"""Real processes come and go: SIGTERM costs no ticket, SIGKILL of everyone no step that a complete checkpoint holds."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from swarm.base.ids import Address
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.real_swarm import RealSwarm, tiny_config

T = TypeVar("T")

#: What the last log line of a stage peer tells.
LEFT = re.compile(r"leaving after step \d+: (\d+) tickets accumulated, (\d+) passed on, (\d+) failed, (\d+) given back")


class Running:
    """A swarm, and the loop that it lives on, for one test after another: its fork server starts once."""

    def __init__(self, runner: asyncio.Runner, swarm: RealSwarm) -> None:
        self.swarm = swarm
        self._runner = runner

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        async def to_the_end() -> T:
            try:
                return await scenario
            finally:
                await self.swarm.kill_all()

        return self._runner.run(to_the_end())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with asyncio.Runner() as runner:

        async def started() -> RealSwarm:
            return await RealSwarm(tmp_path_factory.mktemp("swarm"), tiny_config()).__aenter__()

        swarm = runner.run(started())
        yield Running(runner, swarm)
        runner.run(swarm.__aexit__())


def lines_of(swarm: RealSwarm) -> list[dict[str, object]]:
    return [json.loads(text) for text in swarm.metrics.read_text().splitlines()]


def test_sigterm_to_a_peer_during_training_costs_no_ticket(running: Running, tmp_path: Path) -> None:
    """First a member, then the backbone that coordinates, then the leader of another stage."""
    config, swarm = tiny_config(total_steps=40), running.swarm
    swarm.take_up(tmp_path, config)

    async def scenario() -> None:
        await swarm.begin(peers_per_stage=2)
        await swarm.step(3)
        for number, name in enumerate(("stage-0-0", "backbone", "stage-1-1"), start=1):
            began = time.monotonic()
            assert await swarm.terminate(name, within_s=15.0) == 0, swarm.log(name)
            assert time.monotonic() - began < 15.0
            await swarm.step(swarm.steps[-1]["step"] + 3 * number)
        assert await swarm.children["trainer-0"].ended == 0
        for name in ("stage-0-1", "stage-1-0"):
            assert await swarm.terminate(name, within_s=15.0) == 0, swarm.log(name)

    running.run(scenario())
    lines = lines_of(swarm)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert sum(line["reopened"] for line in lines) == 0, "a step was reopened for tickets that were missing"
    for stage in range(2):
        ends: Counter[str] = Counter()
        for index in range(2):
            found = LEFT.search(swarm.log(f"stage-{stage}-{index}"))
            assert found is not None, swarm.log(f"stage-{stage}-{index}")
            ends.update(dict(zip(("accumulated", "passed", "failed", "given back"), map(int, found.groups()), strict=True)))
        expected = config.tickets_per_step * config.total_steps
        assert ends == {"accumulated": expected, "passed": 0, "failed": 0, "given back": 0}, f"stage {stage}: {dict(ends)}"


def test_case_24_a_disk_that_refuses_a_checkpoint_stops_nothing(running: Running, tmp_path: Path) -> None:
    """No file of a stage process may grow beyond 8 KB for a while: one error for each checkpoint, the old one intact."""
    config, swarm = tiny_config(total_steps=24, checkpoint_every=4, checkpoint_keep=1, checkpoint_copies=1), running.swarm
    swarm.take_up(tmp_path, config)

    async def scenario() -> None:
        await swarm.begin(peers_per_stage=1)
        await swarm.step(5)
        stages = [swarm.children[f"stage-{stage}-0"] for stage in range(2)]
        for child in stages:
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
        await swarm.step(14)
        kept = find_complete([swarm.state_root])
        assert kept[0].record.step + 1 in (4, 8), "the checkpoint from before is gone"
        for checkpoint in kept:
            checkpoint.parameters()  # as its digest says
        assert not list(swarm.state_root.glob("*/checkpoints/stage-*/.partial-*")), "what was written in part is left"
        for child in stages:
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert await swarm.children["trainer-0"].ended == 0
        (swarm.state_root / "copy").mkdir()  # of its directory, while the peer lives
        shutil.copy(swarm.state_root / "stage-0-0" / "identity.json", swarm.state_root / "copy")
        copy = await swarm.spawn("copy", "stage", "--stage", 0)
        assert await copy.ended == 2, swarm.log("copy")
        assert "start with an empty one" in swarm.log("copy")
        for stage in range(2):
            await swarm.terminate(f"stage-{stage}-0", within_s=15.0)

    running.run(scenario())
    assert [line["step"] for line in lines_of(swarm)] == list(range(1, 25))
    assert find_complete([swarm.state_root])[0].record.step + 1 == 24
    for stage in range(2):
        errors = [line for line in swarm.log(f"stage-{stage}-0").splitlines() if " ERROR " in line]
        assert errors, "nobody was told"
        assert all("cannot write checkpoint" in line and "training goes on" in line for line in errors), errors
        steps = [re.search(r"step-(\d+)", line).group(1) for line in errors]  # type: ignore[union-attr]
        assert len(set(steps)) == len(steps), "one error for each checkpoint"


def test_case_21_after_sigkill_of_everyone_the_run_goes_on_at_its_newest_complete_checkpoint(
    running: Running, tmp_path: Path
) -> None:
    """Twice killed, the run reports the losses of one that was left alone, and each step once."""
    config, swarm = tiny_config(total_steps=16, checkpoint_every=3), running.swarm
    (tmp_path / "killed").mkdir()
    (tmp_path / "left").mkdir()

    async def scenario() -> None:
        complete = 0
        for kill_at in (5, 11, None):
            await swarm.begin(peers_per_stage=2)
            await swarm.step(complete + 1)
            first = swarm.steps[0]["step"]
            assert first == complete + 1, f"it went on at step {first}, the newest complete checkpoint is of {complete}"
            if kill_at is None:
                assert await swarm.children["trainer-0"].ended == 0
            else:
                await swarm.step(kill_at)
                await swarm.kill_all()
                complete = find_complete([swarm.state_root])[0].record.step + 1
                assert complete >= kill_at - config.checkpoint_every

    async def undisturbed() -> None:
        await swarm.begin(peers_per_stage=1)
        assert await swarm.children["trainer-0"].ended == 0

    swarm.take_up(tmp_path / "killed", config)
    running.run(scenario())
    killed = lines_of(swarm)
    swarm.take_up(tmp_path / "left", config)
    running.run(undisturbed())
    left_alone = lines_of(swarm)
    assert [line["step"] for line in killed] == list(range(1, 17))
    assert [line["loss"] for line in killed] == pytest.approx([line["loss"] for line in left_alone], rel=1e-11)


def test_machines_that_name_one_another_go_on_after_a_power_cut_in_any_order(running: Running, tmp_path: Path) -> None:
    """Nobody creates the run a second time; at last the machine that all others name is gone for good."""
    config, swarm = tiny_config(total_steps=400, checkpoint_every=3), running.swarm
    swarm.take_up(tmp_path, config)
    roles = {"backbone": "backbone", "stage-0-0": "stage", "stage-1-0": "stage", "trainer-0": "trainer"}

    async def life(order: Sequence[str], joins: Mapping[str, Address], *, complete: int) -> int:
        swarm.steps.clear()
        for name in order:
            words = ["--join-timeout", 3, *(["--stage", name[6]] if name[0] == "s" else [])]
            await swarm.spawn(name, roles[name], *words, join=joins[name])
        await swarm.step(complete + 5)
        assert swarm.steps[0]["step"] == complete + 1, f"it went on elsewhere than at the checkpoint of step {complete}"
        await swarm.kill_all()
        return find_complete([swarm.state_root])[0].record.step + 1

    async def scenario() -> None:
        await swarm.begin(peers_per_stage=1)
        where = {name: await swarm.serving(name) for name in roles}
        await swarm.step(5)
        await swarm.kill_all()
        complete = find_complete([swarm.state_root])[0].record.step + 1
        names = list(roles)
        ring = {name: where[names[(n + 1) % len(names)]] for n, name in enumerate(names)}
        complete = await life(names[::-1], ring, complete=complete)
        left = names[1:]
        await life(left, dict.fromkeys(left, where["backbone"]), complete=complete)

    running.run(scenario())
