"""What the swarm costs over a plain PyTorch loop on the same cores: tokens/s, and CPU-seconds per token.

The swarm is the real one: `launch_local` with 2 stages of 1 peer (one compute thread each), 1 trainer and 1 backbone.
The plain loop (`plain_loop.py`) is one process with the same model, data, batch and as many threads in all. Both are
pinned to the same cores and take turns. CPU-seconds are utime + stime of every process of the tree, `launch_local` and
its fork servers included, between the commits of two steps; the warm-up steps before are left out, and a further step has
begun by then, so that nothing of the end is counted.

`bound` is what a synchronous pipeline can reach at most: with S stages and M micro-batches a step, M / (M + S - 1) of a step
has every stage busy. With `--delay-steps 1` the next step fills the gap.

Where other processes keep the cores busy, threads that wait for each other spin: then the plain loop with two threads
looks worse than it is, and `--one-thread` gives the honest cost of a token. With `--delay-steps 1` the losses differ by
design; until three steps have committed a CPU peer's vectors take fresh memory, which costs more than they do. A wider model
(its results are kept as `overhead_1024_delayed`): --hidden 1024 --ffn 4096 --delay-steps 1 --warmup 3 --budget 2000
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.process_cpu import busy_machine_s, stat_of, tree_of
from benchmarks.report import machine, publish
from swarm.base.config import RunConfig
from swarm.testing.launched import Launched, LaunchedSwarm

STEP_TIMEOUT_S = 300.0
NUM_STAGES = 2
#: With more cores than this in others' hands the figures say more about them.
QUIET_CORES = 0.1
#: A thread that uses more than this part of its process's CPU time while steps are timed is one that computes.
BUSY_PART = 0.2


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    is_plain: bool
    threads: int
    config: RunConfig

    @property
    def threads_text(self) -> str:
        return f"1 x {self.threads}" if self.is_plain else f"{NUM_STAGES} x {self.threads}"


@dataclass(frozen=True)
class Measured:
    """One run of a case: its timed steps as the metrics file has them, and CPU-seconds by role."""

    steps: list[dict[str, Any]]
    first_losses: list[float]
    seconds: float
    cpu_s: dict[str, float]
    busy_threads: dict[str, int]
    other_cores: float

    @property
    def tokens(self) -> int:
        return sum(step["tokens"] for step in self.steps)


# ---------------------------------------------------------------------------------------------------- /proc


def cpu_by_role(root: int) -> dict[tuple[int, str], tuple[float, dict[str, float]]]:
    """(pid, role) -> CPU-seconds of the process and of each of its threads, for `root` and all below it."""
    found = {}
    for pid in tree_of(root):
        process = Path(f"/proc/{pid}")
        threads = {task.name: stat_of(task / "stat")[1] for task in (process / "task").iterdir()}
        found[pid, _role(process)] = (stat_of(process / "stat")[1], threads)
    return found


def _role(process: Path) -> str:
    """From the command line: children of a fork server are titled by their launcher's name."""
    words = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode().split()
    if words[0] == "launch_stage":
        return f"stage {words[words.index('--stage') + 1]}"
    if words[0].startswith("launch_"):
        return words[0].removeprefix("launch_")
    if words[:3] == ["swarm", "fork", "server"]:
        return "fork servers"
    return "plain" if "plain_loop" in " ".join(words) else "launch_local"


# ---------------------------------------------------------------------------------------------------- one run


def started(case: Case, directory: Path) -> Launched:
    """The case's processes, which write `metrics.jsonl`."""
    run = directory / "run.json"
    run.write_bytes(case.config.to_bytes())
    if case.is_plain:
        metrics = directory / "metrics.jsonl"
        return Launched("benchmarks.plain_loop", directory / "output", run=run, threads=case.threads, metrics=metrics)
    return LaunchedSwarm(directory, run=run, threads=case.threads, peers_per_stage=1, trainers=1, device="cpu", quiet=True)


def measure(case: Case, warmup: int, num_steps: int) -> Measured:
    """Run the case once; time `num_steps` steps after `warmup` steps."""
    with tempfile.TemporaryDirectory() as name, started(case, Path(name)) as process:
        process.steps(warmup, STEP_TIMEOUT_S * warmup)
        before, machine_before, began = cpu_by_role(process.pid), busy_machine_s(), time.monotonic()
        steps = process.steps(warmup + num_steps, STEP_TIMEOUT_S * num_steps)
        after, machine_after, ended = cpu_by_role(process.pid), busy_machine_s(), time.monotonic()
    if before.keys() != after.keys():
        raise SystemExit(f"processes came or went while steps were timed: {before.keys() ^ after.keys()}")
    cpu_s: dict[str, float] = defaultdict(float)
    busy: dict[str, int] = defaultdict(int)
    for key, (total_s, threads) in after.items():
        total_before_s, threads_before = before[key]
        used_s = total_s - total_before_s
        cpu_s[key[1]] += used_s
        busy[key[1]] += sum(threads[t] - threads_before.get(t, 0.0) > BUSY_PART * used_s for t in threads)
    other_cores = max(0.0, machine_after - machine_before - sum(cpu_s.values())) / (ended - began)
    return Measured(
        steps[warmup:], [s["loss"] for s in steps[: warmup + num_steps]], ended - began, dict(cpu_s), dict(busy), other_cores
    )


# ---------------------------------------------------------------------------------------------------- all runs


def cases_of(options: argparse.Namespace, cores: int) -> list[Case]:
    config = RunConfig(
        name="overhead",
        model="llama-small",
        num_stages=NUM_STAGES,
        sequence_length=options.sequence,
        model_options={
            "hidden_size": options.hidden,
            "intermediate_size": options.ffn,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
        },
        micro_batch_size=options.micro_batch,
        target_batch_size=options.micro_batch * options.micro_batches,
        total_steps=options.warmup + options.steps + 1,
        learning_rate=3e-4,
        eval_samples=0,
        checkpoint_every=0,
        compression="none",
        delay_steps=0,
    )
    cases = [Case("plain", True, cores, config)]
    for delay_steps in options.delay_steps:
        for compression in options.compression:
            fields = {"compression": compression, "delay_steps": delay_steps}
            name = f"swarm {compression}" + (f", delay {delay_steps}" if delay_steps else "")
            cases.append(Case(name, False, max(1, cores // NUM_STAGES), config.model_copy(update=fields)))
    if options.one_thread:
        cases.append(replace(cases[0], name="plain, one thread", threads=1))
    return cases


def full_part(config: RunConfig) -> float:
    """Part of a synchronous step in which a pipeline can be full: its stages fill and drain once a step (1F1B)."""
    return config.tickets_per_step / (config.tickets_per_step + config.num_stages - 1)


def row_of(case: Case, runs: Sequence[Measured], plain: dict[str, Any] | None, plain_losses: list[float]) -> dict[str, Any]:
    tokens_per_s = statistics.median(step["tokens_per_s"] for run in runs for step in run.steps)
    cpu_ms = statistics.median(1e3 * sum(run.cpu_s.values()) / run.tokens for run in runs)
    computing = [role for role in runs[0].busy_threads if role.startswith("stage") or role == "plain"]
    losses = zip(runs[0].first_losses, plain_losses, strict=True)
    return {
        "case": case.name,
        "threads": case.threads_text,
        "busy threads": " + ".join(str(max(run.busy_threads[role] for run in runs)) for role in sorted(computing)),
        "tokens/s": tokens_per_s,
        "of plain": tokens_per_s / plain["tokens/s"] if plain else 1.0,
        "bound": 1.0 if case.is_plain or case.config.delay_steps else full_part(case.config),
        "CPU ms/token": cpu_ms,
        "x plain": cpu_ms / plain["CPU ms/token"] if plain else 1.0,
        "cores used": statistics.median(sum(run.cpu_s.values()) / run.seconds for run in runs),
        "by others": statistics.median(run.other_cores for run in runs),
        "loss off by": max(abs(ours / theirs - 1.0) for ours, theirs in losses),
    }


def roles_row(case: Case, runs: Sequence[Measured]) -> dict[str, Any]:
    """CPU-milliseconds per 1000 tokens by role, so that small ones show."""
    roles = ("stage 0", "stage 1", "trainer", "backbone", "launch_local", "fork servers")
    row: dict[str, Any] = {"case": case.name}
    for role in roles:
        row[role] = statistics.median(1e6 * run.cpu_s.get(role, 0.0) / run.tokens for run in runs)
    return row


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        names = [row["case"] for row in rows]
        for axes, key in zip(figure.subplots(1, 2), ("tokens/s", "CPU ms/token"), strict=True):
            bars = axes.barh(names, [row[key] for row in rows], color=["0.6", *["C0"] * (len(rows) - 1)])
            axes.bar_label(bars, fmt="%.3g", padding=2)
            axes.set_xlabel(key)
            axes.invert_yaxis()
            axes.margins(x=0.15)

    return on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("hidden", 512, "hidden size"),
        ("ffn", 1408, "size of the feed-forward layer"),
        ("layers", 8, "layers"),
        ("heads", 8, "attention heads"),
        ("sequence", 512, "tokens per sample"),
        ("micro-batch", 1, "samples per micro-batch"),
        ("micro-batches", 8, "micro-batches per step"),
        ("warmup", 2, "steps that are left out"),
        ("steps", 2, "steps that are timed"),
        ("repetitions", 2, "runs of each case, in turns"),
        ("cores", 2, "cores that everything is pinned to"),
        ("budget", 290, "seconds after which no further repetition is begun that would end later"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--compression", nargs="+", choices=("none", "8bit", "fp16", "bf16"), default=["none", "8bit"])
    parser.add_argument("--delay-steps", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--one-thread", action="store_true", help="also the plain loop with one thread")
    options = parser.parse_args()
    if min(options.warmup, options.steps, options.repetitions, options.cores) < 1:
        parser.error("--warmup, --steps, --repetitions and --cores are at least 1")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    facts = machine()
    cases = cases_of(options, facts["cores"])
    runs: dict[str, list[Measured]] = defaultdict(list)
    began = time.monotonic()
    for repetition in range(options.repetitions):
        spent_s = time.monotonic() - began
        if repetition and spent_s * (repetition + 1) / repetition > options.budget:
            print(f"  only {repetition} of {options.repetitions} repetitions fit into --budget", file=sys.stderr)
            break
        for case in cases if repetition % 2 == 0 else reversed(cases):
            run = measure(case, options.warmup, options.steps)
            runs[case.name].append(run)
            speed = statistics.median(step["tokens_per_s"] for step in run.steps)
            print(f"  {time.monotonic() - began:5.0f} s: {case.name}: {speed:.0f} tokens/s", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    plain_losses = runs["plain"][0].first_losses
    for case in cases:
        rows.append(row_of(case, runs[case.name], rows[0] if rows else None, plain_losses))
    facts |= {
        "model": f"llama-small, hidden {options.hidden}, ffn {options.ffn}, {options.layers} layers, fp32, byte tokens",
        "batch": f"{options.micro_batches} micro-batches of {options.micro_batch} x {options.sequence} tokens per step",
        "swarm": f"{NUM_STAGES} stages x 1 peer, 1 trainer, 1 backbone",
        "timed": f"median of {options.steps} steps after {options.warmup}, {len(runs['plain'])} repetitions in turns",
    }
    if max(row["by others"] for row in rows) > QUIET_CORES:
        facts["warning"] = "other processes used the cores meanwhile: compare nothing but CPU ms/token, and run it again"
    tables = {
        "Throughput and cost (by others: cores that other processes used meanwhile)": rows,
        "CPU ms per 1000 tokens by role": [roles_row(c, runs[c.name]) for c in cases if not c.is_plain],
    }
    details = {name: [vars(run) for run in each] for name, each in runs.items()}
    name = "overhead" if options.hidden == 512 else f"overhead_{options.hidden}"
    name += "_delayed" if options.delay_steps == [1] else ""
    publish(name, facts=facts, tables=tables, details=details, draw=draw(rows))


if __name__ == "__main__":
    main()
