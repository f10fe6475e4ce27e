"""Three launchers by hand make a swarm: a backbone creates the run, stages and a trainer join it by one address."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swarm.testing.processes import environment, launcher, wait_until

START_S = 60.0
RUN = 'name = "by-hand"\nnum_stages = 2\ntotal_steps = 4\ndata = "text.txt"\neval_samples = 8\nauxiliaries = 1\n'


@contextmanager
def started(directory: Path, name: str, module: str, *argv: object) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A launcher in the background and the file it prints to; ended with the block."""
    out = directory / f"{name}.out"
    with out.open("w") as file:
        process = subprocess.Popen(
            launcher(module, *argv),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
            env=environment(),
        )
    try:
        yield process, out
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def address_of(process: subprocess.Popen[str], out: Path) -> str:
    """Where a launcher says it serves."""

    def found() -> re.Match[str] | None:
        assert process.poll() is None, out.read_text()
        return re.search(r"serving .* at (\S+:\d+)", out.read_text())

    wait_until(found, timeout_s=START_S, what=f"{out.stem} serves")
    match = found()
    assert match is not None
    return match.group(1)


def test_three_launchers_by_hand_make_a_swarm(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    (tmp_path / "run.toml").write_text(RUN)
    metrics = tmp_path / "metrics.jsonl"
    with ExitStack() as stack:
        here = ["--host", "127.0.0.1"]
        backbone, backbone_out = stack.enter_context(
            started(tmp_path, "backbone", "backbone", "--run", "run.toml", "--aggregate", *here)
        )
        join = ["--join", address_of(backbone, backbone_out), *here]
        stages = [
            stack.enter_context(
                started(
                    tmp_path,
                    f"stage-{n}",
                    "stage",
                    *join,
                    "--stage",
                    choice,
                    "--threads",
                    1,
                    "--state-dir",
                    tmp_path / f"stage-{n}",
                )
            )
            for n, choice in enumerate(["0"])
        ]
        address_of(*stages[0])
        stages.append(
            stack.enter_context(
                started(
                    tmp_path, "stage-1", "stage", *join, "--stage", "auto", "--threads", 1, "--state-dir", tmp_path / "stage-1"
                )
            )
        )
        address_of(*stages[1])
        assert "serving stage 1 of run" in stages[1][1].read_text(), "auto takes the stage without peers"
        trainer, trainer_out = stack.enter_context(
            started(tmp_path, "trainer", "trainer", *join, "--data", "text.txt", "--metrics", metrics)
        )
        status = subprocess.run(
            launcher("status", join[1], "--log-format", "json"),
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
        assert trainer.wait(timeout=START_S) == 0, trainer_out.read_text()
        assert len(metrics.read_text().splitlines()) == 4
        assert "evaluation at step 4" in trainer_out.read_text()
        for process, out in (*stages, (backbone, backbone_out)):
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=15.0) == 0, out.read_text()
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
    with started(tmp_path, "backbone", "backbone", "--run", "run.toml", "--host", "127.0.0.1") as (backbone, out):
        join = ["--join", address_of(backbone, out), "--host", "127.0.0.1"]
        refused = subprocess.run(
            launcher("trainer", *join, "--data", "other.txt"),
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
