"""What a run under faults must have kept, from what it wrote down: metrics lines, records that were seen, checkpoints.

Compares with one plain process (`plain_loop`). Owns the verdicts; must not know how processes are run or disturbed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain_loop import adamw, one_step
from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.feed.feed import open_feed
from swarm.stage.saved.checkpoint import StageCheckpoint, scan
from swarm.wire.messages import CommitRecord

#: Relative: of each step's loss, and of the parameter vector (norm of the difference over the norm).
TOLERANCE = 1e-8
#: Violations of one kind that are named.
MAX_NAMED = 5


@dataclass
class Evidence:
    """What was seen of a run."""

    #: By head. Polled from peers, so that an era is known for nearly every head.
    records: dict[str, CommitRecord] = field(default_factory=dict)
    #: Digests by (stage, head), and by peer's directory: the copies of one state.
    digests: dict[tuple[int, str], dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    def saw(self, record: CommitRecord) -> None:
        known = self.records.get(record.version_id)
        if known is None or record.era < known.era:
            self.records[record.version_id] = record

    def saw_checkpoints(self, root: Path) -> list[StageCheckpoint]:
        """Note every checkpoint below `root`; older ones are pruned by their peers meanwhile."""
        found = scan([root], damaged=[])
        for checkpoint in found:
            self.saw(checkpoint.record)
            copies = self.digests[checkpoint.stage, checkpoint.record.version_id]
            copies[checkpoint.directory.relative_to(root).parts[0]] = json.dumps(checkpoint.digests, sort_keys=True)
        return found

    @property
    def num_set_backs(self) -> int:
        return max((record.era for record in self.records.values()), default=0)


@dataclass
class Verdict:
    """Violations by check, and the numbers behind them."""

    violations: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, failures: list[str]) -> None:
        self.violations[name] = failures

    @property
    def num_violations(self) -> int:
        return sum(map(len, self.violations.values()))


def metrics_lines(paths: list[Path]) -> list[dict[str, Any]]:
    lines = []
    for path in paths:
        if path.exists():
            # The last line before a SIGKILL may be torn; then the next begins in the middle of it.
            for text in path.read_text().replace('{"step"', '\n{"step"').splitlines():
                if text.startswith("{") and text.endswith("}"):
                    lines.append(json.loads(text))
    return lines


def judge(config: RunConfig, lines: list[dict[str, Any]], evidence: Evidence, final: list[StageCheckpoint]) -> Verdict:
    """Every promise that a finished run can be held to.

    Args:
        lines: of all trainers' metrics files.
        final: one checkpoint of each stage, all of the run's last head.
    """
    verdict = Verdict()
    last = final[0].record.step + 1
    targets = [config.tickets_per_step] * config.num_stages
    verdict.check(
        "every step has exactly its tickets at every stage",
        [f"step {line['step']}: {line['tickets']}" for line in lines if line["tickets"] != targets or line["skipped"]]
        + [
            f"step {record.step + 1}: {[r.num_tickets for r in record.results]}"
            for record in evidence.records.values()
            if record.step >= 0 and ([r.num_tickets for r in record.results] != targets or record.skipped)
        ],
    )
    losses: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:
        losses[line["step"]][line["head"]] = line["loss"]
    for record in evidence.records.values():
        if record.step >= 0:
            losses[record.step + 1][record.version_id] = record.loss
    verdict.check("all steps are committed", [f"step {s} was not seen" for s in range(1, last + 1) if s not in losses])
    _check_version_ids(verdict, losses, evidence, final)
    _check_plain(verdict, config, losses, final)
    verdict.check(
        "the copies of each state have one digest",
        [
            f"stage {stage}, head {version_id[:12]}: {', '.join(sorted(copies))} differ"
            for (stage, version_id), copies in evidence.digests.items()
            if len(set(copies.values())) > 1
        ],
    )
    compared = [len(copies) for copies in evidence.digests.values() if len(copies) > 1]
    verdict.numbers |= {
        "committed_steps": last,
        "states_compared": len(compared),
        "set_backs": evidence.num_set_backs,
        "metrics_lines": len(lines),
    }
    return verdict


def _check_version_ids(
    verdict: Verdict, losses: dict[int, dict[str, float]], evidence: Evidence, final: list[StageCheckpoint]
) -> None:
    """One head for each step and era, and each record follows the one before."""
    verdict.check(
        "all stages end at one head",
        [f"stage {c.stage}: {c.record.version_id[:12]}" for c in final if c.record.version_id != final[0].record.version_id],
    )
    several = []
    for step, version_ids in sorted(losses.items()):
        eras = [evidence.records[version_id].era if version_id in evidence.records else None for version_id in version_ids]
        # Heads of one step are allowed only where a set-back, which is reported, lies between them.
        if len(version_ids) > 1 and (None in eras or len(set(eras)) < len(eras)):
            several.append(f"step {step}: heads {sorted(h[:12] for h in version_ids)} in eras {eras}")
    verdict.check("peers agree on the head of each step", several)
    broken = []
    record = final[0].record
    while record.step > 0 and (previous := evidence.records.get(record.previous_version_id)) is not None:
        if previous.step != record.step - 1:
            broken.append(f"step {record.step + 1} follows step {previous.step + 1}")
        record = previous
    verdict.check("each record follows the one before", broken)


def _check_plain(verdict: Verdict, config: RunConfig, losses: dict[int, dict[str, float]], final: list[StageCheckpoint]) -> None:
    """The same training in this process, step by step."""
    torch.set_num_threads(1)
    feed = open_feed(config, None, None, None)
    model = factory_of(config).build_whole()  # type: ignore[attr-defined]
    optimizer = adamw(config, model)
    wrong, worst = [], 0.0
    for step in range(final[0].record.step + 1):
        plain, _ = one_step(config, feed, model, optimizer, step)
        for version_id, loss in losses.get(step + 1, {}).items():
            distance = abs(loss - plain) / abs(plain)
            worst = max(worst, distance)
            if not distance <= TOLERANCE:
                wrong.append(f"step {step + 1}, head {version_id[:12]}: loss {loss!r}, plain {plain!r}")
    verdict.check(f"losses equal one plain process's to {TOLERANCE:g}", wrong)
    swarm = {name: value for checkpoint in final for name, value in checkpoint.parameters().items()}
    mine = dict(model.named_parameters())
    failures = [f"parameter names differ: {sorted(set(swarm) ^ set(mine))[:5]}"] if set(swarm) != set(mine) else []
    if not failures:
        names = sorted(mine)
        plain_N = torch.cat([mine[name].detach().double().reshape(-1) for name in names])
        swarm_N = torch.cat([swarm[name].double().reshape(-1) for name in names])
        distance = float((plain_N - swarm_N).norm() / plain_N.norm())
        verdict.numbers |= {"parameters": plain_N.numel(), "parameter_distance": distance}
        if not distance <= TOLERANCE:
            failures.append(f"norm of the difference over the norm is {distance:.3g}")
    verdict.numbers |= {"worst_loss_distance": worst, "last_loss": plain}
    verdict.check(f"parameters equal the plain process's to {TOLERANCE:g}", failures)
