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
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import machine, publish
from swarm.testing.launched import Launched, metrics_of

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


class Limited(Launched):
    """A stage peer under a limit, with the most memory that it was seen to have."""

    def __init__(self, directory: Path, name: str, limit_bytes: int, **options: object) -> None:
        super().__init__(
            "launch.stage",
            directory / f"{name}.log",
            before=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes)),
            host="127.0.0.1",
            device="cpu",
            threads=1,
            state_dir=directory / name,
            no_restart=True,  # no supervisor: the process that is watched is the one that computes
            **options,
        )
        self.peak = {"VmData": 0, "RssAnon": 0}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.ended:
            try:
                status = Path(f"/proc/{self.pid}/status").read_text()
                for key in self.peak:
                    self.peak[key] = max(self.peak[key], int(status.split(f"{key}:")[1].split()[0]) * 1024)
            except (OSError, IndexError):
                pass
            time.sleep(0.02)


def _run_file(directory: Path, num_stages: int, steps: int) -> Path:
    path = directory / f"run-{num_stages}.toml"
    options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in MODEL.items())
    path.write_text(
        f'model = "causal-lm"\nnum_stages = {num_stages}\ntotal_steps = {steps}\nmicro_batch_size = 2\ntarget_batch_size = 8\n'
        f"sequence_length = 64\neval_samples = 0\ncheckpoint_every = 0\n[model_options]\n{options}\n"
    )
    return path


def _backbone(directory: Path, name: str, run: Path) -> Launched:
    return Launched("launch.backbone", directory / f"{name}.log", host="127.0.0.1", run=run, log_format="json")


def _trainer(directory: Path, name: str, join: str, metrics: Path | None = None) -> Launched:
    return Launched("launch.trainer", directory / f"{name}.log", host="127.0.0.1", join=join, metrics=metrics)


def _alone(directory: Path, limit: int, name: str, **options: object) -> tuple[Limited, str, str]:
    """One peer that is to serve the whole model: what became of it or of its trainer, and the last words."""
    with _backbone(directory, f"{name}-backbone", _run_file(directory, 1, 1)) as backbone:
        join = backbone.address()
        with (
            Limited(directory, name, limit, join=join, stage=0, **options) as peer,
            _trainer(directory, f"{name}-trainer", join) as trainer,
        ):
            deadline = time.monotonic() + 240
            while not (peer.ended or trainer.ended):
                if time.monotonic() > deadline:
                    raise peer.fail("neither refused nor failed")
                time.sleep(0.2)
            what, ended = ("stage peer", peer) if peer.ended else ("trainer", trainer)
            words = [line for line in ended.log.read_text().splitlines() if line.strip()]
            return peer, f"{what} exited with {ended.process.returncode}", words[-1][:700] if words else ""


def _together(directory: Path, limit: int, steps: int) -> tuple[list[Limited], list[dict[str, Any]]]:
    """Four peers, and what each committed step was like."""
    metrics = directory / "metrics.jsonl"
    with ExitStack() as processes:
        backbone = processes.enter_context(_backbone(directory, "backbone", _run_file(directory, NUM_STAGES, steps)))
        join, peers = backbone.address(), []
        for stage in range(NUM_STAGES):
            peers.append(processes.enter_context(Limited(directory, f"stage-{stage}", limit, join=join, stage=stage)))
            peers[-1].says("serving stage", 120)
        trainer = processes.enter_context(_trainer(directory, "trainer", join, metrics))
        if trainer.process.wait(500):
            raise trainer.fail("the trainer failed")
        time.sleep(5.0)  # the last checkpoint is being written
    return peers, metrics_of(metrics)


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
        for name, told in (("alone", {}), ("alone, told that it has 64 GiB", {"memory_limit": "64GiB"})):
            peer, end, words = _alone(directory, limit, f"alone-{len(told)}", **told)
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


def _row(name: str, peer: Limited, end: str) -> dict[str, Any]:
    peak = {f"peak {key} (MB)": value / 1e6 for key, value in peer.peak.items()}
    return {"peer": name, "end": end, **peak}


if __name__ == "__main__":
    main()
