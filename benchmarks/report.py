"""What every benchmark says in the same way: machine, command, table, JSON and plot. Knows no benchmark.

Names no host, user or path, so that results can be published as they are.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

#: The repository: where scripts are started, and where they start their own processes.
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """Facts that decide how fast this machine computes, and how busy it is now."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command() -> str:
    """What to type at the repository's root to get these figures again."""
    words = [word for word in sys.argv[1:] if word != "--resume"]  # made in parts or at once, the figures are the same
    for i, before in enumerate(words[:-1]):
        if before == "--hivemind-python":  # where that lies is this machine's affair
            words[i + 1] = "PYTHON_WITH_HIVEMIND"
    name = ".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)
    return shlex.join(["python", "-m", name, *words])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as aligned text; numbers to four digits, columns that hold any to the right."""
    header = list(rows[0])
    lines = [header, *([_cell(row[key]) for key in header] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [not all(isinstance(row[key], str) for row in rows) for key in header]
    return "\n".join(
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def publish(
    name: str,
    *,
    facts: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    details: Any = None,
    draw: Callable[[Any], None] | None = None,
) -> None:
    """Print everything; write `results/<name>.json` and, where matplotlib is installed, `results/<name>.png`.

    Args:
        name: of the benchmark.
        facts: machine and settings, by name.
        tables: title -> rows.
        details: whatever else belongs into the JSON, such as every repetition.
        draw: draws on a matplotlib figure.
    """
    for key, value in facts.items():
        print(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    for title, rows in tables.items():
        print(f"\n{title}\n{table(rows)}")
    print(f"\nreproduce with: {command()}")
    RESULTS.mkdir(exist_ok=True)
    result = {"command": command(), "facts": facts, "tables": tables, "details": details}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if draw is not None:
        _plot(RESULTS / f"{name}.png", draw)


def load(name: str) -> dict[str, Any]:
    """What `publish` wrote under this name."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there: run the benchmark first")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def redraw(name: str, draw: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Write `results/<name>.png` from the JSON beside it, which a machine without matplotlib has made.

    Args:
        name: of the result files.
        draw: draws the result on a matplotlib figure.
    """
    result = load(name)
    _plot(RESULTS / f"{name}.png", lambda figure: draw(figure, result))


def _plot(path: Path, draw: Callable[[Any], None]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=120)
