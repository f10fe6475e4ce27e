"""`swarm_control HOST:PORT pause|resume|stop`: an operator's word to a run, from the machine of its coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from launch.arguments import EXIT_DONE, LaunchParser, peer_address, positive_int, positive_seconds
from launch.options import OutputOptions, add_output_options
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from launch.status import answer_of
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.ids import Address

PROGRAM = "swarm_control"
ACTIONS = ("pause", "resume", "stop")


@dataclass(frozen=True, kw_only=True)
class ControlOptions(OutputOptions):
    """What `swarm_control` was told."""

    address: Address
    action: str
    at_step: int | None
    timeout: float


def parse(argv: Sequence[str]) -> ControlOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(
        PROGRAM,
        "Pause, resume or stop a run. A step under way ends first, and its state is written to "
        "disk. Works on the machine of the run's coordinator.",
    )
    parser.add_argument("address", metavar="HOST:PORT", type=peer_address, help="any peer of the run")
    parser.add_argument("action", choices=ACTIONS, help="what the run shall do")
    parser.add_argument(
        "--at-step",
        metavar="N",
        type=positive_int,
        default=None,
        help="with stop: once N steps have committed (default: after the step under way)",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive_seconds, default=5.0, help="wait this long for each answer, in seconds"
    )
    add_output_options(parser)
    return parser.parse(argv, ControlOptions)


async def operate(address: Address, action: str, *, at_step: int | None = None, timeout_s: float = 5.0) -> tuple[int, str]:
    """Have the run of the peer at `address` pause, resume or stop.

    Returns:
        Steps that have committed, and what will happen, in words.

    Raises:
        ConfigError: the run can do no such thing; the text says why.
        SwarmError: nobody answers, nobody coordinates, or it is refused; the text says why.
    """
    from swarm.base.config import run_id_of
    from swarm.net.visitor import visiting
    from swarm.wire.messages import Hello, Operate, Operated, Refusal, RunInfo

    async with visiting(connect_s=timeout_s) as transport:
        info = await answer_of(transport, address, Hello(), timeout_s=timeout_s)
        if not isinstance(info, RunInfo):
            raise SwarmError(f"{address} is no peer of a run")
        request = Operate(run=run_id_of(info.config.encode()), action=action, at_step=at_step)
        reply = await answer_of(transport, address, request, timeout_s=timeout_s)
        if isinstance(reply, Refusal) and reply.code == "unknown":
            if info.coordinator is None:
                raise SwarmError(f"{address} knows no coordinator: is a backbone or a trainer of the run up?")
            there = Address(info.coordinator.host, info.coordinator.port)
            reply = await answer_of(transport, there, request, timeout_s=timeout_s)
    if isinstance(reply, Refusal) and reply.code == "bad_request":
        raise ConfigError(reply.reason)
    if not isinstance(reply, Operated):
        raise SwarmError(reply.reason if isinstance(reply, Refusal) else f"answered by {reply.__class__.__name__}")
    return reply.step, reply.text


def serve(options: ControlOptions, argv: list[str], reports: Reports) -> int:
    """Tell the run what to do, and print what it answers."""
    if options.at_step is not None and options.action != "stop":
        raise ConfigError("--at-step goes with stop only")
    step, text = asyncio.run(operate(options.address, options.action, at_step=options.at_step, timeout_s=options.timeout))
    Announcer(PROGRAM, options.log_format, quiet=options.quiet).say(text, step=step, action=options.action)
    return EXIT_DONE


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
