"""What of a local run is on disk, and when its end is a failure."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.local import parse, resolve_plan
from launch.local_swarm.kept import Kept, adopt_complete, bytes_under_way, held_text, newest_checkpoint, require_own
from launch.local_swarm.processes import LocalSwarm
from launch.local_swarm.view import Picture, PlainView, Row
from launch.processes.children import Child
from launch.processes.logs import Announcer
from swarm.base.errors import ConfigError, SwarmError

FULL = "cannot write checkpoint D/step-00000040: [Errno 28] No space left on device"


def write(root: Path, peer: str, stage: int, step: int) -> None:
    directory = root / peer / "checkpoints" / f"stage-{stage}" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "checkpoint.json").write_text("{}")


def test_a_checkpoint_counts_when_every_stage_has_it(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path, 2) is None
    write(tmp_path, "stage-0-0", 0, 20)
    write(tmp_path, "stage-1-0", 1, 20)
    write(tmp_path, "stage-0-0", 0, 40)
    assert newest_checkpoint(tmp_path, 2) == 20
    write(tmp_path, "stage-1-1", 1, 40)
    assert newest_checkpoint(tmp_path, 2) == 40


def test_a_run_is_lost_once_all_have_said_that_no_step_is_left() -> None:
    kept, stages = Kept(), {"stage-0-0": 0, "stage-1-0": 1, "stage-1-1": 1}
    kept.intact = {"stage-0-0": frozenset({20, 40}), "stage-1-0": frozenset()}
    assert kept.note_news("step 40 is damaged")
    assert not kept.note_news("step 40 is damaged")
    assert not kept.is_lost(kept.held(stages), begins=False), "stage-1-1 has not said yet"
    kept.intact["stage-1-1"] = frozenset({20})
    assert not kept.is_lost(kept.held(stages), begins=False)
    kept.intact["stage-1-1"] = frozenset({60})
    assert kept.is_lost(kept.held(stages), begins=False)
    assert held_text(kept.held(stages)) == "stage 0: 20, 40; stage 1: 60"


def test_a_run_is_lost_whose_stages_have_checkpoints_of_different_steps() -> None:
    lost, begun = {0: frozenset({25, 30}), 1: frozenset({5, 10})}, {0: frozenset({5}), 1: frozenset[int]()}
    assert Kept().is_lost(lost, begins=True)
    assert not Kept().is_lost(lost, begins=False), "others have joined"
    assert not Kept().is_lost(begun, begins=True), "everyone was killed while the first was written"
    assert not Kept().is_lost({}, begins=True)


def test_what_a_peer_wrote_that_had_joined_is_handed_to_the_processes_of_its_stage(tmp_path: Path) -> None:
    for peer, stage, step in (("stage-0-0", 0, 20), ("stage-0-1", 0, 40), ("stage-1-0", 1, 20), ("joined-1", 1, 40)):
        write(tmp_path, peer, stage, step)
    assert [path.parts[-4] for path in adopt_complete(tmp_path, 2, 2)] == ["joined-1"]
    assert (tmp_path / "stage-1-0" / "checkpoints" / "stage-1" / "step-00000040" / "checkpoint.json").read_text() == "{}"
    assert adopt_complete(tmp_path, 2, 2) == [], "they have it"
    assert len(adopt_complete(tmp_path, 2, 1)) == 1, "stage-0-1 is not started"
    write(tmp_path, "stage-0-0", 0, 35)
    write(tmp_path, "joined-1", 1, 35)
    assert [path.name for path in adopt_complete(tmp_path, 2, 2)] == ["step-00000035"], "the newest may be damaged"
    assert adopt_complete(tmp_path / "new", 2, 2) == []


@pytest.mark.parametrize(
    ("newest", "refused", "fault"),
    [
        (40, FULL, ""),
        (None, FULL, f"the checkpoint of step 40 was not written (none is complete): {FULL}"),
        (20, FULL, f"the checkpoint of step 40 was not written (the newest complete one is of step 20): {FULL}"),
        (20, "", ""),
        (None, "", "the checkpoint of step 40 was not written (none is complete)"),
    ],
)
def test_a_run_that_is_not_on_disk_says_what_the_disk_said(newest: int | None, refused: str, fault: str) -> None:
    kept = Kept()
    kept.refused = refused
    assert kept.fault(40, newest) == fault


class HostNumbers(PlainView):
    def __init__(self, picture: Picture) -> None:
        super().__init__(picture, Announcer("launch_local", "text", quiet=True))
        self.lines: list[str] = []

    def event(self, text: str, **values: Any) -> None:
        self.lines.append(text)

    def step(self, line: dict[str, Any]) -> None:
        self.lines.append(f"step {line['step']}")


def swarm_in(directory: Path, *words: str) -> tuple[LocalSwarm, HostNumbers]:
    """One that has started nothing, with a stage process for each of two stages."""
    config, plan = resolve_plan(parse(["--stages", "2", "--state-dir", str(directory), *words]))
    picture = Picture(title="", total_steps=config.total_steps)
    view = HostNumbers(picture)
    swarm = LocalSwarm(config, plan, picture, view)
    picture.rows.update({f"stage-{k}-0": Row("launch_stage", k) for k in range(2)})
    return swarm, view


def test_a_local_run_fails_when_no_checkpoint_is_intact(tmp_path: Path) -> None:
    """Each damaged file is a line, once."""

    async def main() -> list[str]:
        swarm, view = swarm_in(tmp_path)
        for name, steps in (("stage-0-0", [20]), ("stage-1-0", []), ("stage-1-0", [])):
            if not steps:
                swarm._report(name, {"event": "damaged", "message": "D/parameters.safetensors is damaged"})
            swarm._report(name, {"event": "checked", "steps": steps})
        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
        swarm._children["trainer-0"] = Child(
            name="trainer-0", log=tmp_path / "log", started=futures[0], ended=futures[1], _send=lambda message: None
        )
        said = rf"no checkpoint of these processes in {tmp_path} is intact in every stage \(stage 0: 20; stage 1: none\): put"
        with pytest.raises(SwarmError, match=said):
            await asyncio.wait_for(swarm._until_trainers_are_done(), 5.0)
        return view.lines

    assert asyncio.run(main()) == ["stage-1-0: D/parameters.safetensors is damaged"]


@pytest.mark.parametrize("name", ["backbone", "trainer-0"])
@pytest.mark.parametrize("code", [-9, 1])
def test_a_local_run_that_stops_for_a_process_says_why_or_how_to_go_on(name: str, code: int, tmp_path: Path) -> None:
    """In a short line, however much the process had said before."""

    async def main() -> str:
        swarm, _ = swarm_in(tmp_path)
        swarm._picture.rows[name] = Row("launch_" + name.partition("-")[0])
        loop = asyncio.get_running_loop()
        (tmp_path / "log").write_text("words " * 1000 + "\nRuntimeError: the last of them\n")
        child = Child(
            name=name, log=tmp_path / "log", started=loop.create_future(), ended=loop.create_future(), _send=lambda message: None
        )
        swarm._children[name], swarm._serving[name] = child, loop.create_future()
        if name == "backbone":
            swarm._children["trainer-0"] = child  # somebody trains
        swarm._report(name, {"event": "serving", "host": "h", "port": 1})
        child.ended.set_result(code)
        swarm._ended.put_nowait(child)
        with pytest.raises(SwarmError) as raised:
            await asyncio.wait_for(swarm._until_trainers_are_done(), 5.0)
        return str(raised.value)

    line = asyncio.run(main())
    assert len(line) - 2 * len(str(tmp_path)) < 400
    if code < 0:
        assert line.startswith(f"{name} ended (killed by SIGKILL), and the run stops without it; ")
        assert line.endswith(f"; go on from its last checkpoint with: launch_local --state-dir {tmp_path}")
    else:
        assert line.startswith(f"{name} ended (exit code 1): ")
        assert line.endswith(f"RuntimeError: the last of them; see {tmp_path / 'log'}")


@pytest.mark.parametrize("step", [None, 3])
def test_a_run_that_a_stage_process_refuses_leaves_no_directory(step: int | None, tmp_path: Path) -> None:
    """Such as one whose stages do not fit `--memory-limit`; one that has trained leaves what it wrote."""

    async def main() -> str:
        swarm, _ = swarm_in(tmp_path / "state")
        log = tmp_path / "state" / "logs" / "stage-0-0.log"
        log.parent.mkdir(parents=True)
        log.write_text("")
        loop = asyncio.get_running_loop()
        child = Child(
            name="stage-0-0", log=log, started=loop.create_future(), ended=loop.create_future(), _send=lambda message: None
        )
        swarm._children |= {"stage-0-0": child, "trainer-0": child}
        swarm._serving["stage-0-0"] = loop.create_future()
        swarm._picture.rows["trainer-0"] = Row("launch_trainer")
        if step is not None:
            swarm._report("trainer-0", {"event": "step", "step": step, "seconds": 0.5, "loss": 3.0})
        swarm._report("stage-0-0", {"event": "failed", "message": "stage 0 of 2 needs 15.7 MB"})
        child.ended.set_result(2)
        swarm._ended.put_nowait(child)
        with pytest.raises(ConfigError) as raised:
            await asyncio.wait_for(swarm._until_trainers_are_done(), 5.0)
        await swarm._clean_up(0.0)
        return str(raised.value)

    line = asyncio.run(main())
    assert (tmp_path / "state").exists() == (step is not None)
    assert ("; see " in line) == (step is not None), line


def test_a_run_is_not_begun_again_over_checkpoints_of_different_steps(tmp_path: Path) -> None:
    async def main(found: list[tuple[str, list[int]]]) -> tuple[list[str], bool]:
        swarm, view = swarm_in(tmp_path)
        for name, steps in found:
            swarm._report(name, {"event": "checked", "steps": steps})
        return view.lines, not swarm._ended.empty()

    assert asyncio.run(main([("stage-0-0", [25, 30]), ("stage-1-0", [5, 10])])) == ([], True)
    (line,), is_over = asyncio.run(main([("stage-0-0", [5]), ("stage-1-0", [])]))
    assert not is_over
    assert "the run waits for peers that have what is missing" in line
    assert "(stage 0: 5; stage 1: none)" in line
    assert asyncio.run(main([("stage-0-0", [5, 10]), ("stage-1-0", [5])])) == ([], False)


def test_a_run_that_goes_on_tells_how_many_steps_are_new(tmp_path: Path) -> None:
    async def main() -> tuple[LocalSwarm, list[str]]:
        swarm, view = swarm_in(tmp_path)
        swarm._picture.rows["trainer-0"] = Row("launch_trainer")
        for event, step in (("goes_on", 20), ("step", 21), ("goes_on", 21), ("goes_on", 22)):
            swarm._report("trainer-0", {"event": event, "step": step, "seconds": 0.5, "loss": 3.0})
        return swarm, view.lines

    swarm, lines = asyncio.run(main())
    assert lines == ["goes on after step 20/60, loss 3.0000", "step 21", "goes on after step 22/60, loss 3.0000"]
    (text, values), *_ = swarm.summary(is_done=True)
    assert text.startswith("stopped at step 22 of 60 (2 new) in ")
    assert values["new_steps"] == 2


@pytest.mark.parametrize(("step", "said"), [(45, "stopped at step 45 of 60 in "), (60, "done: 60 steps in ")])
def test_a_run_that_an_operator_ends_early_is_not_called_done(step: int, said: str, tmp_path: Path) -> None:
    """It says how it goes on, from the checkpoint that was written as it stopped, in the same metrics file."""

    async def main() -> LocalSwarm:
        swarm, _ = swarm_in(tmp_path, "--metrics", str(tmp_path / "m.jsonl"))
        swarm._picture.rows["trainer-0"] = Row("launch_trainer")
        swarm._report("trainer-0", {"event": "step", "step": step, "seconds": 0.5, "loss": 3.0})
        return swarm

    swarm = asyncio.run(main())
    for stage in range(2):
        write(tmp_path, f"stage-{stage}-0", stage, step)
    (text, _), *lines = swarm.summary(is_done=True)
    assert text.startswith(said)
    on = [text for text, _ in lines if text.startswith("go on from it with: ")]
    command = f"launch_local --state-dir {tmp_path} --metrics {tmp_path / 'm.jsonl'}"
    assert on == [f"go on from it with: {command}"] * (step < 60)


def test_a_step_that_committed_as_the_trainers_ended_is_explained(tmp_path: Path) -> None:
    """Stages keep a step of which no trainer told: the two numbers would look like a mistake."""

    async def main() -> LocalSwarm:
        swarm, _ = swarm_in(tmp_path)
        swarm._picture.rows["trainer-0"] = Row("launch_trainer")
        swarm._report("trainer-0", {"event": "step", "step": 45, "seconds": 0.5, "loss": 3.0})
        return swarm

    swarm = asyncio.run(main())
    for newest, is_explained in ((45, False), (46, True)):
        for stage in range(2):
            write(tmp_path, f"stage-{stage}-0", stage, newest)
        [line] = [text for text, _ in swarm.summary(is_done=False) if text.startswith(f"checkpoint of step {newest} ")]
        assert line.endswith("it committed as the trainers ended, so that its loss was not told") is is_explained


def test_a_local_run_whose_disk_was_full_fails(tmp_path: Path) -> None:
    async def main() -> tuple[LocalSwarm, list[str]]:
        swarm, view = swarm_in(tmp_path)
        swarm._report("stage-1-0", {"event": "refused", "message": FULL})
        return swarm, view.lines

    swarm, lines = asyncio.run(main())
    assert lines == [f"stage-1-0: {FULL}; training goes on"]
    with pytest.raises(SwarmError, match=r"No space left on device; see .*logs"):
        swarm.require_checkpoint()
    assert len(swarm.summary(is_done=True)) == 1, "there is nothing to export"
    for stage in range(2):
        write(tmp_path, f"stage-{stage}-0", stage, 40)
    swarm.require_checkpoint()
    shutil.rmtree(tmp_path / "stage-0-0")
    with pytest.raises(SwarmError, match="none is complete"):
        swarm.require_checkpoint()


def test_a_directory_without_its_run_file_goes_on_with_its_own_run_alone(tmp_path: Path) -> None:
    for run, name in (("a" * 64, "stage-0-0"), ("a" * 64, "stage-1-0")):
        directory = tmp_path / name / "checkpoints" / name[:7] / "step-00000020"
        directory.mkdir(parents=True)
        (directory / "checkpoint.json").write_text(json.dumps({"record": {"run": run}}))
    (tmp_path / "stage-0-0" / "checkpoints" / "stage-0" / "step-00000020" / "checkpoint.json").write_text("damaged")
    require_own(tmp_path, "a" * 64)
    with pytest.raises(ConfigError, match=r"of run aaaaaaaaaaaa and no run\.json, and this is run bbbbbbbbbbbb"):
        require_own(tmp_path, "b" * 64)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json was changed: the checkpoints there are of run aaaaaaaaaaaa"):
        require_own(tmp_path, "b" * 64)


def test_a_trainer_may_die_while_another_lives_and_its_metrics_go_on(tmp_path: Path) -> None:
    """The last one may not, nor one that refuses what it was told to do."""
    metrics = tmp_path / "metrics.jsonl"

    def line_of(step: int) -> dict[str, Any]:
        return {"event": "step", "run": "r", "step": step, "head": f"h{step}", "loss": 1.0, "tokens": 4}

    async def main() -> list[str]:
        swarm, view = swarm_in(tmp_path, "--trainers", "3", "--metrics", str(metrics))
        loop = asyncio.get_running_loop()
        for index in range(3):
            name = f"trainer-{index}"
            swarm._picture.rows[name] = Row("launch_trainer")
            swarm._serving[name] = loop.create_future()
            swarm._children[name] = Child(
                name=name,
                log=tmp_path / "log",
                started=loop.create_future(),
                ended=loop.create_future(),
                pid=10 + index,
                _send=lambda message: None,
            )
            swarm._report(name, {"event": "serving", "host": "h", "port": 1})

        def end(name: str, code: int) -> None:
            child = swarm._children[name]
            child.ended.set_result(code)
            swarm._ended.put_nowait(child)

        waiting = asyncio.ensure_future(swarm._until_trainers_are_done())
        swarm._report("trainer-1", line_of(1))
        end("trainer-0", -9)
        await asyncio.sleep(0.01)
        swarm._report("trainer-2", line_of(2))
        end("trainer-1", 1)
        await asyncio.sleep(0.01)
        swarm._report("trainer-2", line_of(3))
        assert not waiting.done(), "one trainer is left"
        end("trainer-2", -9)
        with pytest.raises(SwarmError, match="trainer-2 ended"):
            await asyncio.wait_for(waiting, 5.0)
        return view.lines

    lines = asyncio.run(main())
    assert "trainer-0 (pid 10) ended: killed by SIGKILL; the run goes on with trainer-1, trainer-2" in lines
    assert "trainer-1 (pid 11) ended: exit code 1; the run goes on with trainer-2" in lines
    assert [json.loads(text)["step"] for text in metrics.read_text().splitlines()] == [1, 2, 3]


def test_what_a_process_is_writing_is_told_from_what_another_left(tmp_path: Path) -> None:
    stage = tmp_path / "checkpoints" / "stage-0"
    (stage / "step-00000020").mkdir(parents=True)
    (stage / ".partial-00000010-99").mkdir()
    assert bytes_under_way(tmp_path, 7) == -1
    (stage / ".partial-00000040-7").mkdir()
    assert bytes_under_way(tmp_path, 7) == 0
    (stage / ".partial-00000040-7" / "parameters.safetensors").write_bytes(b"x" * 10)
    assert bytes_under_way(tmp_path, 7) == 10
