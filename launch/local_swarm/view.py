"""What the person at the terminal of `launch_local` sees: a live table, or plain lines where nobody watches.

Owns the picture only: it is told what happened, and asks nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.processes.logs import Announcer
from launch.run.step_lines import loss_text, step_text

_NOT_YET = ("starting", "waiting", "silent")


@dataclass
class Row:
    """One process as the view shows it."""

    role: str
    stage: int | None = None
    pid: int = 0
    state: str = "starting"
    address: str = ""
    step: int | None = None
    in_flight: int | None = None

    def start(self, pid: int) -> None:
        """Show the pid of the process, which begins now."""
        self.pid = pid

    def serve(self, address: str) -> None:
        """Show that it serves, and where."""
        self.state, self.address = "serving", address

    def move(self, stage: int) -> None:
        """Show another stage."""
        self.stage = stage

    def end(self, how: str) -> None:
        """Show how it ended; micro-batches are under way there no longer."""
        self.state, self.in_flight = f"ended ({how})", None

    def look(self, state: str) -> None:
        """Show the state that it was found in."""
        self.state = state

    def work(self, step: int | None, in_flight: int | None) -> None:
        """Show the step that it is at, and how many micro-batches are under way there."""
        self.step, self.in_flight = step, in_flight


@dataclass
class Picture:
    """Everything on show. `LocalSwarm` keeps it up to date."""

    title: str
    total_steps: int
    rows: dict[str, Row] = field(default_factory=dict)
    #: What a trainer reported of the newest step.
    step: dict[str, Any] | None = None
    #: Step and loss of the newest evaluation, and of the one with the lowest loss.
    evaluation: tuple[int, float] | None = None
    best: tuple[int, float] | None = None

    def plan(self, total_steps: int) -> None:
        """Show how many steps the run has, once its data are known."""
        self.total_steps = total_steps

    def advance(self, report: dict[str, Any]) -> bool:
        """Take the report of a step, and return True, unless one of this step or a later one is known."""
        if self.step is not None and report["step"] <= self.step["step"]:
            return False
        self.step = report
        return True

    def evaluate(self, step: int, loss: float) -> bool:
        """Take an evaluation, and return True, unless one of this step or a later one is known."""
        if self.evaluation is not None and step <= self.evaluation[0]:
            return False
        self.evaluation = (step, loss)
        if self.best is None or loss < self.best[1]:
            self.best = self.evaluation
        return True


class PlainView:
    """One line per event, for logs and pipes."""

    #: Whether the picture is drawn again and again, so that it should be kept fresh.
    redraws = False

    def __init__(self, picture: Picture, announcer: Announcer) -> None:
        self._picture = picture
        self._announcer = announcer

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, text: str, **values: Any) -> None:
        """Print that something happened; as JSON it is joined by `values`."""
        self._announcer.say(text, **values)

    def step(self, line: dict[str, Any]) -> None:
        """Print the line of a step that has committed."""
        self._announcer.line(step_text(line, self._picture.total_steps), **line)

    def refresh(self) -> None:
        """Plain lines are never redrawn."""


class LiveView(PlainView):
    """A table redrawn in place; events scroll by above it."""

    redraws = True

    def __init__(self, picture: Picture, announcer: Announcer) -> None:
        super().__init__(picture, announcer)
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._live.stop()

    def event(self, text: str, **values: Any) -> None:
        """Print above the table that something happened."""
        self._console.print(Text(text))

    def step(self, line: dict[str, Any]) -> None:
        """Redraw the table, which shows the step."""
        self.refresh()

    def refresh(self) -> None:
        """Redraw the table."""
        self._live.update(draw(self._picture), refresh=True)


def view_for(picture: Picture, announcer: Announcer, *, plain: bool) -> PlainView:
    """The live view if stdout is a terminal that can redraw."""
    live = not plain and sys.stdout.isatty() and Console().is_terminal and not Console().is_dumb_terminal
    return LiveView(picture, announcer) if live else PlainView(picture, announcer)


def draw(picture: Picture) -> Group:
    """The whole live view as something rich can print."""
    table = Table(title=picture.title, title_justify="left", expand=False)
    for heading in ("process", "pid", "address", "state", "step", "in flight"):
        table.add_column(heading, justify="right" if heading in ("pid", "step", "in flight") else "left")
    for name, row in sorted(picture.rows.items()):
        style = "red" if row.state.startswith("ended") else "yellow" if row.state in _NOT_YET else "green"
        state = Text(row.state, style=style)
        table.add_row(name, str(row.pid or ""), row.address, state, _text(row.step), _text(row.in_flight))
    done = picture.step["step"] if picture.step else 0
    progress = Table.grid(padding=(0, 2))
    bar = ProgressBar(picture.total_steps, done, width=40)
    progress.add_row(f"step {done}/{picture.total_steps}", bar, _numbers(picture))
    return Group(table, progress)


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _numbers(picture: Picture) -> str:
    parts = []
    if (line := picture.step) is not None:
        parts.append(f"loss {loss_text(line)}")
        if line["seconds"]:
            parts += [f"tokens/s {line['tokens_per_s']:.0f}", f"{line['seconds']:.2f} s/step"]
    if picture.evaluation is not None:
        parts.append(f"eval loss {picture.evaluation[1]:.4f} (step {picture.evaluation[0]})")
    return "  ".join(parts)
