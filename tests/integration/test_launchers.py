"""Three launchers by hand make a swarm: a backbone creates the run, stages and a trainer join it by one address."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

from swarm.testing.launched import Launched, metrics_of
from swarm.testing.processes import environment, launcher

START_S = 60.0
RUN = 'name = "by-hand"\nnum_stages = 2\ntotal_steps = 4\ndata = "text.txt"\neval_samples = 8\nauxiliaries = 1\n'


def launched(directory: Path, name: str, role: str, **options: object) -> Launched:
    """A launcher in the background; ended with its block."""
    return Launched(f"launch.{role}", directory / f"{name}.out", host="127.0.0.1", **options)


def address_of(process: Launched) -> str:
    """Where a launcher says it serves."""
    return process.says(r"serving .* at (\S+:\d+)", START_S)[1]


def test_three_launchers_by_hand_make_a_swarm(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    (tmp_path / "run.toml").write_text(RUN)
    metrics = tmp_path / "metrics.jsonl"
    with ExitStack() as stack:

        def stage(number: int, choice: object) -> Launched:
            name = f"stage-{number}"
            words = {"join": join, "stage": choice, "threads": 1, "state_dir": tmp_path / name}
            peer = stack.enter_context(launched(tmp_path, name, "stage", **words))
            address_of(peer)
            return peer

        backbone = stack.enter_context(launched(tmp_path, "backbone", "backbone", run=tmp_path / "run.toml", aggregate=True))
        join = address_of(backbone)
        stages = [stage(0, 0), stage(1, "auto")]
        assert "serving stage 1 of run" in stages[1].log.read_text(), "auto takes the stage without peers"
        trainer = stack.enter_context(
            launched(tmp_path, "trainer", "trainer", join=join, data=tmp_path / "text.txt", metrics=metrics)
        )
        status = subprocess.run(
            launcher("status", join, "--log-format", "json"),
            capture_output=True,
            text=True,
            env=environment(),
            check=True,
            cwd=tmp_path,
        )
        replies = json.loads(status.stdout)["peers"]
        assert all(0 <= reply["detail"]["loop_late_ms"] < 60_000 for reply in replies), "each tells how late its loop comes"
        asked = replies[0]
        assert asked["role"] == "backbone"
        assert asked["detail"]["attempts_helped"] == 0, "it would help, if averages were large enough to be worth it"
        assert trainer.process.wait(timeout=START_S) == 0, trainer.log.read_text()
        assert len(metrics_of(metrics)) == 4
        assert "evaluation at step 4" in trainer.log.read_text()
        for peer in (*stages, backbone):
            peer.process.terminate()
            assert peer.process.wait(timeout=15.0) == 0, peer.log.read_text()
    checkpoints = [tmp_path / "stage-0", tmp_path / "stage-1"]
    exported = subprocess.run(
        launcher("export", "--checkpoints", *checkpoints, "--out", tmp_path / "model"),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        cwd=tmp_path,
    )
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_trainer_with_other_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four. " * 1000)
    (tmp_path / "other.txt").write_text("five six seven eight. " * 1000)
    (tmp_path / "run.toml").write_text(RUN)
    with launched(tmp_path, "backbone", "backbone", run=tmp_path / "run.toml") as backbone:
        join = ["--join", address_of(backbone), "--host", "127.0.0.1"]
        refused = subprocess.run(
            launcher("trainer", *join, "--data", "other.txt", "--log-level", "warning"),
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
            cwd=tmp_path,
            timeout=START_S,
        )
    assert refused.returncode == 2
    lines = refused.stderr.splitlines()
    assert len(lines) == 1, lines
    assert "other.txt" in lines[0]
