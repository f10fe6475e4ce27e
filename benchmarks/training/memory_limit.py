"""A model larger than one machine, really: peers whose memory the operating system limits train it together.

Every `launch_stage` here runs under `RLIMIT_DATA` (`ulimit -d`): an allocation beyond it fails. Three trials:

1. one peer is to serve the whole model: it refuses, with the numbers, before it allocates;
2. the same peer is told that it has more (`--memory-limit`): the operating system ends it, so the limit is real;
3. four such peers serve a quarter each and train.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, machine, publish

MODEL = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
NUM_STAGES = 4


class Process:
    """A launcher, perhaps under a limit, with the most memory that it was seen to have."""

    def __init__(self, directory: Path, name: str, module: str, *argv: object, limit_bytes: int | None = None) -> None:
        def limited() -> None:
            assert limit_bytes is not None
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

        self.name = name
        self.log = directory / f"{name}.log"
        command = [sys.executable, "-W", "ignore", "-m", f"launch.{module}", "--host", "127.0.0.1", *map(str, argv)]
        if module == "stage":  # no supervisor: the process that is watched is the one that computes
            command.append("--no-restart")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, preexec_fn=limited if limit_bytes else None
            )
        self.peak = {"VmData": 0, "RssAnon": 0}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            try:
                status = Path(f"/proc/{self.process.pid}/status").read_text()
                for key in self.peak:
                    self.peak[key] = max(self.peak[key], int(status.split(f"{key}:")[1].split()[0]) * 1024)
            except (OSError, IndexError):
                pass
            time.sleep(0.02)

    def until(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: no {text!r}: {self.log.read_text()[-800:]}")
            time.sleep(0.1)

    def address(self) -> str:
        """Where it serves, once it does."""
        self.until('"address"', 60)
        [line] = [line for line in self.log.read_text().splitlines() if '"address"' in line]
        return json.loads(line)["address"]

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout=timeout_s)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)

    @property
    def last_line(self) -> str:
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        return lines[-1] if lines else ""


def _run_file(directory: Path, num_stages: int, steps: int) -> Path:
    path = directory / f"run-{num_stages}.toml"
    options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in MODEL.items())
    path.write_text(
        f'model = "causal-lm"\nnum_stages = {num_stages}\ntotal_steps = {steps}\nmicro_batch_size = 2\ntarget_batch_size = 8\n'
        f"sequence_length = 64\neval_samples = 0\ncheckpoint_every = 0\n[model_options]\n{options}\n"
    )
    return path


def _alone(directory: Path, limit: int, name: str, *argv: object) -> tuple[Process, str, str]:
    """One peer that is to serve the whole model: what became of it or of its trainer, and the last words."""
    run = _run_file(directory, 1, 1)
    backbone = Process(directory, f"{name}-backbone", "backbone", "--run", run, "--log-format", "json")
    try:
        address = backbone.address()
        peer = Process(
            directory,
            name,
            "stage",
            "--join",
            address,
            "--stage",
            0,
            "--device",
            "cpu",
            "--threads",
            1,
            "--state-dir",
            directory / name,
            *argv,
            limit_bytes=limit,
        )
        trainer = Process(directory, f"{name}-trainer", "trainer", "--join", address)
        try:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                for ended in (peer, trainer):
                    if ended.process.poll() is not None:
                        what = "stage peer" if ended is peer else "trainer"
                        return peer, f"{what} exited with {ended.process.returncode}", ended.last_line[:700]
                time.sleep(0.2)
            raise SystemExit(f"neither refused nor failed: {peer.log.read_text()[-800:]}")
        finally:
            peer.stop()
            trainer.stop()
    finally:
        backbone.stop()


def _together(directory: Path, limit: int, steps: int) -> tuple[list[Process], list[dict[str, Any]]]:
    """Four peers, and what each committed step was like."""
    run = _run_file(directory, NUM_STAGES, steps)
    processes = [Process(directory, "backbone", "backbone", "--run", run, "--log-format", "json")]
    metrics = directory / "metrics.jsonl"
    try:
        address = processes[0].address()
        for stage in range(NUM_STAGES):
            processes.append(
                Process(
                    directory,
                    f"stage-{stage}",
                    "stage",
                    "--join",
                    address,
                    "--stage",
                    stage,
                    "--device",
                    "cpu",
                    "--threads",
                    1,
                    "--state-dir",
                    directory / f"stage-{stage}",
                    limit_bytes=limit,
                )
            )
            processes[-1].until("serving stage", 120)
        trainer = Process(directory, "trainer", "trainer", "--join", address, "--metrics", metrics)
        processes.append(trainer)
        if trainer.wait(500):
            raise SystemExit(f"the trainer failed: {trainer.log.read_text()[-800:]}")
        time.sleep(5.0)  # the last checkpoint is being written
    finally:
        for process in reversed(processes):
            process.stop()
    return processes[1 : 1 + NUM_STAGES], [json.loads(line) for line in metrics.read_text().splitlines()]


def _draw(rows: list[dict[str, Any]], limit: int) -> Any:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar([row["peer"] for row in rows], [row["peak VmData (MB)"] for row in rows], label="most memory it had (VmData)")
        axes.axhline(limit / 1e6, color="k", label="limit of the operating system (RLIMIT_DATA)")
        axes.set(ylabel="MB", title="The whole model at one peer, and a quarter each at four")
        axes.legend()

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-mb", type=int, default=1600, help="RLIMIT_DATA of each stage process")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    limit = options.limit_mb * 10**6
    rows, details = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for name, argv in (("alone", []), ("alone, told that it has 64 GiB", ["--memory-limit", "64GiB"])):
            peer, end, words = _alone(directory, limit, f"alone-{len(argv)}", *argv)
            details[name] = {"end": end, "last line": words}
            rows.append(_row(name, peer, end))
        peers, steps = _together(directory, limit, options.steps)
        rows += [_row(f"stage {k} of {NUM_STAGES}", peer, f"{len(steps)} steps") for k, peer in enumerate(peers)]
    for name, what in details.items():
        print(f"{name}: {what['end']}: {what['last line']}")
    facts = {
        **machine(),
        "model": MODEL,
        "RLIMIT_DATA of each stage process (MB)": options.limit_mb,
        "loss by step": [round(step["loss"], 4) for step in steps],
    }
    publish("memory_limit", facts=facts, tables={"peers": rows}, details=details, draw=_draw(rows, limit))


def _row(name: str, peer: Process, end: str) -> dict[str, Any]:
    peak = {f"peak {key} (MB)": value / 1e6 for key, value in peer.peak.items()}
    return {"peer": name, "end": end, **peak}


if __name__ == "__main__":
    main()
