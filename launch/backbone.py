"""`launch_backbone`: a peer without a GPU that others bootstrap from, are coordinated by and, if asked, are helped by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.arguments import LaunchParser
from launch.options import (
    DataOptions,
    PeerOptions,
    add_data_options,
    add_model_option,
    add_network_options,
    add_output_options,
    add_run_options,
)
from launch.processes.devices import available_memory, before_importing_torch, use_threads
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of, run_peer
from swarm.base.errors import ConfigError

if TYPE_CHECKING:
    from swarm.base.config import RunConfig
    from swarm.peer.aggregator import Aggregator
    from swarm.peer.backbone import Backbone
    from swarm.peer.link import Link

PROGRAM = "launch_backbone"


@dataclass(frozen=True, kw_only=True)
class BackboneOptions(PeerOptions, DataOptions):
    """What `launch_backbone` was told."""

    aggregate: bool


def parse(argv: Sequence[str]) -> BackboneOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(PROGRAM, "Bootstrap and coordinate a run. Needs no GPU; a run may have several.")
    add_run_options(parser)
    parser.add_argument(
        "--aggregate",
        action="store_true",
        help="also reduce parts of the stages' averages, where that makes them faster: of use on a good line "
        "(the run must allow it: auxiliaries in its file)",
    )
    group = parser.add_argument_group("data (to create a run: its digest becomes part of the run)")
    add_data_options(group)
    add_model_option(group)
    add_network_options(parser)
    add_output_options(parser)
    return parser.parse(argv, BackboneOptions)


def serve(options: BackboneOptions, argv: list[str], reports: Reports) -> int:
    """Serve as a backbone until a signal comes. Returns the exit code."""
    from launch.run.composing import announce, compose
    from swarm.peer.backbone import Backbone

    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)

    async def build() -> tuple[Backbone, Callable[[], None]]:
        limit_bytes = available_memory() // 4
        context, run = await compose(options, max_inflight_bytes=limit_bytes)
        aggregator = _aggregator(context.config, limit_bytes) if options.aggregate else None
        peer = Backbone(context, aggregator)
        return peer, lambda: announce(PROGRAM, argv, context, run, "the backbone", announcer, reports)

    return run_peer(build, serves_until_stopped=True)


def _aggregator(config: RunConfig, limit_bytes: int) -> Callable[[Link], Aggregator]:
    """What makes the part that sums; imports torch.

    Raises:
        ConfigError: nobody would ask it.
    """
    if not config.auxiliaries:
        raise ConfigError("--aggregate: the run uses no auxiliaries; create one with auxiliaries = 1 (or more) in its file")
    before_importing_torch()
    from swarm.peer.aggregator import Aggregator
    from swarm.stage.executor import ThreadExecutor

    use_threads(1)  # a line is slower than one thread's sums
    return lambda link: Aggregator(link, ThreadExecutor("aggregate"), limit_bytes=limit_bytes)


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
