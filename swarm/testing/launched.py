"""Launchers as an operator starts them, each in a process of its own: started, watched and stopped in one way.

Owns the process and what it wrote. Must not know what is measured. Peers that are killed and started again by the dozen are
children of a fork server instead (`real_swarm.py`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from swarm.testing.processes import ROOT, pids_of

T = TypeVar("T")

POLL_S = 0.01
STOP_S = 60.0


def words_of(options: Mapping[str, object]) -> list[str]:
    """Options as words: `peers_per_stage=2, quiet=True` is `--peers-per-stage 2 --quiet`. None and False are left out."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, which need not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Launched:
    """One launcher in a process of its own; a context manager that leaves no process behind.

    Args:
        module: that is run, such as `launch.stage`.
        log: the file for what it prints.
        prefix: words before Python, such as those of another network namespace.
        environment: variables beside those of this process.
        before: called in the new process before it begins.
        metrics: the file for its committed steps, if it takes one.
        options: its other options, see `words_of`.
    """

    def __init__(
        self,
        module: str,
        log: Path,
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        metrics: Path | None = None,
        **options: object,
    ) -> None:
        self.name = module
        self.log = log
        self.metrics = metrics
        words = words_of({**options, "metrics": metrics})
        command = [*prefix, sys.executable, "-W", "ignore", "-m", module, *words]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, **(environment or {})}, preexec_fn=before
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def fail(self, what: str) -> SystemExit:
        """An error that says `what`, how the process ended if it did, and the end of what it wrote."""
        code = self.process.poll()
        end = "it runs still" if code is None else f"it ended with {code}"
        return SystemExit(f"{self.name}: {what}; {end}\n{self.log.read_text()[-3000:]}")

    def until(self, condition: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """What `condition()` returns once that is true.

        Raises:
            SystemExit: it was not within `timeout_s`, or the process ended before; names `what`.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.ended or time.monotonic() > deadline:
                raise self.fail(f"no {what} within {timeout_s:g} s")
            time.sleep(POLL_S)
        return found

    def says(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first match of `pattern` in what it writes; errors as of `until`."""
        return self.until(lambda: re.search(pattern, self.log.read_text()), repr(pattern), timeout_s)

    def address(self, timeout_s: float = 120.0) -> str:
        """Where it serves, once it does; it must have been started with `log_format="json"`."""
        return self.says(r'"address": "([^"]+)"', timeout_s)[1]

    def steps(self, count: int, timeout_s: float) -> list[dict[str, Any]]:
        """The metrics of the first `count` steps, once they have committed; errors as of `until`."""

        def found() -> list[dict[str, Any]] | None:
            lines = metrics_of(self.metrics) if self.metrics is not None else []
            return lines[:count] if len(lines) >= count else None

        return self.until(found, f"step {count}", timeout_s)

    def lines(self) -> Iterator[str]:
        """What it writes, line by line, until it ends."""
        with self.log.open() as file:
            line = ""
            while True:
                ended = self.ended
                while piece := file.readline():
                    line += piece
                    if line.endswith("\n"):
                        yield line.rstrip("\n")
                        line = ""
                if ended:
                    return
                time.sleep(POLL_S)

    def stop(self) -> int:
        """End it with SIGTERM, or with SIGKILL if that takes longer than a minute; its exit code."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it with SIGKILL; its exit code."""
        self.process.kill()
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LaunchedSwarm(Launched):
    """A whole swarm of one machine, from `launch_local`, with its files in `directory`."""

    def __init__(self, directory: Path, *, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        self.state_dir = directory / "state"
        super().__init__(
            "launch.local",
            directory / "output",
            environment=environment,
            metrics=directory / "metrics.jsonl",
            state_dir=self.state_dir,
            **options,
        )

    def fail(self, what: str) -> SystemExit:
        """As of one launcher, with the end of what each process of the swarm wrote."""
        logs = sorted((self.state_dir / "logs").glob("*.log"))
        return SystemExit("\n".join([str(super().fail(what)), *(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)]))

    def stage_pids(self, stage: int) -> list[int]:
        """The processes that serve `stage`, as they were started."""
        return sorted(pids_of(rf"^launch_stage .*{re.escape(str(self.state_dir))}/stage-{stage}-"))
