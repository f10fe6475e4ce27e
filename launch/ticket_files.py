"""What a trainer remembers of tickets that can be computed again: a file of JSON lines for each such step. Knows no peer.

`<state directory>/tickets/step-<n>.jsonl`. Bounded: the first step, as many of the newest as checkpoints are kept, and of
each step so many lines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError

if TYPE_CHECKING:
    from swarm.peer.reports import TicketReport

logger = logging.getLogger(__name__)

DIRECTORY = "tickets"
MAX_LINES = 1024


class TicketFiles:
    """Of one trainer."""

    def __init__(self, state_dir: Path, config: RunConfig) -> None:
        self._directory = state_dir / DIRECTORY
        self._keep = config.checkpoint_keep
        self._num_lines: dict[int, int] = {}
        self._is_failing = False

    def append(self, report: TicketReport) -> None:
        """Add a line; a disk that refuses is told once."""
        line = report.json_line()
        step = line["step"]
        if self._num_lines.get(step, 0) >= MAX_LINES:
            return
        try:
            if step not in self._num_lines:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._prune(step)
            with (self._directory / f"step-{step:08d}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._is_failing:
                logger.error("%s: %s; training goes on, its tickets are not recorded", self._directory, error.strerror)
            self._is_failing = True
            return
        self._num_lines[step] = self._num_lines.get(step, 0) + 1

    def _prune(self, step: int) -> None:
        others = [path for path in sorted(self._directory.glob("step-*.jsonl")) if _step_of(path) not in (1, step)]
        for old in others[: max(0, len(others) - (self._keep - 1))]:
            old.unlink(missing_ok=True)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


@dataclass(frozen=True)
class RecordedTicket:
    """One line of such a file."""

    step: int
    index: int
    run: str
    head: str
    loss_sum: float
    tokens: int
    peers: tuple[str, ...]
    norms: tuple[dict[str, float], ...]


def recorded(roots: Iterable[Path], *, run: str, step: int, index: int | None) -> list[RecordedTicket]:
    """Ticket `index` of `step`, or the one with the lowest index: each time that it was computed, by trainer.

    Raises:
        ConfigError: there is no such record below `roots`; says which there are.
    """
    roots = list(roots)
    paths = sorted(path for root in roots for path in root.glob(f"**/{DIRECTORY}/step-*.jsonl"))
    tickets = [ticket for path in paths if _step_of(path) == step for ticket in _read(path) if ticket.run == run]
    found = [ticket for ticket in tickets if index is None or ticket.index == index]
    if found:
        lowest = min(ticket.index for ticket in found)
        return [ticket for ticket in found if ticket.index == lowest]
    where = ", ".join(map(str, roots))
    if tickets:
        indexes = sorted({ticket.index for ticket in tickets})
        raise ConfigError(f"ticket {index} of step {step} is not recorded in {where}, others are: {_some(indexes)}")
    steps = sorted({_step_of(path) for path in paths})
    raise ConfigError(
        f"no ticket of step {step} is recorded in {where}: trainers record those that begin at a checkpoint; "
        + (f"here are steps {_some(steps)}" if steps else "there are no records at all")
    )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")


def _read(path: Path) -> list[RecordedTicket]:
    found = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
            stages = [dict(stage) for stage in line["stages"]]
            peers = tuple(str(stage.pop("peer")) for stage in stages)
            norms = tuple({name: float(norm) for name, norm in stage.items() if norm is not None} for stage in stages)
            found.append(RecordedTicket(
                line["step"], line["index"], line["run"], line["head"], float(line["loss_sum"]), line["tokens"], peers, norms
            ))  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("%s: a line that is no ticket is left out", path)  # its writer was killed halfway
    return found
