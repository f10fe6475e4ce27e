"""`recut_run`: a new run from the checkpoint of another, with another number of stages or other options."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.arguments import EXIT_DONE, LaunchParser, count, existing_path, local_path
from launch.local_swarm.plan import RUN_FILE
from launch.options import ConfigOptions, ImportOptions, OutputOptions, add_config_options, add_import_option, add_output_options
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from launch.run.models import TOKENIZER_DIRECTORY, copy_tokenizer
from launch.run.run_files import RunFile, build_config, still_needed
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.errors import ConfigError, StorageError

PROGRAM = "recut_run"


@dataclass(frozen=True, kw_only=True)
class RecutOptions(ImportOptions, ConfigOptions, OutputOptions):
    """What `recut_run` was told."""

    checkpoints: list[Path]
    out: Path
    step: int | None


def parse(argv: Sequence[str]) -> RecutOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(
        PROGRAM,
        "Begin a new run from a checkpoint of another: with another number of stages, batch, "
        "learning rate, ... It goes on with the sample that the old run would have taken next.",
    )
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        nargs="+",
        type=existing_path,
        required=True,
        help="state directory of a local run, or those of peers that cover all stages",
    )
    parser.add_argument("--out", metavar="DIR", type=local_path, required=True, help="directory of the new run; must not exist")
    parser.add_argument(
        "--step",
        metavar="N",
        type=count,
        default=None,
        help="the checkpoint after this many steps of the old run (default: the newest that covers all stages)",
    )
    add_import_option(parser)
    add_config_options(parser)
    add_output_options(parser)
    return parser.parse(argv, RecutOptions)


def new_config(old: RunConfig, options: RecutOptions) -> RunConfig:
    """The old run's configuration with what the command line changes.

    Raises:
        ConfigError: nothing is changed, or a value is of no use.
    """
    overrides = options.overrides()
    saved = RunFile(path=options.checkpoints[0], fields=old.model_dump(mode="json"), config_bytes=old.to_bytes())
    new = build_config(saved, overrides)
    if new == old:
        raise ConfigError("nothing is changed: to go on with the same run, start its processes again")
    if (new.model, new.seed) != (old.model, old.seed):
        raise ConfigError("model and seed stay those of the checkpoint")
    return new


def serve(options: RecutOptions, argv: list[str], reports: Reports) -> int:
    """Write the new run's directory, and print how it goes on."""
    from models.registry import factory_of
    from swarm.stage.saved.checkpoint import StageCheckpoint
    from swarm.stage.saved.fork import fork, step_after
    from swarm.stage.saved.whole_checkpoint import use_complete

    if options.out.exists():
        raise ConfigError(f"--out {options.out} exists; name a new directory")
    found = [checkpoint for checkpoint, _ in use_complete(options.checkpoints, StageCheckpoint.check, step=options.step)]
    old = parse_config_bytes(found[0].config_bytes)
    new = new_config(old, options)
    step, again = step_after(old, new, found[0].record.step + 1)
    record = fork(found, old, new, factory_of(new, may_import=options.allow_import), options.out)
    try:
        (options.out / RUN_FILE).write_bytes(new.to_bytes())
    except OSError as error:
        raise StorageError(f"{options.out / RUN_FILE}: {error.strerror}") from None
    for kept in [root / TOKENIZER_DIRECTORY for root in options.checkpoints if (root / TOKENIZER_DIRECTORY).is_dir()][:1]:
        copy_tokenizer(kept, None, options.out / TOKENIZER_DIRECTORY)
    text = (
        f"run {record.run[:12]} at step {step} of {new.total_steps} in {options.out}, from step {found[0].record.step + 1} "
        f"of run {found[0].record.run[:12]}"
    )
    if again:
        text += f"; it sees the last {again} samples again"
    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)
    announcer.say(text, run=record.run, step=step, out=str(options.out))
    needed = still_needed(new, options.out)
    command = shlex.join(["launch_local", "--state-dir", str(options.out)])
    announcer.say(f"it goes on with: {' '.join([command, *needed])}")
    return EXIT_DONE


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
