"""`launch_backbone`: a peer without a GPU that others bootstrap from, relay through and are coordinated by."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from launch.arguments import (
    LaunchParser,
    add_data_options,
    add_logging_options,
    add_model_option,
    add_network_options,
    add_run_options,
)
from launch.devices import available_memory
from launch.logs import Announcer
from launch.reports import NO_REPORTS, Reports
from launch.runner import main_of, run_peer

if TYPE_CHECKING:
    from swarm.peer.backbone import Backbone

PROGRAM = "launch_backbone"


def parse(argv: Sequence[str]) -> Namespace:
    parser = LaunchParser(PROGRAM, "Bootstrap and coordinate a run. Needs no GPU; a run may have several.")
    add_run_options(parser)
    group = parser.add_argument_group("data (to create a run: its digest becomes part of the run)")
    add_data_options(group)
    add_model_option(group)
    add_network_options(parser)
    add_logging_options(parser)
    return parser.parse(argv)


def serve(options: Namespace, argv: list[str], reports: Reports) -> int:
    from launch.composing import announce, compose
    from swarm.peer.backbone import Backbone

    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)

    async def build() -> tuple[Backbone, Callable[[], None]]:
        context, _ = await compose(options, "backbone", max_inflight_bytes=available_memory() // 4)
        return Backbone(context), lambda: announce(PROGRAM, argv, context, "the backbone", announcer, reports)

    return run_peer(build, serves_until_stopped=True)


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
