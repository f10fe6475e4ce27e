"""What a trainer remembers of tickets that can be computed again: a file of JSON lines for each such step. Knows no peer.

`<state directory>/tickets/step-<n>.jsonl`. Bounded: the first step, as many of the newest as checkpoints are kept, and of
each step so many lines.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from swarm.base.config import RunConfig, parse_config_bytes, run_id_of
from swarm.base.errors import ConfigError
from swarm.wire import messages as m

if TYPE_CHECKING:
    from swarm.peer.trainer.reports import TicketReport

logger = logging.getLogger(__name__)

DIRECTORY = "tickets"
MAX_LINES = 1024


class TicketFiles:
    """The ticket files that one trainer writes."""

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
        others = [path for number, path in _files(self._directory) if number not in (1, step)]
        for old in others[: max(0, len(others) - (self._keep - 1))]:
            old.unlink(missing_ok=True)


def _files(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of each such file; others that lie there are nobody's business."""
    named = ((re.fullmatch(r"step-([0-9]{8,13})\.jsonl", path.name), path) for path in directory.glob("step-*.jsonl"))
    return sorted((int(match[1]), path) for match, path in named if match is not None and path.is_file())


class _Stage(m.Norms):
    """What one stage's peer computed, in such a line."""

    peer: m.PeerIdField
    computed_on: m.KindField | None = None


class RecordedTicket(m.Piece):
    """One line of such a file."""

    step: m.StepField
    index: m.IndexField
    run: m.RunIdField
    version_id: m.DigestField = Field(alias="head")
    loss_sum: float
    tokens: Annotated[int, Field(ge=0, lt=2**53)]
    stages: tuple[_Stage, ...]

    @property
    def peers(self) -> list[str]:
        """By stage."""
        return [stage.peer for stage in self.stages]

    @property
    def norms(self) -> list[dict[str, float]]:
        """By stage and name."""
        return [stage.model_dump(exclude={"peer", "computed_on"}, exclude_none=True) for stage in self.stages]

    @property
    def kinds(self) -> list[str | None]:
        """By stage: of the device that computed it; None where nobody told."""
        return [stage.computed_on for stage in self.stages]


def recorded(roots: Iterable[Path], config_bytes: bytes, *, step: int, index: int | None) -> list[RecordedTicket]:
    """Ticket `index` of `step`, or the one with the lowest index: each time that it was computed, by trainer.

    Args:
        roots: state directories, or what they lie in.
        config_bytes: of the run.
        step, index: of the ticket; `step` counts from 1.

    Raises:
        ConfigError: there is no such record below `roots`, and which there are; or one cannot be read.
    """
    roots = list(roots)
    run, config = run_id_of(config_bytes), parse_config_bytes(config_bytes)
    files = [file for root in roots for directory in sorted(root.glob(f"**/{DIRECTORY}")) for file in _files(directory)]
    tickets = [ticket for number, path in files if number == step for ticket in _read(path, step, config) if ticket.run == run]
    found = [ticket for ticket in tickets if index is None or ticket.index == index]
    if found:
        lowest = min(ticket.index for ticket in found)
        return [ticket for ticket in found if ticket.index == lowest]
    where = ", ".join(map(str, roots))
    if tickets:
        indexes = sorted({ticket.index for ticket in tickets})
        raise ConfigError(f"ticket {index} of step {step} is not recorded in {where}, others are: {_some(indexes)}")
    steps = sorted({number for number, _ in files})
    raise ConfigError(
        f"no ticket of step {step} is recorded in {where}: trainers record those that begin where the configuration has a "
        "checkpoint written; " + (f"here are steps {_some(steps)}" if steps else "there are no records at all")
    )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")


def _read(path: Path, step: int, config: RunConfig) -> list[RecordedTicket]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    found = []
    for line in lines:
        try:
            ticket = RecordedTicket.model_validate_json(line)
            if (ticket.step, len(ticket.stages)) != (step, config.num_stages) or ticket.index >= config.tickets_per_step:
                raise ValueError("of another run, or changed")
        except ValueError:
            logger.warning("%s: a line that is no ticket is left out", path)  # its writer was killed halfway, say
        else:
            found.append(ticket)
    return found
