"""`launch_stage`: a peer that serves one stage of a run."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import LaunchParser, auto_or_count, device_name, memory_size, thread_count
from launch.options import PeerOptions, add_model_option, add_network_options, add_output_options, add_run_options
from launch.processes.lifeline import die_with_parent
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, PipeReports, Reports
from launch.processes.runner import main_of, run_peer
from launch.run.kept_run import kept_run
from launch.run.moved_stage import STAGE_FILE, remember_stage, remembered_stage
from swarm.base.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from swarm.base.config import RunConfig
    from swarm.peer.context import PeerContext
    from swarm.peer.stage.stage_peer import StagePeer
    from swarm.stage.module import StageFactory

PROGRAM = "launch_stage"
#: Marks the process that works, and gives it a pipe to its supervisor, and that one's pid.
WORKER_OPTION = "--worker-of"
#: The run that a worker which is started again served before: it may find it through anyone it knew.
AGAIN_OPTION = "--again"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StageOptions(PeerOptions):
    """What `launch_stage` was told."""

    #: None: where this peer makes the swarm fastest.
    stage: int | None
    device: str
    threads: int | None
    memory_limit: int | None
    offload_optimizer: bool
    compile: bool
    #: Dotted paths of what may be imported if the joined run names it.
    allow_import: list[str]
    no_restart: bool
    #: Of a worker: the pipe to its supervisor, and that one's pid.
    worker_of: list[int] | None


def parse(argv: Sequence[str]) -> StageOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(PROGRAM, "Serve one stage of a run: compute its micro-batches, average with its other peers.")
    add_run_options(parser)
    group = parser.add_argument_group("stage")
    group.add_argument(
        "--stage",
        metavar="auto|N",
        type=_stage,
        default="auto",
        help="stage to serve first; auto takes the one where this peer makes the swarm fastest. With a "
        "--state-dir a peer that has moved goes on where it was",
    )
    group.add_argument(
        "--device",
        metavar="auto|cpu|cuda:N",
        type=device_name,
        default="auto",
        help="where to compute; auto takes the CUDA device with the most free memory, else the CPU",
    )
    group.add_argument(
        "--threads", metavar="N", type=thread_count, default=None, help="threads to compute with on the CPU (default: every core)"
    )
    group.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=memory_size,
        default=None,
        help="for everything that training takes on the device, such as 4GiB; a stage that does not fit "
        "is refused before it is allocated (default: 80 %% of what is free)",
    )
    group.add_argument(
        "--offload-optimizer",
        action="store_true",
        help="keep the optimizer's state in main memory: more room on the GPU, a slower end of each step",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the stage's layers: some seconds once, then up to 1.4 times as fast on a GPU",
    )
    group.add_argument(
        "--allow-import",
        metavar="MODULE:NAME",
        action="append",
        default=[],
        help="the user's own model, optimizer or compressor that this machine may import if the joined run names it; repeatable",
    )
    add_model_option(group)
    add_network_options(parser)
    group.add_argument(
        "--no-restart", action="store_true", help="end with the worker process if it crashes (default: start it again)"
    )
    group.add_argument(WORKER_OPTION, metavar=("FD", "PID"), type=int, nargs=2, default=None, help=SUPPRESS)
    group.add_argument(AGAIN_OPTION, metavar="RUN", default=None, help=SUPPRESS)
    add_output_options(parser)
    return parser.parse(argv, StageOptions)


def _stage(text: str) -> int | None:
    try:
        return auto_or_count(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is neither auto nor the number of a stage") from None


def supervise(options: StageOptions, argv: list[str], reports: Reports) -> int:
    """By hand it is two processes: one that works, and one that starts it again when it crashes."""
    if options.no_restart:
        return serve(options, argv, reports)
    if options.worker_of is None:
        from launch.processes.supervisor import Supervisor

        def command(fd: int, served: dict[str, Any] | None) -> list[str]:
            words = [sys.executable, "-m", "launch.stage", *argv, WORKER_OPTION, str(fd), str(os.getpid())]
            if served is not None:
                words += ["--port", str(served["port"]), AGAIN_OPTION, served["run"], *served["fixed"]]
            return words

        return Supervisor(command).run()
    report_fd, supervisor_pid = options.worker_of
    die_with_parent(supervisor_pid)
    words = argv[: argv.index(WORKER_OPTION)]
    return serve(options, words, PipeReports(PROGRAM, report_fd))


def serve(options: StageOptions, argv: list[str], reports: Reports) -> int:
    """Serve a stage in this process until a signal comes. Returns the exit code."""
    from launch.run.composing import announce, compose, retitle

    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)

    async def build() -> tuple[StagePeer, Callable[[], None]]:
        context, run = await compose(options, max_inflight_bytes=request_bytes(options.memory_limit, options.device))
        build, device, flops_per_s = _prepare(context, options, run.paths.overridden_by(options).model, reports)
        stage = await _choose(options, context, device, flops_per_s)
        peer = build(stage)

        def moved() -> None:
            retitle(PROGRAM, _with_stage(argv, peer.stage), context.transport.address.port)
            announcer.say(f"moved to stage {peer.stage}", stage=peer.stage)
            reports.send("moved", stage=peer.stage, fixed=["--stage", str(peer.stage)])
            if options.state_dir is not None:
                remember_stage(options.state_dir, context.run, peer.stage)

        if options.state_dir is None and context.config.checkpoint_every:
            announcer.say("keeps no checkpoints: name a --state-dir, unless other peers of this stage do")

        peer.on_move.append(moved)
        fixed = ["--stage", str(stage)]
        return peer, lambda: announce(
            PROGRAM, _with_stage(argv, stage), context, run, f"stage {stage}", announcer, reports, fixed=fixed, stage=stage
        )

    return run_peer(build, serves_until_stopped=True)


def request_bytes(memory_limit: int | None, device: str) -> int:
    """Bytes of requests that are held at once, in main memory. `memory_limit` counts on the CPU alone: a GPU's is another memory.

    Raises:
        ConfigError: this machine has no such device.
    """
    from launch.processes.devices import available_memory, before_importing_torch, resolve_device

    if memory_limit is not None and device == "auto":
        before_importing_torch()
        device = resolve_device(device)
    return memory_limit if memory_limit is not None and device == "cpu" else available_memory() // 4


def _with_stage(argv: Sequence[str], stage: int) -> list[str]:
    """The command line as it would be for the stage that is served now."""
    words = list(argv)
    if "--stage" in words:
        words[words.index("--stage") + 1] = str(stage)
        return words
    return [*words, "--stage", str(stage)]


async def _choose(options: StageOptions, context: PeerContext, device: str, flops_per_s: float) -> int:
    """Where its checkpoints are, if it had moved before it was stopped; else as `--stage` says."""
    num_stages, wanted = context.config.num_stages, options.stage
    state_dir = options.state_dir
    if state_dir is not None and (moved_to := remembered_stage(state_dir, context.run, num_stages)) is not None:
        logger.info("serving stage %d, to which this peer had moved (%s)", moved_to, state_dir / STAGE_FILE)
        return moved_to
    if wanted is None:
        kept = kept_run(state_dir)
        if kept is not None and kept.run == context.run and 0 <= kept.stage < num_stages:
            logger.info("serving stage %d, which this peer served before (%s)", kept.stage, state_dir)
            return kept.stage
        from launch.processes.devices import device_memory
        from launch.run.stage_choice import choose_stage

        return await choose_stage(context, flops_per_s=flops_per_s, room_bytes=device_memory(device))
    if wanted >= num_stages:
        raise ConfigError(f"--stage {wanted}: the run has stages 0..{num_stages - 1}")
    return wanted


def _prepare(
    context: PeerContext, options: StageOptions, model: str | None, reports: Reports
) -> tuple[Callable[[int], StagePeer], str, float]:
    """Import what computes, seconds long. Returns what puts a peer of a stage together, the device and its pace."""
    from launch.processes.devices import (
        DEFAULT_MEMORY_PART,
        before_compiling,
        before_importing_torch,
        device_memory,
        measured_flops,
        resolve_device,
        share_interpreter,
        use_threads,
    )

    before_importing_torch()
    if options.compile:
        before_compiling((options.state_dir or Path(tempfile.gettempdir())) / "compiled")
    from launch.run.models import weights_for
    from models.registry import factory_of
    from swarm.peer.stage.stage_peer import Machine, StagePeer
    from swarm.stage.devices import compute_thread
    from swarm.stage.executor import ThreadExecutor, Threads
    from swarm.stage.saved.whole_checkpoint import require_own

    use_threads(options.threads)
    if options.state_dir is not None:
        require_own(options.state_dir, context.run)
    source = weights_for(context.config, model)
    may_import = options.run is not None or set(context.config.imports.values()) <= set(options.allow_import)
    device = resolve_device(options.device)
    share_interpreter(device)
    if options.offload_optimizer and device == "cpu":
        raise ConfigError("--offload-optimizer: this peer computes on the CPU: all of its state is in main memory already")
    factory = factory_of(context.config, may_import=may_import, source=source)
    for remark in getattr(factory, "remarks", ()):
        reports.send("remark", message=remark)
    limit, what = options.memory_limit, "--memory-limit"
    if limit is None:
        limit, what = int(device_memory(device) * DEFAULT_MEMORY_PART), f"{DEFAULT_MEMORY_PART:.0%} of what is free for it now"
    flops_per_s = measured_flops(device)

    def checked(steps: Sequence[int], damaged: Sequence[StorageError]) -> None:
        for error in damaged:
            reports.send("damaged", message=str(error))
        reports.send("checked", steps=list(steps))

    def build(stage: int) -> StagePeer:
        return StagePeer(
            context,
            stage=stage,
            factory=factory,
            threads=Threads(
                compute=compute_thread(device), background=ThreadExecutor("background"), storage=ThreadExecutor("storage")
            ),
            machine=Machine(
                device=device,
                memory_limit_bytes=_in_flight_bytes(factory, stage, context.config, options, limit, what, device),
                compile=options.compile,
                offload_optimizer=options.offload_optimizer,
                free_bytes=lambda: device_memory(device),
                flops_per_s=flops_per_s,
            ),
            on_checked=checked,
            on_refused=lambda error: reports.send("refused", message=str(error)),
        )

    return build, device, flops_per_s


def _in_flight_bytes(
    factory: StageFactory, stage: int, config: RunConfig, options: StageOptions, limit_bytes: int, limit: str, device: str
) -> int:
    """What the stage itself leaves of `limit_bytes`; everything, where its size is not known before it is built.

    Raises:
        ConfigError: the stage does not fit.
    """
    from launch.processes.devices import available_memory
    from swarm.stage.frozen import stage_module
    from swarm.stage.memory_plan import memory_of, require_main_memory, room_in_flight
    from swarm.stage.module import Outlined

    if not isinstance(factory, Outlined):
        return limit_bytes
    module = stage_module(factory, stage, config.frozen)
    if options.offload_optimizer:
        require_main_memory(module, config, available_memory())
    needed = memory_of(
        module,
        config,
        writes_checkpoints=options.state_dir is not None,
        on_cpu=device == "cpu",
        offload=options.offload_optimizer,
    )
    return room_in_flight(needed, limit_bytes, stage=stage, config=config, limit=limit)


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Called with `argv` it serves in this very process; from a command line it is supervised."""
    return main_of(PROGRAM, parse, serve if argv is not None else supervise, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
