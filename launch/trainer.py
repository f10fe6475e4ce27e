"""`launch_trainer`: a peer that feeds data through the stages until the last step has committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import LaunchParser, auto_or_micro_batches, local_path, positive_int
from launch.options import (
    DataOptions,
    PeerOptions,
    add_data_options,
    add_model_option,
    add_network_options,
    add_output_options,
    add_run_options,
)
from launch.processes.daemon_thread import in_daemon_thread
from launch.processes.devices import available_memory
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of, run_peer
from launch.run.metrics import MetricsFile
from launch.run.models import vocab_size_of
from launch.run.step_lines import facts_text, goes_on_text, step_text
from launch.run.ticket_files import TicketFiles
from launch.run.token_cache import token_cache

if TYPE_CHECKING:
    from swarm.peer.trainer.reports import Evaluation, StepReport
    from swarm.peer.trainer.trainer import Trainer

PROGRAM = "launch_trainer"


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(PeerOptions, DataOptions):
    """What `launch_trainer` was told."""

    steps: int | None
    #: None: adapts to what the swarm takes.
    in_flight: int | None
    metrics: Path | None
    router: str


def parse(argv: Sequence[str]) -> TrainerOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(PROGRAM, "Feed a run: send micro-batches through its stages until its last step is done.")
    add_run_options(parser)
    group = parser.add_argument_group("training")
    add_data_options(group)
    add_model_option(group)
    group.add_argument(
        "--steps",
        metavar="N",
        type=positive_int,
        default=None,
        help="leave after this many steps (default: stay until the run's last has committed)",
    )
    group.add_argument(
        "--in-flight",
        metavar="auto|N",
        type=auto_or_micro_batches,
        default="auto",
        help="micro-batches under way at a time; auto adapts to what the swarm takes",
    )
    group.add_argument(
        "--router",
        metavar="NAME|MODULE:NAME",
        default="iwrr",
        help="how micro-batches are spread over a stage's peers: iwrr, by their speed, or code of your own",
    )
    group.add_argument(
        "--metrics", metavar="FILE", type=local_path, default=None, help="append one JSON line per committed step to this file"
    )
    add_network_options(parser)
    add_output_options(parser)
    return parser.parse(argv, TrainerOptions)


def serve(options: TrainerOptions, argv: list[str], reports: Reports) -> int:
    """Feed the run until its last step has committed. Returns the exit code."""
    from launch.run.composing import announce, compose
    from swarm.feed.feed import open_feed
    from swarm.peer.trainer.trainer import Trainer
    from swarm.policy.routers import router_of

    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)
    metrics = MetricsFile(options.metrics)

    async def build() -> tuple[Trainer, Callable[[], None]]:
        context, run = await compose(options, max_inflight_bytes=available_memory() // 4)
        paths = run.paths.overridden_by(options).with_tokenizer()
        total_steps = context.config.total_steps

        def on_step(report: StepReport) -> None:
            line = report.json_line()
            line["epoch"] = line["step"] * context.config.target_batch_size / feed.num_samples
            metrics.append(line)
            if report.goes_on:
                announcer.line(goes_on_text(line, total_steps), goes_on_after=line["step"])
                reports.send("goes_on", **line)
            elif report.seconds:
                announcer.line(step_text(line, total_steps), **line)
                reports.send("step", **line)

        def on_evaluation(evaluation: Evaluation) -> None:
            values = dataclasses.asdict(evaluation)
            announcer.line(f"evaluation at step {evaluation.step}: loss {evaluation.loss:.4f}", **values)
            run, step, version_id, loss = context.run[:12], evaluation.step, evaluation.version_id, evaluation.loss
            metrics.evaluate(run, step, version_id, loss)
            reports.send("evaluation", run=run, step=step, version_id=version_id, loss=loss)

        def on_waiting(reason: str) -> None:
            announcer.line(f"waiting for {reason}", waiting_for=reason)
            reports.send("waiting", reason=reason[:500])

        feed = await in_daemon_thread(  # it may read for minutes, or wait for a process that does
            lambda: open_feed(
                context.config,
                paths.data,
                paths.eval_data,
                paths.tokenizer,
                vocab_size=vocab_size_of(context.config),
                cache=token_cache(),
            )
        )
        text, facts = facts_text(feed.facts, context.config), dataclasses.asdict(feed.facts)
        announcer.line(text, **facts)
        reports.send("data", text=text, facts=facts)
        tickets = None if options.state_dir is None else TicketFiles(options.state_dir, context.config)
        trainer = Trainer(
            context,
            feed=feed,
            num_steps=options.steps,
            in_flight=options.in_flight,
            router=router_of(options.router),
            on_step=on_step,
            on_evaluation=on_evaluation,
            on_waiting=on_waiting,
            on_ticket=None if tickets is None else tickets.append,
        )
        return trainer, lambda: announce(PROGRAM, argv, context, run, "data", announcer, reports)

    try:
        return run_peer(build, serves_until_stopped=False)
    finally:
        metrics.close()


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
