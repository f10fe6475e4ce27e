"""`swarm_status HOST:PORT`: what a peer knows of its run, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.arguments import EXIT_DONE, LaunchParser, peer_address, positive_seconds
from launch.options import OutputOptions, add_output_options
from launch.processes.logs import console
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from swarm.base.errors import SwarmError, Unreachable
from swarm.base.ids import Address

if TYPE_CHECKING:
    from rich.table import Table

    from swarm.net.transport import Transport
    from swarm.wire.messages import Message, StatusReply

PROGRAM = "swarm_status"


@dataclass(frozen=True, kw_only=True)
class StatusOptions(OutputOptions):
    """What `swarm_status` was told."""

    address: Address
    timeout: float


def parse(argv: Sequence[str]) -> StatusOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(PROGRAM, "Show the run that a peer belongs to: its stages, their peers, and what each does.")
    parser.add_argument("address", metavar="HOST:PORT", type=peer_address, help="any peer of the run")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive_seconds, default=5.0, help="wait this long for each peer, in seconds"
    )
    add_output_options(parser)
    return parser.parse(argv, StatusOptions)


async def answer_of(transport: Transport, address: Address, message: Message, *, timeout_s: float) -> Message:
    """What the peer at `address` answers.

    Raises:
        SwarmError: nothing in time; the text names the address.
    """
    from swarm.net.visitor import answer_or_error

    answer = await answer_or_error(transport, address, message, timeout_s=timeout_s)
    if isinstance(answer, TimeoutError):
        raise SwarmError(f"nobody answers at {address} (waited {timeout_s:g} s)")
    if isinstance(answer, Unreachable):
        hint = "name a peer of the run that is up; launchers print where theirs serve"
        raise SwarmError(f"nobody can be reached at {address} ({answer}): {hint}")
    if isinstance(answer, Exception):
        raise answer
    return answer


async def ask(transport: Transport, address: Address, *, timeout_s: float) -> StatusReply:
    """How the peer at `address` is.

    Raises:
        SwarmError: it does not answer, or answers something else; the text names the address.
    """
    from swarm.wire.messages import Status, StatusReply

    reply = await answer_of(transport, address, Status(), timeout_s=timeout_s)
    if not isinstance(reply, StatusReply):
        raise SwarmError(f"{address} answered with {reply.__class__.__name__}, not its status")
    return reply


async def ask_all(address: Address, *, timeout_s: float) -> tuple[StatusReply, dict[Address, StatusReply | str]]:
    """The status of the peer at `address`, and of every stage peer it knows (or why it did not answer).

    Raises:
        SwarmError: the first peer does not answer.
    """
    from swarm.net.visitor import visiting

    async with visiting(connect_s=timeout_s) as transport:

        async def one(other: Address) -> StatusReply | str:
            try:
                return await ask(transport, other, timeout_s=timeout_s)
            except SwarmError as error:
                return str(error)

        first = await ask(transport, address, timeout_s=timeout_s)
        others = list(dict.fromkeys(Address(m.host, m.port) for members in first.stages for m in members))
        return first, dict(zip(others, await asyncio.gather(*map(one, others)), strict=True))


def table_of(first: StatusReply, others: dict[Address, StatusReply | str]) -> Table:
    """One row per stage peer, and one for the peer that was asked."""
    from rich.table import Table
    from rich.text import Text

    total = first.detail.get("total_steps")
    title = f"step {_known(first.step)}{f' of {total}' if total else ''}, head {first.version_id[:12] or '-'}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("stage", "peer", "address", "role", "state", "step", "head", "in flight", "tickets/s", "bound by"):
        table.add_column(heading, no_wrap=True, min_width=21 if heading == "address" else None)
    known = {Address(m.host, m.port): str(k) for k, members in enumerate(first.stages) for m in members}
    rows: dict[Address, StatusReply | str] = {Address(first.member.host, first.member.port): first}
    for address, reply in {**rows, **others}.items():
        stage = known.get(address, "-")
        if isinstance(reply, str):
            table.add_row(stage, "", Text(str(address)), "", Text("silent", style="red"), *5 * [""])
            continue
        table.add_row(
            stage,
            reply.member.peer[:8],
            Text(str(address)),
            reply.role,
            Text(reply.state),
            _known(reply.step),
            Text(reply.version_id[:8]),
            str(reply.detail.get("in_flight", "")),
            str(reply.detail.get("tickets_per_s", "")),
            str(reply.detail.get("bound", "")),
        )
    return table


def notes_of(first: StatusReply, others: dict[Address, StatusReply | str]) -> list[str]:
    """A line for each stage with what its peers can serve together, and one for each peer that a trainer gives no tickets."""
    replies = {reply.member.key: reply for reply in [first, *others.values()] if not isinstance(reply, str)}
    lines = []
    for stage, members in enumerate(first.stages):
        known = [replies[x.key].detail.get("tickets_per_s", 0.0) for x in members if x.key in replies]
        rates = [float(rate) for rate in known if rate]
        if rates:
            lines.append(f"stage {stage}: {sum(rates):.3g} tickets/s by {len(rates)} of {len(members)} peers")
    for reply in replies.values():
        if reply.role == "stage" and reply.detail.get("left_out"):
            lines.append(f"{reply.member.peer[:8]} of stage {reply.stage} gets no tickets: {reply.detail['left_out']}")
    return lines


def _known(step: int) -> str:
    return "-" if step < 0 else str(step)


def serve(options: StatusOptions, argv: list[str], reports: Reports) -> int:
    """Print what the peers know."""
    first, others = asyncio.run(ask_all(options.address, timeout_s=options.timeout))
    if options.log_format == "json":
        replies = [first, *(reply for reply in others.values() if not isinstance(reply, str))]
        silent = [str(address) for address, reply in others.items() if isinstance(reply, str)]
        print(json.dumps({"peers": [reply.model_dump(mode="json") for reply in replies], "silent": silent}))
    else:
        from rich.text import Text

        out = console()
        out.print(table_of(first, others))
        for line in notes_of(first, others):
            out.print(Text(line))
        for key, value in sorted(first.detail.items()):
            if value != "":
                out.print(Text(f"{key}: {value}"))
    return EXIT_DONE


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
