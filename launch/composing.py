"""From valid options to a `PeerContext`: the run, sockets, identity, address. Knows no role's behaviour, nor torch."""

from __future__ import annotations

import random
import shlex
import socket
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from setproctitle import setproctitle

from launch.logs import Announcer
from launch.reports import Reports
from launch.run_files import DataPaths, build_config, create_run, read_run_file, with_model
from launch.state_directory import claim_directory
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.ids import Address, new_incarnation
from swarm.net.contact_file import ContactFile
from swarm.net.exchange import Bounds
from swarm.net.http import HttpTransport
from swarm.net.identity import Identity
from swarm.net.kademlia_dht import KademliaDht
from swarm.net.ports import bind_tcp_and_udp
from swarm.peer.context import PeerContext
from swarm.peer.joining import fetch_run, require_alone
from swarm.wire.messages import CommitRecord

IDENTITY_FILE = "identity.json"
CONTACTS_FILE = "contacts.json"
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run's verbatim configuration, where to bootstrap from, and what the joined peer says of it and of us."""

    config_bytes: bytes
    paths: DataPaths = field(default_factory=DataPaths)
    bootstrap: tuple[Address, ...] = ()
    #: Address that the joined peer saw us come from.
    seen_host: str = ""
    #: The newest that the joined peer knows.
    record: CommitRecord | None = None

    @property
    def config(self) -> RunConfig:
        return parse_config_bytes(self.config_bytes)


async def find_run(options: Namespace, transport: HttpTransport) -> KnownRun:
    """Create the run of `--run`, or fetch that of `--join`.

    Raises:
        ConfigError: the file or its data is unusable; or nobody answers.
    """
    if options.join is not None:
        again = getattr(options, "again", None)
        known = ContactFile(options.state_dir / CONTACTS_FILE).load() if again and options.state_dir is not None else []
        info = await fetch_run(transport, [options.join, *known], run=again, deadline_s=options.join_timeout)
        contacts = [Address(host, port) for host, port in info.contacts]
        bootstrap = tuple(dict.fromkeys([options.join, *contacts]))
        run = KnownRun(
            config_bytes=info.config.encode(), bootstrap=bootstrap, seen_host=info.seen_host, record=info.record
        )  # fmt: skip
        _ = run.config  # refused here if this version does not understand it
        return run
    run_file = read_run_file(options.run)
    paths = run_file.paths.overridden_by(options)
    if run_file.config_bytes is not None:
        return KnownRun(config_bytes=run_file.config_bytes, paths=paths)
    given = getattr(options, "model", None)
    overrides, _ = with_model({} if given is None else {"model": given})
    config = create_run(build_config(run_file, overrides), paths)
    if config.frozen:
        from models.registry import factory_of

        factory_of(config)  # that there are such parameters is seen before anyone joins
    return KnownRun(config_bytes=config.to_bytes(), paths=paths)


async def compose(options: Namespace, *, max_inflight_bytes: int) -> tuple[PeerContext, KnownRun]:
    """Bind the port, find the run, load the identity. Nothing is served yet.

    Raises:
        ConfigError: the address is taken, nobody answers, or the state directory is unusable, in use, or a copy of one
            in use.
    """
    tcp, udp, port = bind_tcp_and_udp(options.host, options.port)
    asker = HttpTransport()
    try:
        run = await find_run(options, asker)
        identity = _identity(options.state_dir)
        timing = run.config.timing
        advertise_host = options.public_host or _reachable_host(options.host, run.seen_host)
        own = Address(advertise_host, port)
        await require_alone(asker, identity.peer_id, run.record, own=own, deadline_s=timing.request_s / 2)
    except BaseException:
        tcp.close()
        udp.close()
        raise
    finally:
        await asker.close()
    context = PeerContext(
        config=run.config,
        config_bytes=run.config_bytes,
        identity=identity,
        incarnation=new_incarnation(random.SystemRandom()),
        transport=HttpTransport(host=options.host, sock=tcp, connect_s=timing.connect_s, heartbeat_s=timing.heartbeat_s,
                                bounds=Bounds(max_inflight_bytes=max_inflight_bytes)),
        dht=KademliaDht(identity=identity, sock=udp, advertise_host=advertise_host,
                        contacts_path=None if options.state_dir is None else options.state_dir / CONTACTS_FILE),
        rng=random.Random(random.SystemRandom().getrandbits(64)),
        advertise_host=advertise_host,
        bootstrap=run.bootstrap,
        state_dir=options.state_dir,
    )
    return context, run


def _identity(state_dir: Path | None) -> Identity:
    if state_dir is None:
        return Identity.ephemeral(random.SystemRandom())
    claim_directory(state_dir)
    return Identity.load_or_create(state_dir / IDENTITY_FILE)


def _reachable_host(host: str, seen_host: str) -> str:
    """The address others reach us at: the one we listen at, else how the joined peer sees us, else our way out."""
    if host not in _WILDCARDS:
        return host
    if seen_host and not seen_host.startswith("127.") and seen_host != "::1":
        return seen_host
    family, somewhere = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((somewhere, 9))  # sends nothing: only asks the kernel which interface it would use
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if host == "::" else "127.0.0.1"


def announce(
    program: str, argv: Sequence[str], context: PeerContext, what: str, announcer: Announcer, reports: Reports,
    *, fixed: Sequence[str] = (),
) -> None:  # fmt: skip
    """Tell everyone who waits that this peer is up: the process list, the terminal, the parent.

    `fixed` are options as they were chosen, for a parent that starts this program again.
    """
    port = context.transport.address.port
    retitle(program, argv, port)
    where = Address(context.advertise_host, port)
    announcer.say(f"serving {what} of run {context.run[:12]} at {where}", run=context.run, address=str(where))
    reports.send("serving", what=what, run=context.run, host=where.host, port=port, fixed=list(fixed))


def retitle(program: str, argv: Sequence[str], port: int) -> None:
    """Show the launcher's full command line, with the port it got, to `ps` and `pgrep -f`."""
    words = list(argv)
    if "--port" in words:
        words[words.index("--port") + 1] = str(port)
    else:
        words += ["--port", str(port)]
    setproctitle(f"{program} {shlex.join(words)}")
