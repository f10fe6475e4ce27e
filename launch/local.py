"""`launch_local`: a whole swarm on this machine - a backbone, the peers of every stage, trainers - from one command."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.arguments import (
    EXIT_DONE,
    LaunchParser,
    auto_or_micro_batches,
    device_name,
    existing_path,
    local_path,
    memory_size,
    non_empty,
    port_number,
    positive_number,
    process_count,
    size_bytes,
    thread_count,
)
from launch.local_swarm.plan import DEFAULT_PEERS_PER_STAGE, DEFAULT_TRAINERS, RUN_FILE, SwarmPlan
from launch.local_swarm.processes import LocalSwarm
from launch.local_swarm.view import Picture, view_for
from launch.options import ConfigOptions, DataOptions, OutputOptions, add_config_options, add_data_options, add_output_options
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of, run_until_done
from launch.processes.state_directory import claim_directory
from launch.run.left_open import LeftOpen, as_begun, epochs_of, filled
from launch.run.metrics import MetricsFile
from launch.run.run_files import DataPaths, RunFile, build_config, read_run_file, with_model
from launch.run.stage_plan import with_stages
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError

PROGRAM = "launch_local"


@dataclass(frozen=True, kw_only=True)
class LocalOptions(DataOptions, ConfigOptions, OutputOptions):
    """What `launch_local` was told."""

    run: Path | None
    peers_per_stage: int | None
    trainers: int | None
    #: None: adapts to what the swarm takes.
    in_flight: int | None
    device: str
    threads: int | None
    memory_limit: int | None
    peer_memory: int | None
    offload_optimizer: bool
    compile: bool
    host: str
    port: int
    state_dir: Path | None
    metrics: Path | None
    plain: bool
    epochs: float | None


def parse(argv: Sequence[str]) -> LocalOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(
        PROGRAM, "Run a whole swarm on this machine and show it. Ctrl-C leaves no process, port or temporary file behind."
    )
    group = parser.add_argument_group("swarm")
    group.add_argument(
        "--run",
        metavar="RUN.TOML",
        type=existing_path,
        default=None,
        help="the run, as TOML: fields of the configuration, paths `data`, `eval_data` and `tokenizer` "
        "(relative to the file), and a table [local] with peers_per_stage and trainers",
    )
    group.add_argument(
        "--peers-per-stage",
        metavar="P",
        type=process_count,
        default=None,
        help=f"stage processes per stage (default: the run file's, or {DEFAULT_PEERS_PER_STAGE})",
    )
    group.add_argument(
        "--trainers",
        metavar="T",
        type=process_count,
        default=None,
        help=f"trainer processes (default: the run file's, or {DEFAULT_TRAINERS})",
    )
    group.add_argument(
        "--in-flight",
        metavar="auto|N",
        type=auto_or_micro_batches,
        default="auto",
        help="micro-batches under way at a time, per trainer; auto adapts to what the swarm takes",
    )
    group.add_argument(
        "--device",
        metavar="auto|cpu|cuda:N",
        type=device_name,
        default="auto",
        help="where stages compute; auto spreads them over the CUDA devices, if there are any",
    )
    group.add_argument(
        "--threads",
        metavar="N",
        type=thread_count,
        default=None,
        help="CPU threads per stage process (default: cores / processes, at least 1)",
    )
    group.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=memory_size,
        default=None,
        help="for everything that training takes, per stage process, such as 4GiB; a stage that does not fit "
        "is refused before it is allocated (default: its part of 80 %% of what is free)",
    )
    group.add_argument(
        "--peer-memory",
        metavar="SIZE",
        type=size_bytes,
        default=None,
        help="what one stage peer may take for the model: --stages auto takes the fewest stages that fit",
    )
    group.add_argument(
        "--offload-optimizer",
        action="store_true",
        help="keep the optimizer's state of stages on GPUs in main memory (see launch_stage)",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the stages' layers (see launch_stage)")
    group.add_argument(
        "--host",
        metavar="ADDRESS",
        type=non_empty,
        default="127.0.0.1",
        help="address that all peers listen at; 0.0.0.0 lets other machines join",
    )
    group.add_argument(
        "--port", metavar="PORT", type=port_number, default=0, help="port of the backbone, for TCP and UDP; 0 picks a free one"
    )
    group.add_argument(
        "--state-dir",
        metavar="DIR",
        type=local_path,
        default=None,
        help="logs, identities and checkpoints; a directory belongs to one run (default: runs/<UTC time>-<name>)",
    )
    group.add_argument(
        "--metrics", metavar="FILE", type=local_path, default=None, help="append one JSON line per committed step to this file"
    )
    group.add_argument("--plain", action="store_true", help="print lines instead of the live view")
    data = parser.add_argument_group("data")
    add_data_options(data)
    data.add_argument(
        "--epochs",
        metavar="X",
        type=positive_number,
        default=None,
        help="passes over the data, also parts of one, instead of --steps (a new run of --model DIR with --data makes one, with "
        "up to 1,024 tokens, 3 %% of warm-up and a learning rate of 2e-4 with --lora, 2e-5 without, where nothing else is said)",
    )
    add_config_options(parser)
    add_output_options(parser)
    return parser.parse(argv, LocalOptions)


def resolve_plan(options: LocalOptions) -> tuple[RunConfig, SwarmPlan]:
    """Merge file and command line; digests of the data are still missing from the configuration.

    Raises:
        ConfigError: one line about whatever is wrong.
    """
    given = options.overrides()
    overrides, place = with_model(given)
    run_file = read_run_file(options.run) if options.run is not None else None
    stored = _stored_run(options.state_dir)
    if run_file is None and stored is not None:
        run_file = stored  # what is given is held against it, and `require_same` names what differs
        if place is not None and "model_options" not in given:  # it says only where the run's weights are
            overrides = {key: value for key, value in overrides.items() if key not in ("model", "model_options")}
    model = overrides.get("model")
    if run_file is not None and model is not None and (place is not None or model != run_file.fields.get("model")):
        run_file = replace(run_file, fields={k: v for k, v in run_file.fields.items() if k != "model_options"})
    paths = (run_file.paths if run_file else DataPaths()).overridden_by(options)
    paths = paths if place is None else replace(paths, model=place)
    if stored is not None:
        left_open = LeftOpen(epochs=epochs_of(run_file, overrides, options.epochs))
        overrides = as_begun(run_file, overrides, stored.config_bytes or b"", epochs=options.epochs)
    else:
        overrides, left_open = filled(run_file, overrides, paths, epochs=options.epochs)
    overrides, _ = with_stages(run_file, overrides, options.peer_memory)
    config = build_config(run_file, overrides)
    local = run_file.local if run_file else {}
    state_dir = options.state_dir or _fresh_directory(config.name)
    plan = SwarmPlan(
        peers_per_stage=options.peers_per_stage or local.get("peers_per_stage", DEFAULT_PEERS_PER_STAGE),
        trainers=options.trainers or local.get("trainers", DEFAULT_TRAINERS),
        paths=paths,
        left_open=left_open,
        state_dir=state_dir,
        state_dir_is_new=not state_dir.exists(),
        stored_config=stored.config_bytes if stored else None,
        host=options.host,
        port=options.port,
        device=options.device,
        threads=options.threads,
        memory_limit=options.memory_limit,
        offload_optimizer=options.offload_optimizer,
        compile=options.compile,
        in_flight=options.in_flight,
        metrics=options.metrics,
        log_level=options.log_level,
        log_format=options.log_format,
    )
    if plan.offload_optimizer and plan.device == "cpu":
        raise ConfigError("--offload-optimizer: with --device cpu all state is in main memory already")
    if config.min_peers_per_stage > plan.peers_per_stage:
        raise ConfigError(
            f"min_peers_per_stage {config.min_peers_per_stage} is more than the {plan.peers_per_stage} "
            "peers per stage that are started: the run would never begin"
        )
    return config, plan


def _stored_run(state_dir: Path | None) -> RunFile | None:
    """The run that `state_dir` belongs to, if it holds one."""
    if state_dir is None or not (state_dir / RUN_FILE).exists():
        return None
    return read_run_file(state_dir / RUN_FILE)


def _fresh_directory(name: str) -> Path:
    stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}"
    candidate, attempt = Path("runs") / stem, 1
    while candidate.exists():
        attempt += 1
        candidate = Path("runs") / f"{stem}-{attempt}"
    return candidate


def serve(options: LocalOptions, argv: list[str], reports: Reports) -> int:
    """Run the swarm to its end. Returns the exit code."""
    config, plan = resolve_plan(options)
    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)
    plain = options.plain or options.quiet or options.log_format == "json"
    title = f"swarm run {config.name!r}: {config.model}, {config.num_stages} stages, logs in {plan.log_dir}"
    picture = Picture(title=title, total_steps=config.total_steps)
    MetricsFile(plan.metrics).close()  # a path that cannot be written is told now, not by a trainer later
    claim_directory(plan.state_dir)
    with view_for(picture, announcer, plain=plain) as view:
        swarm = LocalSwarm(config, plan, picture, view)
        code = run_until_done(swarm.run, serves_until_stopped=False)
    for text, values in swarm.summary(is_done=code == EXIT_DONE):
        announcer.say(text, **values)
    if code == EXIT_DONE:
        swarm.require_checkpoint()
    return code


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
