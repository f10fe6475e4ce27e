"""`plan_run`: how a run would be cut into stages and what each stage costs, before anything is started or allocated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import EXIT_DONE, LaunchParser, existing_path, size_bytes
from launch.options import ConfigOptions, OutputOptions, add_config_options, add_output_options
from launch.processes.logs import console
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from launch.run.left_open import filled
from launch.run.models import require_whole
from launch.run.run_files import DataPaths, build_config, read_run_file, with_model
from launch.run.stage_plan import StageRow, plan_of, with_stages
from swarm.base.config import RunConfig

if TYPE_CHECKING:
    from rich.table import Table

PROGRAM = "plan_run"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ConfigOptions, OutputOptions):
    """What `plan_run` was told."""

    run: Path | None
    peer_memory: int | None


def parse(argv: Sequence[str]) -> PlanOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(
        PROGRAM,
        "Show how a run's model would be cut into stages of equal work, and what memory each "
        "stage's peers would need. Nothing is started.",
    )
    parser.add_argument("--run", metavar="RUN.TOML", type=existing_path, default=None, help="the run that this file describes")
    parser.add_argument(
        "--peer-memory",
        metavar="SIZE",
        type=size_bytes,
        default=None,
        help="what one stage peer may take for the model, such as 16GiB; with --stages auto the fewest stages that fit are taken",
    )
    add_config_options(parser)
    add_output_options(parser)
    return parser.parse(argv, PlanOptions)


def table_of(config: RunConfig, rows: Sequence[StageRow], peer_memory: int | None) -> Table:
    """A line for each stage, and one for the whole model."""
    from rich.table import Table

    title = f"{config.model}, {config.precision}, micro-batches of {config.micro_batch_size} x {config.sequence_length} tokens"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("stage", "layers", "parameters", "GFLOP/token", "work", "state", "a micro-batch", "sends"):
        table.add_column(heading, justify="left" if heading == "layers" else "right", no_wrap=True)
    for row in rows:
        too_much = peer_memory is not None and row.num_bytes > peer_memory
        table.add_row(
            str(row.stage),
            f"{row.layers.start}-{row.layers.stop - 1}",
            _number(row.num_trained + row.num_frozen),
            f"{row.flops_per_token / 1e9:.3f}",
            f"{row.part:.1%}",
            _size(row.state_bytes),
            _size(row.kept_bytes),
            _size(row.sent_bytes) if row.sent_bytes else "-",
            style="red" if too_much else None,
        )
    table.add_section()
    table.add_row(
        "all",
        f"0-{rows[-1].layers.stop - 1}",
        _number(sum(r.num_trained + r.num_frozen for r in rows)),
        f"{sum(r.flops_per_token for r in rows) / 1e9:.3f}",
        "",
        _size(sum(r.state_bytes for r in rows)),
        _size(sum(r.kept_bytes for r in rows)),
        "",
    )
    return table


def verdict(rows: Sequence[StageRow], peer_memory: int | None, reason: str) -> list[str]:
    """Lines for people, after the table."""
    largest = max(rows, key=lambda row: row.num_bytes)
    slowest = max(rows, key=lambda row: row.part)
    lines = [
        f"Stage {slowest.stage} has {slowest.part * len(rows):.2f} times the mean's work: with equal peers the pipeline "
        f"reaches {1 / (slowest.part * len(rows)):.0%} of its peers' speed.",
        f"Stage {largest.stage} needs most: {_size(largest.num_bytes)} (state, and one micro-batch under way; more of them "
        "take more, or are computed twice).",
    ]
    if peer_memory is not None:
        fits = largest.num_bytes <= peer_memory
        lines.append(
            f"Peers of {_size(peer_memory)} {'can' if fits else 'can NOT'} serve every stage{f'; {reason}' if reason else ''}."
        )
    return lines


def _number(value: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return str(value)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def serve(options: PlanOptions, argv: list[str], reports: Reports) -> int:
    """Print the plan."""
    overrides, place = with_model(options.overrides())
    run_file = read_run_file(options.run) if options.run is not None else None
    if run_file is not None and "model" not in overrides:
        place = run_file.paths.model
    if place is not None:
        require_whole(place)
    overrides, _ = filled(run_file, overrides, DataPaths(model=place, data="of the user's own"))  # which are not read here
    overrides, reason = with_stages(run_file, overrides, options.peer_memory)
    config = build_config(run_file, overrides)
    rows = plan_of(config)
    if options.log_format == "json":
        for row in rows:
            fields = asdict(row) | {"layers": [row.layers.start, row.layers.stop], "num_bytes": row.num_bytes}
            print(json.dumps(fields))
        return EXIT_DONE
    out = console(highlight=False)
    if not out.is_terminal:
        out = console(highlight=False, width=120)
    out.print(table_of(config, rows, options.peer_memory))
    for line in verdict(rows, options.peer_memory, reason):
        out.print(line, soft_wrap=True)
    return EXIT_DONE


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
